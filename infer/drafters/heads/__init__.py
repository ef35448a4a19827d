"""Conditional heads: small modules behind a drafter's block that make a token's score depend on the
tokens before it. A head is one file here (its formula, config keys and tensors) and a row of the
table. May import what drafters may. Start reading at table.py, then base.py (what every head
answers), then markov.py, then draft.py (a drafted block)."""
