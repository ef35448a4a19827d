"""The command `doctor`: why are a drafter's drafts rarely accepted, in our engine or in another one?
This package is optional. Only infer/cli/doctor.py imports it, and is removed together with it.
tests/test_layout.py lists what the package may import. Read examine.py first, then causes.py."""
