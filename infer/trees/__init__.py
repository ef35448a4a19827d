"""Draft trees: pure functions from a drafter's proposal to a tree, without any model.

May import infer.utils, infer.ngrams and infer.attention. Start with methods.py, the table, then
tree.py.
"""
