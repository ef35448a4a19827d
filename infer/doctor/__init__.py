"""The command `doctor`: why are the drafts of a drafter rarely accepted, in our or another engine?
This package is optional. Only infer/cli/doctor.py imports it, and is removed together with it.
tests/test_layout.py lists what the package may import. Read examine.py first, then causes.py."""
