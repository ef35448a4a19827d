"""Random generators that depend only on seeds, so that a resumed run draws the same numbers."""

import hashlib

import torch


def seeded_generator(*keys: int | str) -> torch.Generator:
    """Return a random generator that depends only on the keys (seed, step, rank, ...)."""
    digest = hashlib.sha256(repr(keys).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
