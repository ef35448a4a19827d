"""Structured output: texts that a JSON schema, a regular expression or a grammar allows, and no
others.

llguidance compiles what is asked for and says which tokens may follow a text. The target chooses
among these alone, on its own path through the draft tree, so that the text is the one of
constrained plain decoding; the draft tree is the best one among what is allowed
(`infer/trees/constrained.py`).

V vocabulary.
"""

import json
import time
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from functools import lru_cache
from json import JSONDecodeError
from weakref import WeakKeyDictionary

import numpy as np
import torch

from infer.config import GRAMMARS, TextOptions
from infer.engine.trial import MAX_FORCED, build

MOST_LETTERS = 1 << 16  # of a schema, an expression or a grammar
MAX_PROPERTIES = 1000  # of a schema, in all its objects: optional ones cost their number squared
COMPILED = 64  # grammars that are kept
SLOW = 5e-3  # seconds of processor time for a token, above which drafts do not ask the grammar
_tokenizers: WeakKeyDictionary = WeakKeyDictionary()  # a model's tokenizer -> llguidance's


def asked_grammar(options: TextOptions) -> tuple[str, str] | None:
    """Return the kind and the text of the grammar that options ask for, None if they ask for
    none."""
    return next(
        ((kind, text) for kind in GRAMMARS if (text := getattr(options, kind)) is not None), None
    )


def follow(options: TextOptions, model) -> "GrammarState | None":
    """Return what holds a text to the grammar of its options, None if they ask for none. `model`: a
    Target. Raises ValueError, with the reason, for a grammar that cannot be followed."""
    asked = asked_grammar(options)
    if asked is None:
        return None
    return GrammarState(
        compile_grammar(*asked, grammar_tokenizer(model)), model.vocabulary, model.end_ids
    )


class GrammarState:
    """Where a text stands in its grammar. A place is a text, which only grows, and a path of
    drafted tokens behind it; the state goes from place to place by way of what the paths have in
    common: states of siblings are rolled back, not rebuilt. Where the grammar takes more than its
        limits behind a
    path, nothing may follow that."""

    def __init__(self, compiled, vocabulary: int, ends: Collection[int]) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.ends = sorted(ends)
        self.failed = False  # the text itself took more than the limits: it is cut there
        self.slow = False  # the newest answer took more than SLOW
        self._begin()

    def _begin(self) -> None:
        self.matcher = self.compiled.deep_copy()
        self.length = 0  # tokens of the text that were compared with what the matcher has consumed
        self.path: list[int] = []  # what it has consumed behind them

    def _go(self, text: list[int], path: list[int]) -> None:
        """Let the matcher consume the text and the path, and no more."""
        wanted = text[self.length :] + path
        pairs = zip(self.path, wanted, strict=False)
        common = next(
            (i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.path), len(wanted))
        )
        if common < len(self.path):
            self.matcher.rollback(len(self.path) - common)
        self.matcher.consume_tokens(wanted[common:])
        self.path = wanted[len(text) - self.length :]
        self.length = len(text)

    def allowed(self, text: list[int], path: list[int]) -> np.ndarray:
        """Return which tokens may follow a text's new tokens and a path: (V,) bool."""
        began = time.thread_time()
        self._go(text, path)
        within = not self.matcher.is_error() and len(self.matcher.compute_ff_bytes()) <= MAX_FORCED
        bits = self.matcher.compute_bitmask() if within else b""
        self.slow = time.thread_time() - began > SLOW
        if not within or self.matcher.is_error():
            self._begin()
            return np.zeros(self.vocabulary, bool)
        return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(bool)

    def drafted(self, text: list[int], path: list[int]) -> np.ndarray:
        """Return the same for a draft: nothing where the grammar is slow, which changes how much is
        drafted and not what is written."""
        return np.zeros(self.vocabulary, bool) if self.slow else self.allowed(text, path)

    def forced(self, text: list[int]) -> list[int]:
        """Return the tokens that write what the grammar forces behind a text: as the tokenizer
        writes it. A model may write the same letters in other tokens. Nothing where that is much,
        or the grammar slow."""
        if self.slow:
            return []
        self._go(text, [])
        within = not self.matcher.is_error() and len(self.matcher.compute_ff_bytes()) <= MAX_FORCED
        tokens = self.matcher.compute_ff_tokens() if within else []
        if self.matcher.is_error():
            self._begin()
            return []
        return tokens

    def mask(self, scores: torch.Tensor, text: list[int], path: list[int]) -> torch.Tensor:
        """Return scores (1, V) with minus infinity at tokens that may not follow. Where none may,
        the text ends."""
        allowed = self.allowed(text, path)[: scores.shape[-1]]
        if not allowed.any():
            self.failed = True
            allowed[self.ends] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)


def serialised_tokenizer(model) -> dict:
    """Return the arguments of llguidance's tokenizer, as JSON has them. Raises ValueError where
    there is none."""
    own = model.tokenizer
    if getattr(own, "backend_tokenizer", None) is None:
        raise ValueError(
            "a schema, an expression or a grammar needs a target with a fast tokenizer"
        )
    if not model.end_ids:
        raise ValueError("a schema, an expression or a grammar needs a target with an end token")
    backend = copy(own.backend_tokenizer)
    backend.no_padding()
    backend.no_truncation()
    size = model.vocabulary
    ends = sorted(model.end_ids)
    return {"tokenizer": backend.to_str(), "n_vocab": size, "eos_token": ends}


def grammar_tokenizer(model) -> object:
    """Return llguidance's view of a model's tokenizer. Raises ValueError where there is none to be
    had."""
    own = model.tokenizer
    if own is None or own not in _tokenizers:
        arguments = serialised_tokenizer(model)
        try:
            from llguidance import LLTokenizer
        except ImportError as missing:
            said = "a schema, an expression or a grammar needs llguidance: pip install llguidance"
            raise ValueError(said) from missing
        _tokenizers[own] = LLTokenizer(**arguments)
    return _tokenizers[own]


def check_grammar_size(kind: str, text: str) -> None:
    """Raise ValueError for a grammar that is too large to be compiled."""
    if len(text) > MOST_LETTERS:
        raise ValueError(f"{kind}: {len(text)} letters, {MOST_LETTERS} may be")
    if kind == "json_schema":
        with suppress(RecursionError, JSONDecodeError):  # llguidance says what is wrong with it
            check_properties(json.loads(text))


def check_properties(schema: object) -> None:
    """Raise ValueError for a JSON schema with too many properties."""
    properties = 0
    unseen = [schema]
    while unseen:
        part = unseen.pop()
        if isinstance(part, dict):
            named = part.get("properties")
            properties += len(named) if isinstance(named, dict) else 0
            unseen += part.values()
        elif isinstance(part, list):
            unseen += part
    if properties > MAX_PROPERTIES:
        raise ValueError(f"json_schema: {properties} properties, {MAX_PROPERTIES} may be")


@lru_cache(maxsize=COMPILED)
def compile_grammar(kind: str, text: str, tokenizer: object):
    """Return llguidance's matcher at the beginning of a text; take copies of it. Raises ValueError
    with the reason where the text is no grammar of its kind, or a too large one."""
    check_grammar_size(kind, text)
    return build(kind, text, tokenizer)
