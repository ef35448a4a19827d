"""Helpers for every package: atomic file writes, compilation of CPU loops, removal of secrets,
option handling, and the start and end of a command.

This package may import no other package of the project, nor torch at import time. Start with
hydra_app.py, which converts the command line to a dataclass of options.
"""
