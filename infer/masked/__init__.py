"""Masked diffusion models that draft for themselves: decoding step by step and by self speculative
decoding, measured.

An optional package: nothing imports it, infer/targets/kinds.py names it. May import what a table in
tests/test_layout.py says. Start with engine.py.
"""
