"""What every room may need: files that are there whole or not at all, machine code, redaction, the way
into a command.

May import no other room, and no torch where it is imported. Start with entry.py, from the command line
to a dataclass.
"""
