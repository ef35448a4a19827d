"""n-gram models in mapped files: counted from text, looked up. No torch here.

May import infer.utils. Start reading at model.py (the file and its lookups), then count.py.
"""
