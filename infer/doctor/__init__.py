"""`doctor`: find out why a drafter's acceptance is low, in a folder or in a running engine.

An optional package: only infer/cli/doctor.py imports it, and is removed together with it. Its
allowed imports are in a table in tests/test_layout.py. Start with examine.py, then causes.py."""
