"""Helpers for every package: atomic file writes, compilation of CPU loops, removal of secrets,
option handling, and the start and end of a command.

This package may not import other packages of the project, and importing it must not import torch.
Start with hydra_app.py, which converts the command line to a dataclass of options.
"""
