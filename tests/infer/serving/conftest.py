"""Fixtures of server tests: small targets, because the number of layers does not matter here."""

from functools import partial

import pytest


@pytest.fixture(scope="session")
def make_tiny(make_tiny):
    """The factory of tiny targets, with three layers."""
    return partial(make_tiny, depth=3)


@pytest.fixture(scope="session")
def pair(load_program):
    """A small random target with the embedded tokenizer, and its drafter."""
    return load_program("fuzz_http").build_small_models()


@pytest.fixture(autouse=True)
def _no_retry_delay(monkeypatch):
    """Failed requests of `regenerate` are repeated without delay."""
    monkeypatch.setattr("infer.serving.clients.FIRST_RETRY_DELAY_SECONDS", 0.01)
