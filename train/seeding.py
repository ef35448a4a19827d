"""Random generators that depend only on seeds, so that a resumed run draws the same random numbers
as a run that was not stopped."""

import hashlib

import torch


def seeded_generator(*keys: int | str) -> torch.Generator:
    """Return a random generator that is seeded with a hash of the keys, for example of seed and
    step. The same keys always give the same random numbers."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
