"""Attention of targets and drafters: the key/value cache, and masks for training and decoding.

May import infer.utils. Start with kv_cache.py, which all decoding uses; masks.py has the training
mask.
"""
