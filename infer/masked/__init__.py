"""Decoding with masked diffusion models, step by step or with self speculative decoding (the model
drafts for itself), and the evaluation of both.

This package is optional. No other package imports it; infer/targets/masked_models.py contains its
name. The table in tests/test_layout.py lists what it may import. Start reading at engine.py.
"""
