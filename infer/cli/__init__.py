"""The commands that train nothing, one file each: the dataclass of its options and its `run`.
May import every package of infer but the optional ones, and `data`: infer.main imports a command's
file only when the command is called. Start with generate.py; models.py loads what several commands
need.
"""
