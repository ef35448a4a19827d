"""Structured output: texts that a JSON schema, a regular expression or a grammar allows, and no others.

llguidance compiles what is asked for and says which tokens may follow a text. The target chooses among these alone, on
its own path through the draft tree, so that the text is the one of constrained plain decoding; the draft tree is the
best one among what is allowed (`infer/trees/constrained.py`).

V vocabulary.
"""

import threading
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch

from infer.config import GRAMMARS, TextOptions

# What strangers' grammars may take: llguidance's own limits on what its lexer does, and less than its own of the rest.
LIMITS = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": False,
    "verbose_errors": False,
}
MOST_LETTERS = 1 << 16  # of a schema, an expression or a grammar
STACK = 512 << 20  # bytes, of which only those are taken that are needed
COMPILED = 32  # grammars that are kept
_tokenizers: WeakKeyDictionary = WeakKeyDictionary()  # a model's tokenizer -> llguidance's


def asked_grammar(options: TextOptions) -> tuple[str, str] | None:
    """Return the kind and the text of the grammar that options ask for, None if they ask for none."""
    return next(((kind, text) for kind in GRAMMARS if (text := getattr(options, kind)) is not None), None)


def check_grammar(options: TextOptions, model) -> None:
    """Raise ValueError, with the reason, for a grammar that cannot be followed. `model`: a Target."""
    if (asked := asked_grammar(options)) is not None:
        compile_grammar(*asked, _tokenizer(model))


def follow(options: TextOptions, model) -> "GrammarState | None":
    """Return what holds a text to the grammar of its options, None if they ask for none."""
    asked = asked_grammar(options)
    if asked is None:
        return None
    return GrammarState(compile_grammar(*asked, _tokenizer(model)), model.head_weight.shape[0], model.end_ids)


class GrammarState:
    """Where a text stands in its grammar. A place is a text, which only grows, and a path of drafted tokens behind it;
    the state goes from place to place by way of what the paths have in common: states of siblings are rolled back, not
    rebuilt. Where the grammar takes more than its limits behind a path, nothing may follow that."""

    def __init__(self, compiled, vocabulary: int, ends: Collection[int]) -> None:
        self.compiled, self.vocabulary, self.ends = compiled, vocabulary, sorted(ends)
        self.failed = False  # the text itself took more than the limits: it is cut there
        self._begin()

    def _begin(self) -> None:
        self.matcher = self.compiled.deep_copy()
        self.length = 0  # tokens of the text that were compared with what the matcher has consumed
        self.path: list[int] = []  # what it has consumed behind them

    def _go(self, text: list[int], path: list[int]) -> None:
        """Let the matcher consume the text and the path, and no more."""
        wanted = text[self.length :] + path
        pairs = zip(self.path, wanted, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(self.path), len(wanted)))
        if common < len(self.path):
            self.matcher.rollback(len(self.path) - common)
        self.matcher.consume_tokens(wanted[common:])
        self.path, self.length = wanted[len(text) - self.length :], len(text)

    def allowed(self, text: list[int], path: list[int]) -> np.ndarray:
        """Return which tokens may follow a text's new tokens and a path: (V,) bool."""
        self._go(text, path)
        bits = b"" if self.matcher.is_error() else self.matcher.compute_bitmask()
        if self.matcher.is_error():
            self._begin()
            return np.zeros(self.vocabulary, bool)
        return np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little").view(bool)

    def forced(self, text: list[int]) -> list[int]:
        """Return the tokens that write what the grammar forces behind a text: as the tokenizer writes it. A model may
        write the same letters in other tokens."""
        self._go(text, [])
        tokens = [] if self.matcher.is_error() else self.matcher.compute_ff_tokens()
        if self.matcher.is_error():
            self._begin()
            return []
        return tokens

    def mask(self, scores: torch.Tensor, text: list[int], path: list[int]) -> torch.Tensor:
        """Return scores (1, V) with minus infinity at tokens that may not follow. Where none may, the text ends."""
        allowed = self.allowed(text, path)[: scores.shape[-1]]
        if not allowed.any():
            self.failed = True
            allowed[self.ends] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)


def _tokenizer(model) -> object:
    """Return llguidance's view of a model's tokenizer. Raises ValueError where there is none to be had."""
    own = model.tokenizer
    if getattr(own, "backend_tokenizer", None) is None:
        raise ValueError("a schema, an expression or a grammar needs a target with a fast tokenizer")
    if not model.end_ids:
        raise ValueError("a schema, an expression or a grammar needs a target with an end token")
    if own not in _tokenizers:
        _llguidance()
        from llguidance.hf import from_tokenizer

        _tokenizers[own] = from_tokenizer(own, n_vocab=model.head_weight.shape[0], eos_token=sorted(model.end_ids))
    return _tokenizers[own]


def with_deep_stack(function: Callable[[], object]) -> object:
    """Return a function's result, computed where rules that refer to rules, thousands deep, end in no overflow of the
    stack, which would end the process."""
    before = threading.stack_size(STACK)
    try:
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()
    finally:
        threading.stack_size(before)


@lru_cache(maxsize=COMPILED)
def compile_grammar(kind: str, text: str, tokenizer: object):
    """Return llguidance's matcher at the beginning of a text; take copies of it. Raises ValueError with the reason
    where the text is no grammar of its kind, or a too large one."""
    guidance = _llguidance()
    if len(text) > MOST_LETTERS:
        raise ValueError(f"{kind}: {len(text)} letters, {MOST_LETTERS} may be")
    make: dict[str, Callable[[str], str]] = {
        "json_schema": guidance.LLMatcher.grammar_from_json_schema,
        "regex": guidance.LLMatcher.grammar_from_regex,
        "grammar": guidance.LLMatcher.grammar_from_lark,
    }
    limits = guidance.LLParserLimits(**LIMITS)
    try:
        matcher = with_deep_stack(lambda: guidance.LLMatcher(tokenizer, make[kind](text), log_level=0, limits=limits))
    except ValueError as wrong:
        raise ValueError(f"{kind}: {wrong}") from wrong
    if matcher.is_error():
        raise ValueError(f"{kind}: {matcher.get_error()}")
    return matcher


def _llguidance():
    try:
        import llguidance
    except ImportError as missing:
        raise ValueError("a schema, an expression or a grammar needs llguidance: pip install llguidance") from missing
    return llguidance
