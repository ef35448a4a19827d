"""The command `doctor`: find out why the draft tokens of a drafter are rarely accepted, in this
project's engine or in another one.

This package is optional: only infer/cli/doctor.py imports it, and both may be deleted together.
tests/test_layout.py lists what the package may import. Read examine.py first, then causes.py."""
