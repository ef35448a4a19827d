"""The commands except training. Each file defines one command, with an option dataclass and a
function `run`.

This package may import `data` and every package of infer except the optional packages. infer.main
imports the file of a command when that command is called. generate.py is the simplest command.
models.py loads targets and drafters.
"""
