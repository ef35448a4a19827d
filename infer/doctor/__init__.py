"""`doctor`: why a drafter's acceptance is low, in a folder or at an engine.

An optional package: infer/cli/doctor.py alone imports it, and goes with it. May import what a table
in tests/test_layout.py says. Start with examine.py, then causes.py.
"""
