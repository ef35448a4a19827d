"""n-gram models in memory-mapped files: counting n-grams, looking them up, and rescoring drafted
tokens. This package does not import torch.

It may import infer.utils. Start reading at model.py, which has the file format and the lookups,
then count.py.
"""
