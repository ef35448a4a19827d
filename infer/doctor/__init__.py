"""The command `doctor`: find out why this project's engine, or another engine, accepts few draft
tokens of a drafter.

This package is optional: only infer/cli/doctor.py imports it, and both may be deleted together.
tests/test_layout.py lists what the package may import. Read examine.py first, then causes.py."""
