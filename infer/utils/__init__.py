"""Helpers for every package: atomic file writes, compiled CPU loops, redaction of secrets, option
handling, and the start and end of a command.

May import no other package, and no torch at import time. Start with hydra_app.py, which turns the
command line into a dataclass of options.
"""
