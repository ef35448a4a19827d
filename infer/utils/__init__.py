"""What every package may need: files that are there whole or not at all, machine code, redaction,
the way into a command.

May import no other package, and no torch where it is imported. Start with hydra_app.py, from the
command line to a dataclass.
"""
