"""Conditional heads: small modules that run after a drafter's layers and make the score of a
drafted token depend on the drafted tokens before it. Each head is one file in this folder, with its
formula and tensors, and has an entry in the table of table.py. This package may import whatever
`infer.drafters` may import. Start reading at table.py, then base.py (the interface of every head),
then markov.py (an example), then draft.py (how a block is drafted with a head)."""
