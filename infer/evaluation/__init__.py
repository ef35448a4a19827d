"""Measured acceptance and speed: evaluations, question suites, reports, model cards, and the check of
finished texts.

May import every room of infer but serving and cli. Start with results.py (the numbers), then
evaluate.py.
"""
