"""Masked diffusion models that draft for themselves: step-by-step decoding, self speculative
decoding, and their evaluation.

An optional package: nothing imports it, infer/targets/masked_models.py names it. What it may import
is in the table of tests/test_layout.py. Start with engine.py.
"""
