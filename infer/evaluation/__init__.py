"""Measure acceptance and speed: evaluations, question suites, reports, model cards, and the check
that outputs are lossless.

May import every package of infer but serving, cli and the optional ones. Start with results.py (the
data that is stored), then evaluate.py.
"""
