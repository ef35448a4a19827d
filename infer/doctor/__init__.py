"""`doctor`: why a drafter's acceptance is low, in a folder or at an engine.

May import what a table in tests/test_layout.py says; only infer.cli imports it. Start with examine.py,
then causes.py.
"""
