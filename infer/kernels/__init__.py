"""Operations for running models and for searching the nodes of draft trees. Each operation has a
reference implementation in PyTorch; some have fast versions for some devices.

`table.py` selects the implementation of each operation. Start reading there.
"""
