"""Operations that have a PyTorch reference and fast versions for some devices.

`table.py` selects the implementation of each operation. Start reading there.
"""
