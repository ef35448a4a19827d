"""Masked diffusion models that draft for themselves: loading, step-by-step decoding and self speculative decoding.

May import infer.engine and all that the engine may import. Start with engine.py, then drafting.py.
"""
