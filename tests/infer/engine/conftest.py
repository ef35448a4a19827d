"""The engine's tests decode much: what they notice depends on no more than three layers."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def make_tiny(make_tiny):
    """The factory, of targets of three layers."""
    return partial(make_tiny, depth=3)
