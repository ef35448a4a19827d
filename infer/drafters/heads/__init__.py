"""Conditional heads: small modules that run after a drafter's layers and make the score of a
drafted token depend on the drafted tokens before it. Each head is one file in this folder and has
an entry in table.py. This package may import the same packages as `infer.drafters`. Start reading
at table.py, then base.py (the interface), markov.py (an example) and draft.py."""
