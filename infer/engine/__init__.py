"""Decoding with a causal target: the round loop, the scheduler, sampling, verification, and the
node budget.

May import infer.targets, drafters, trees, ngrams, attention and utils. Start with round.py, then
engine.py.
"""
