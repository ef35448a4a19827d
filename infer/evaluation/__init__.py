"""Measures the acceptance and the speed of drafters: evaluations, question suites, reports, model
cards, and the check that outputs are lossless.

This package may import every package of infer except serving, cli and the optional packages. Read
results.py first, which defines the stored results, and then evaluate.py.
"""
