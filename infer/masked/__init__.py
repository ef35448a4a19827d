"""Masked diffusion models that draft for themselves: step-by-step decoding, self speculative
decoding, and their evaluation.

This package is optional. No other package imports it; infer/targets/kinds.py contains its name. The
table in tests/test_layout.py lists what it may import. Start reading at engine.py.
"""
