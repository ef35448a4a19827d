"""Decoding with a causal target: the round loop, the scheduler, sampling, verification, and the
node budget.

This package may import infer.targets, infer.drafters, infer.trees, infer.ngrams, infer.attention
and infer.utils. Start reading at round.py, then engine.py.
"""
