"""A sequence that is being decoded: its tokens, where it ends, and the cost of decoding it."""

from collections import abc
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch

from infer.config import TextOptions
from infer.engine.detokenize import completes_stop_string
from infer.engine.grammar import GrammarState, make_grammar_state
from infer.engine.prefix_cache import PrefixCacheBlock
from infer.engine.repetition import find_loop_period
from infer.targets.target import Target

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DECODE_STAGES = ("prefill", "draft", "build", "verify", "commit")

# Hugging Face's logits processors: (token ids (1, T), scores (1, V)) -> scores (1, V)
LogitsProcessor = abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Stopwatch:
    """Measures the seconds of each stage of decoding. On CUDA `clock` has to synchronise."""

    def __init__(self, clock: abc.Callable[[], float]) -> None:
        self.clock = clock
        self.stage_start = 0.0
        self.seconds = dict.fromkeys(DECODE_STAGES, 0.0)

    def start(self) -> float:
        """Begin a stage, and return the time."""
        self.stage_start = self.clock()
        return self.stage_start

    def lap(self, stage: str) -> None:
        """End a stage, and begin the next one."""
        now = self.clock()
        self.seconds[stage] += now - self.stage_start
        self.stage_start = now


@dataclass
class DecodeStats:
    """The cost of decoding one sequence.

    A round commits the accepted drafted tokens and the next bonus token. The prefill yields the
    first bonus token, so `tokens` is 1 plus the sum of what the rounds committed. `seconds` is the
    wall-clock time between admission and end, whatever other sequences were in the batch.
    """

    prompt_tokens: int
    tokens: int = 0  # output tokens
    cached_tokens: int = 0  # prompt tokens that came from the prefix cache
    rounds: int = 0
    # [i]: number of rounds that committed i + 1 output tokens
    histogram: list[int] = field(default_factory=list)
    seconds: float = 0.0  # including prefill
    stage_seconds: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(DECODE_STAGES, 0.0)
    )

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per round."""
        return (self.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The target's log-probability of an output token, and of the likeliest tokens there."""

    logprob: float
    top: list[tuple[int, float]]  # token ids and log-probabilities, in descending order


class Admission(NamedTuple):
    """The state of the clock when a sequence was admitted."""

    time: float
    stage_seconds: dict[str, float]


@dataclass(eq=False)
class Sequence:
    """A prompt and its output so far: waiting, running or finished."""

    prompt: list[int]
    options: TextOptions
    # Applied before the options' own penalty, temperature and filters.
    processors: abc.Sequence[LogitsProcessor] = ()
    grammar: GrammarState | None = None  # which the output must follow
    stats: DecodeStats = field(init=False)
    ids: list[int] = field(default_factory=list)  # output tokens
    # Output tokens committed by the prefill and by every round.
    commits: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # by round: verified nodes
    accepted: list[int] = field(default_factory=list)  # by round: accepted nodes, before any cut
    # One per output token, if the options ask for them.
    logprobs: list[TokenLogprob] = field(default_factory=list)
    # By round: tokens of the likeliest rejected path, if `trace`.
    rejected: list[list[int]] = field(default_factory=list)
    trace: bool = False
    # "stop" (an end token or a stop string), "loop", "length" or "cancelled"; None while running
    finish_reason: str | None = None
    cancelled: bool = False
    admission: Admission | None = None
    arrival_index: int = 0
    cached_length: int = 0  # positions that the prefix cache provides
    # Blocks of the prefix cache, until they are copied into the sequence's row.
    prefix_blocks: list[PrefixCacheBlock] = field(default_factory=list)
    # Cached result of `last_tokens`, and the number of output tokens that it covers.
    _last_tokens: np.ndarray | None = field(default=None, init=False)
    _last_tokens_length: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.stats = DecodeStats(prompt_tokens=len(self.prompt))

    @property
    def has_logits_processors(self) -> bool:
        """Whether logits processors or a grammar change the target's logits."""
        return bool(self.processors) or self.grammar is not None

    @property
    def token_ids(self) -> list[int]:
        """Prompt and output so far: the tokens to prefill before the next round."""
        return self.prompt + self.ids

    def last_tokens(self, max_tokens: int) -> np.ndarray:
        """Return the last tokens of prompt and output, (T,) int64 with T at most `max_tokens`."""
        last_tokens = self._last_tokens
        if last_tokens is None:
            last_tokens = np.array(self.prompt[-max_tokens:], np.int64)
        new_tokens = np.array(self.ids[self._last_tokens_length :], np.int64)
        self._last_tokens = np.concatenate([last_tokens, new_tokens])[-max_tokens:]
        self._last_tokens_length = len(self.ids)
        return self._last_tokens

    def append(self, new_ids: list[int], target: Target) -> None:
        """Append a round's tokens up to the end of the sequence."""
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


def check_options(options: TextOptions, target: Target) -> None:
    """Raise ValueError for options that are invalid or that this target does not support."""
    options.check()
    if options.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: load the target with load_target")
    make_grammar_state(options, target)


def check_prompt(prompt: list[int], options: TextOptions, capacity: int, vocab_size: int) -> None:
    """Raise ValueError for a prompt that is empty, contains ids outside the vocabulary, or is too
    long for batch rows of `capacity` positions."""
    if not prompt:
        raise ValueError("every prompt needs at least one token")
    for id in (min(prompt), max(prompt)):
        if not 0 <= id < vocab_size:
            raise ValueError(
                f"prompt: token {id} does not exist, the model has 0 to {vocab_size - 1}"
            )
    length = len(prompt) + options.max_new_tokens
    if length > capacity:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens and max_new_tokens is {options.max_new_tokens}, "
            f"together {length}; at most {capacity} are possible: shorten either"
        )


def find_sequence_end(
    ids: list[int], first: int, options: TextOptions, target: Target
) -> tuple[int, str] | None:
    """Find the end of a sequence from output token `first` on: (length, finish reason), or None.

    The length includes an end token, and all tokens of a stop string. `decode_output` cuts the text
    before the stop string.
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
