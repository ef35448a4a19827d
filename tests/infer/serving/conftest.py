"""A server does with a few layers what it does with many."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def make_tiny(make_tiny):
    """The factory, of targets of three layers."""
    return partial(make_tiny, depth=3)


@pytest.fixture(scope="session")
def pair(load_program):
    """A small random target with the embedded tokenizer, and its drafter."""
    return load_program("fuzz_http").small()


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch):
    """Requests of `regenerate` are repeated at once."""
    monkeypatch.setattr("infer.serving.clients.REST", 0.01)
