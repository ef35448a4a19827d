"""Attention of targets and drafters: the KV cache, and the attention masks for training and
decoding.

This package may import infer.utils. Start reading with kv_cache.py, which all decoding uses;
masks.py has the attention masks.
"""
