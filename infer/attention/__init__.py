"""Attention of targets and drafters: the key/value cache, masks for training and decoding, a kernel
for trees.

May import infer.utils. Start with kv_cache.py, which all decoding goes through; masks.py has the
training mask.
"""
