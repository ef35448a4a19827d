"""Masked diffusion models that draft for themselves: decoding step by step and by self speculative
decoding, measured.

May import what a table in tests/test_layout.py says; infer.api and infer.cli import it. Start with
engine.py.
"""
