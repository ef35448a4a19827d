"""The command `doctor` finds out why a drafter's drafts are rarely accepted, in our engine or in
another one that is running.

This package is optional. Only infer/cli/doctor.py imports it, and that file is removed together
with it. A table in tests/test_layout.py lists what the package may import. Read examine.py first,
and then causes.py.
"""
