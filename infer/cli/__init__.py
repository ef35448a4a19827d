"""The commands of `blockdraft`, except training. Each file implements one command: it defines the
command's option dataclass and its function `run`. infer.main imports the file when the command is
called. Start with generate.py, the simplest command. models.py loads targets and drafters.

This package may import `data` and all packages of infer except the optional ones."""
