"""A sequence that is being decoded: its tokens, where its output ends, and statistics of its
decoding."""

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from infer.config import SamplingOptions
from infer.engine.detokenize import completes_stop_string
from infer.engine.grammar import GrammarState, make_grammar_state
from infer.engine.prefix_cache import PrefixCacheBlock
from infer.engine.repetition import find_loop_period
from infer.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DECODE_STAGES = ("prefill", "draft", "build", "verify", "commit")

# A Hugging Face logits processor. It takes token ids (1, num_tokens) and scores (1, vocab_size),
# and returns scores (1, vocab_size).
LogitsProcessor = abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Stopwatch:
    """Measures the seconds of each stage of decoding. `clock` returns the time in seconds; on CUDA
    it must synchronise with the device."""

    def __init__(self, clock: abc.Callable[[], float]) -> None:
        self.clock = clock
        self.stage_start = 0.0
        self.seconds = dict.fromkeys(DECODE_STAGES, 0.0)

    def start(self) -> float:
        """Begin the first stage, and return the current time of `clock`."""
        self.stage_start = self.clock()
        return self.stage_start

    def lap(self, stage: str) -> None:
        """End the current stage, add its seconds to `seconds[stage]`, and begin the next stage."""
        now = self.clock()
        self.seconds[stage] += now - self.stage_start
        self.stage_start = now


@dataclass
class DecodeStats:
    """Statistics of decoding one sequence: numbers of tokens and rounds, and seconds.

    A round commits the accepted drafted tokens and the next bonus token. The prefill yields the
    first bonus token, so `tokens` is 1 plus the number of tokens that all rounds committed.
    `seconds` is the wall-clock time from the admission to the end of the sequence; time spent on
    other sequences of the batch is included.
    """

    prompt_tokens: int
    tokens: int = 0  # number of output tokens
    cached_tokens: int = 0  # number of prompt tokens found in the prefix cache
    rounds: int = 0
    # Entry i is the number of rounds that committed i + 1 output tokens.
    histogram: list[int] = field(default_factory=list)
    seconds: float = 0.0  # seconds of wall-clock time, prefill included
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(DECODE_STAGES, 0.0)
    )

    @property
    def tau(self) -> float:
        """Acceptance length: the average number of tokens that a round committed."""
        return (self.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of an output token, and of the likeliest tokens at the same
    position."""

    logprob: float
    top: list[tuple[int, float]]  # (token id, log-probability) pairs, likeliest first


class Admission(NamedTuple):
    """When a sequence was admitted (seconds of the engine's clock), and how many seconds each
    decoding stage of the engine had taken up to then."""

    time: float
    stage_seconds: dict[str, float]


@dataclass(eq=False)
class Sequence:
    """A prompt and the output so far. The sequence may be waiting, prefilling, running or
    finished."""

    prompt: list[int]
    options: SamplingOptions
    # Hugging Face logits processors. They are applied before the penalty, temperature and filters
    # of `options`.
    processors: abc.Sequence[LogitsProcessor] = ()
    grammar: GrammarState | None = None  # the grammar that the output must follow
    stats: DecodeStats = field(init=False)
    ids: list[int] = field(default_factory=list)  # output token ids
    # Number of output tokens committed by the prefill (first entry) and by each round.
    commits: list[int] = field(default_factory=list)
    # for each round: number of drafted nodes that were verified
    drafted: list[int] = field(default_factory=list)
    # For each round: number of accepted nodes, including nodes after the end of the output.
    accepted: list[int] = field(default_factory=list)
    # One entry per output token if `options.logprobs` is set, otherwise empty.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # For each round: the tokens of the likeliest path that the target rejected. Recorded only if
    # `records_rejected` is true.
    rejected: list[list[int]] = field(default_factory=list)
    records_rejected: bool = False
    # Why the output ended: "stop" (an end token or a stop string), "loop" (endless repetition),
    # "length" or "cancelled". None while the sequence is unfinished.
    finish_reason: str | None = None
    cancelled: bool = False
    admission: Admission | None = None
    arrival_index: int = 0
    # number of leading tokens whose KV cache entries come from the prefix cache
    cached_length: int = 0
    # The blocks of the prefix cache that match the beginning of the sequence. Empty again once they
    # are copied into the sequence's batch row.
    prefix_blocks: list[PrefixCacheBlock] = field(default_factory=list)
    # The last result of `last_tokens`, and the number of output tokens when it was computed.
    _last_tokens: np.ndarray | None = field(default=None, init=False)
    _last_tokens_length: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.stats = DecodeStats(prompt_tokens=len(self.prompt))

    @property
    def has_processors_or_grammar(self) -> bool:
        """Whether logits processors or a grammar change the target's logits for this sequence."""
        return bool(self.processors) or self.grammar is not None

    @property
    def token_ids(self) -> list[int]:
        """The prompt and the output so far."""
        return self.prompt + self.ids

    def last_tokens(self, max_tokens: int) -> np.ndarray:
        """Return the last `max_tokens` tokens of prompt and output (or all, if there are fewer) as
        an int64 array."""
        last_tokens = self._last_tokens
        if last_tokens is None:
            last_tokens = np.array(self.prompt[-max_tokens:], np.int64)
        new_tokens = np.array(self.ids[self._last_tokens_length :], np.int64)
        self._last_tokens = np.concatenate([last_tokens, new_tokens])[-max_tokens:]
        self._last_tokens_length = len(self.ids)
        return self._last_tokens

    def append(self, new_ids: list[int], target: Target) -> None:
        """Append the tokens of a round to the output. If the sequence ends at one of them, remove
        the tokens after it and set `finish_reason`."""
        old_length = len(self.ids)
        ids = self.ids + new_ids
        end = find_sequence_end(ids, old_length, self.options, target)
        if end is None:
            new_length = len(ids)
            self.finish_reason = None
        else:
            new_length, self.finish_reason = end
        if self.finish_reason == "stop" and self.grammar is not None and self.grammar.failed:
            self.finish_reason = "length"
        self.ids += ids[old_length:new_length]
        del self.logprobs[len(self.ids) :]
        self.commits.append(len(self.ids) - old_length)


def check_options(options: SamplingOptions, target: Target) -> None:
    """Raise ValueError if the options are invalid or this target does not support them."""
    options.check()
    if options.stop and target.tokenizer is None:
        raise ValueError(
            "stop strings need a tokenizer, and this target has none; load the target with "
            "load_target"
        )
    make_grammar_state(options, target)


def check_prompt(
    prompt: list[int], options: SamplingOptions, capacity: int, vocab_size: int
) -> None:
    """Raise ValueError if the prompt is empty, contains token ids outside the vocabulary, or is too
    long: prompt and `options.max_new_tokens` together may have at most `capacity` tokens."""
    if not prompt:
        raise ValueError("the prompt is empty, but every prompt needs at least one token")
    for id in (min(prompt), max(prompt)):
        if not 0 <= id < vocab_size:
            raise ValueError(
                f"the prompt contains the token id {id}, but the model has only the ids 0 to "
                f"{vocab_size - 1}; use the tokenizer of this model"
            )
    length = len(prompt) + options.max_new_tokens
    if length > capacity:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {options.max_new_tokens}, "
            f"together {length}; at most {capacity} are possible; shorten the prompt or lower "
            "max_new_tokens"
        )


def find_sequence_end(
    ids: list[int], first: int, options: SamplingOptions, target: Target
) -> tuple[int, str] | None:
    """Find out whether an output ends at output token `first` or a later one. Earlier tokens were
    checked before.

    Return the length of the output in tokens and the finish reason, or None if the output does not
    end. The length includes the end token or the tokens of the stop string, whose text
    `infer.api.decode_output` removes later.
    """
    max_length = min(len(ids), options.max_new_tokens)
    tokenizer = cast("PreTrainedTokenizerBase", target.tokenizer)
    end_ids = frozenset() if options.ignore_eos else target.eos_token_ids
    for i in range(first, max_length):
        if ids[i] in end_ids:
            return i + 1, "stop"
        if options.stop and completes_stop_string(tokenizer, ids[: i + 1], options.stop):
            return i + 1, "stop"
        if options.loop_period and find_loop_period(ids, i + 1, options.loop_period):
            return i + 1, "loop"
    if max_length == options.max_new_tokens:
        return max_length, "length"
    return None
