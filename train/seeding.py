"""Random generators that depend only on seeds, so that a resumed run draws the same random numbers
as a run that was not stopped."""

import hashlib

import torch


def seeded_generator(*keys: int | str) -> torch.Generator:
    """Return a random generator whose numbers depend only on the keys, for example seed and
    step."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
