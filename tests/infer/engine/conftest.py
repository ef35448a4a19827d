"""Fixtures of the engine's tests. These decode many tokens, so their targets are small."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def make_tiny(make_tiny):
    """Return the factory `make_tiny` for targets of three layers."""
    return partial(make_tiny, depth=3)
