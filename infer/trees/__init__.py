"""Draft trees: pure functions that build a draft tree from a drafter's proposal. They use no model.

This package may import infer.utils, infer.ngrams and infer.attention. Start reading at methods.py,
which contains the table of tree methods, then tree.py.
"""
