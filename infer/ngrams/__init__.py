"""n-gram models in mapped files: counted from text, taken over from others, added up, looked up. No
torch here. May import infer.utils.
Start reading at model.py (the file and its lookups), then count.py."""
