"""Conditional heads: small modules after a drafter's block that make a token's score depend on the
tokens before it. A head is one file in this folder (its formula, config keys and tensors) and an
entry of the table. May import what `infer.drafters` may. Start reading at table.py, then base.py
(the interface of every head), then markov.py, then draft.py (a drafted block)."""
