"""Decoding with an autoregressive target model: the round loop, the scheduler, sampling,
verification, and the node budget (the number of tree nodes verified per round).

This package may import infer.targets, infer.drafters, infer.trees, infer.ngrams, infer.attention
and infer.utils. Start reading at round.py, then engine.py.
"""
