"""n-gram models in memory-mapped files: counting, lookups, rescoring of drafted tokens. No torch.

May import infer.utils. Start reading at model.py (the file and its lookups), then count.py.
"""
