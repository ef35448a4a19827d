"""Operations of models and draft trees: PyTorch references, and fast versions for some devices.

`table.py` selects the implementation of each operation. Start reading there.
"""
