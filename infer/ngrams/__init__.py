"""n-gram models in memory-mapped files: count n-grams, look them up, and rescore the candidate
tokens of a draft tree. This package does not import torch.

It may import infer.utils. Start reading at model.py, which has the file format and the lookups,
then count.py.
"""
