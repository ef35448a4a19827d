"""Measures the acceptance and the speed of drafters, and checks that outputs are lossless.

The package also evaluates question suites and writes reports and model cards. It may import every
package of infer except serving, cli and the optional packages. Read results.py first, which defines
the stored results, and then evaluate.py.
"""
