"""Measured acceptance and speed: evaluations, question suites, reports, model cards, and the check
of finished texts.

May import every package of infer but serving, cli and the optional ones. Start with results.py (the
numbers), then evaluate.py.
"""
