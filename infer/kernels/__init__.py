"""Operations that have more than one implementation: a PyTorch reference of each and at most one
fast version per device. `table.py` selects them; start reading there."""
