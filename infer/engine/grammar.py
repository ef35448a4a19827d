"""Structured output: restrict an output to a JSON schema, a regular expression or a grammar. All
three are called grammars here.

llguidance compiles the grammar and computes which tokens may come next. After each node of its path
through the draft tree, the target chooses among the allowed tokens only. The output is therefore
the same as that of baseline decoding under the grammar. The draft tree is the best tree that the
grammar allows (`infer/trees/constrained.py`).
"""

import json
import time
from collections.abc import Collection
from contextlib import suppress
from copy import copy
from functools import lru_cache
from json import JSONDecodeError
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch

from infer.config import GRAMMAR_OPTIONS, SamplingOptions
from infer.engine.grammar_sandbox import MAX_BYTES_FORCED_BY_GRAMMAR, build_matcher
from infer.targets.target import Target

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMAR_CHARS = 1 << 16
# Maximum number of properties in a JSON schema, over all its objects. The cost of optional
# properties grows with the square of their number.
MAX_SCHEMA_PROPERTIES = 1000
MAX_CACHED_GRAMMARS = 64
# If computing the last mask of allowed tokens took more CPU seconds than this, the next round
# drafts nothing for the sequence.
SLOW_GRAMMAR_TOKEN_MASK_SECONDS = 5e-3
# keys: the targets' tokenizers; values: llguidance's versions of these tokenizers
_grammar_tokenizers: WeakKeyDictionary[Any, "LLTokenizer"] = WeakKeyDictionary()


def get_grammar_option(options: SamplingOptions) -> tuple[str, str] | None:
    """Return the grammar that the options ask for, as the option's name (such as "json_schema") and
    the source text. Return None if they ask for no grammar."""
    for kind in GRAMMAR_OPTIONS:
        source = getattr(options, kind)
        if source is not None:
            return kind, source
    return None


def make_grammar_state(options: SamplingOptions, target: Target) -> "GrammarState | None":
    """Compile the grammar that the options ask for, and return its state at the beginning of the
    output. Return None if they ask for no grammar. Raises ValueError if llguidance does not accept
    the grammar."""
    grammar = get_grammar_option(options)
    if grammar is None:
        return None
    kind, source = grammar
    compiled = compile_grammar(kind, source, get_grammar_tokenizer(target))
    return GrammarState(compiled, target.vocab_size, target.eos_token_ids)


class GrammarState:
    """Tracks which tokens a grammar allows after a sequence's output and after drafted tokens.

    The methods take all output tokens of the sequence, and a path of drafted tokens after the
    output. From call to call the path may change in any way, but the output may only become longer.
    llguidance's matcher is rolled back only to the first token that differs from the previous call.

    If llguidance reports that one of its limits is exceeded, no token is allowed.
    """

    def __init__(
        self, compiled: "LLMatcher", vocab_size: int, eos_token_ids: Collection[int]
    ) -> None:
        self.compiled = compiled
        self.vocab_size = vocab_size
        self.eos_token_ids = sorted(eos_token_ids)
        # Whether the grammar allowed no token after the output (without drafted tokens). If so, the
        # sequence ends.
        self.failed = False
        self.is_slow = False  # whether the last mask was slow, see SLOW_GRAMMAR_TOKEN_MASK_SECONDS
        self._restart()

    def _restart(self) -> None:
        """Move the matcher back to the beginning of the output."""
        self.matcher = self.compiled.deep_copy()
        # number of output tokens that the matcher has consumed and never rolls back
        self.checked_length = 0
        # drafted tokens that the matcher has consumed after the output tokens
        self.consumed: list[int] = []

    def _move_matcher_to(self, output_ids: list[int], path: list[int]) -> None:
        """Make the matcher consume the output tokens and then the path. If it has already consumed
        tokens that differ from these, it is first rolled back to the last token before the
        difference."""
        tokens = output_ids[self.checked_length :] + path
        common = 0
        while (
            common < min(len(self.consumed), len(tokens))
            and self.consumed[common] == tokens[common]
        ):
            common += 1
        if common < len(self.consumed):
            self.matcher.rollback(len(self.consumed) - common)
        self.matcher.consume_tokens(tokens[common:])
        self.consumed = tokens[len(output_ids) - self.checked_length :]
        self.checked_length = len(output_ids)

    def _is_within_limits(self) -> bool:
        """Return whether the matcher has no error, and the text that the grammar forces next has at
        most MAX_BYTES_FORCED_BY_GRAMMAR bytes."""
        if self.matcher.is_error():
            return False
        return len(self.matcher.compute_ff_bytes()) <= MAX_BYTES_FORCED_BY_GRAMMAR

    def compute_allowed_mask(self, output_ids: list[int], path: list[int]) -> np.ndarray:
        """Return a mask (vocab_size,) bool of the tokens that the grammar allows after the output
        and the path."""
        start = time.thread_time()
        self._move_matcher_to(output_ids, path)
        is_within_limits = self._is_within_limits()
        bitmask = self.matcher.compute_bitmask() if is_within_limits else b""
        self.is_slow = time.thread_time() - start > SLOW_GRAMMAR_TOKEN_MASK_SECONDS
        if not is_within_limits or self.matcher.is_error():
            self._restart()
            return np.zeros(self.vocab_size, bool)
        return np.unpackbits(np.frombuffer(bitmask, np.uint8), bitorder="little").view(bool)

    def compute_allowed_draft_mask(self, output_ids: list[int], path: list[int]) -> np.ndarray:
        """Return a mask (vocab_size,) bool of the tokens that may be drafted after the output and
        the path.

        If computing masks is slow for this grammar, the mask is all false: fewer tokens are
        drafted, but the output stays the same.
        """
        if self.is_slow:
            return np.zeros(self.vocab_size, bool)
        return self.compute_allowed_mask(output_ids, path)

    def forced_tokens(self, output_ids: list[int]) -> list[int]:
        """Return the tokens of the text that the grammar forces after the output. The list is empty
        if no text is forced, if the text is long, or if computing masks is slow for this grammar.

        The tokens are those into which the tokenizer splits the text. The model may generate the
        same text with other tokens.
        """
        if self.is_slow:
            return []
        self._move_matcher_to(output_ids, [])
        tokens = self.matcher.compute_ff_tokens() if self._is_within_limits() else []
        if self.matcher.is_error():
            self._restart()
            return []
        return tokens

    def mask_scores(
        self, scores: torch.Tensor, output_ids: list[int], path: list[int]
    ) -> torch.Tensor:
        """Return a copy of `scores` (1, vocab_size) with minus infinity for all tokens that the
        grammar forbids after the output and the path. If the grammar forbids all tokens, only end
        tokens are allowed."""
        allowed = self.compute_allowed_mask(output_ids, path)[: scores.shape[-1]]
        if not allowed.any():
            self.failed = True
            allowed[self.eos_token_ids] = True
        return scores.masked_fill(~torch.from_numpy(allowed).to(scores.device), -torch.inf)


def serialise_tokenizer(target: Target) -> dict:
    """Return the arguments of llguidance's LLTokenizer for the target's tokenizer, as a dictionary
    that can be converted to JSON. Raises ValueError if the target has no fast tokenizer or no end
    token."""
    fast_tokenizer = getattr(target.tokenizer, "backend_tokenizer", None)
    if fast_tokenizer is None:
        raise ValueError(
            f"{', '.join(GRAMMAR_OPTIONS)} need a target with a fast tokenizer, and this target "
            "has none; leave these options out"
        )
    if not target.eos_token_ids:
        raise ValueError(
            f"{', '.join(GRAMMAR_OPTIONS)} need a target with an end token, and this target has "
            "none; leave these options out"
        )
    fast_tokenizer = copy(fast_tokenizer)
    fast_tokenizer.no_padding()
    fast_tokenizer.no_truncation()
    return {
        "tokenizer": fast_tokenizer.to_str(),
        "n_vocab": target.vocab_size,
        "eos_token": sorted(target.eos_token_ids),
    }


def get_grammar_tokenizer(target: Target) -> "LLTokenizer":
    """Return llguidance's version of the target's tokenizer. It is created once per tokenizer.
    Raises ValueError if the tokenizer is not supported or llguidance is not installed."""
    tokenizer = target.tokenizer
    if tokenizer is None or tokenizer not in _grammar_tokenizers:
        arguments = serialise_tokenizer(target)
        try:
            from llguidance import LLTokenizer
        except ImportError as error:
            raise ValueError(
                f"{', '.join(GRAMMAR_OPTIONS)} need the package llguidance, which is not "
                "installed; run: pip install llguidance"
            ) from error
        _grammar_tokenizers[tokenizer] = LLTokenizer(**arguments)
    return _grammar_tokenizers[tokenizer]


def check_grammar_size(kind: str, source: str) -> None:
    """Raise ValueError if a grammar has too many characters, or if a JSON schema has too many
    properties. `kind` is the name of the grammar option."""
    if len(source) > MAX_GRAMMAR_CHARS:
        raise ValueError(
            f"{kind} has {len(source)} characters; at most {MAX_GRAMMAR_CHARS} are allowed; "
            "shorten it"
        )
    if kind == "json_schema":
        # Ignore invalid JSON here: llguidance reports it when it compiles the schema.
        with suppress(RecursionError, JSONDecodeError):
            check_property_count(json.loads(source))


def check_property_count(schema: object) -> None:
    """Raise ValueError if a JSON schema has more than MAX_SCHEMA_PROPERTIES properties."""
    num_properties = 0
    stack = [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            properties = value.get("properties")
            if isinstance(properties, dict):
                num_properties += len(properties)
            stack += value.values()
        elif isinstance(value, list):
            stack += value
    if num_properties > MAX_SCHEMA_PROPERTIES:
        raise ValueError(
            f"json_schema has {num_properties} properties; at most {MAX_SCHEMA_PROPERTIES} are "
            "allowed; remove some"
        )


@lru_cache(maxsize=MAX_CACHED_GRAMMARS)
def compile_grammar(kind: str, source: str, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Compile a grammar, and return llguidance's matcher at the beginning of an output. `kind` is
    the name of the grammar option. The result is cached, so callers must copy the matcher before
    use. Raises ValueError if the grammar is invalid or too large."""
    check_grammar_size(kind, source)
    return build_matcher(kind, source, tokenizer)
