"""The commands except training, one file each with its option dataclass and its function `run`.

May import every package of infer but the optional ones, and `data`. infer.main imports the file of
a command when it is called. Start with generate.py; models.py loads targets and drafters.
"""
