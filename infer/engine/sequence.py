"""A text that is being written, round by round: its tokens so far, where it ends, and what it
took."""

from collections import abc
from dataclasses import dataclass, field

import numpy as np
import torch

from infer.config import TextOptions
from infer.engine.grammar import GrammarState, follow
from infer.engine.loops import loop_period
from infer.engine.prefixes import PrefixBlock
from infer.engine.words import reaches_stop
from infer.targets.target import Target

STAGES = ("prefill", "draft", "build", "verify", "commit")

# Hugging Face's: (ids (1, T), scores (1, V)) -> scores
Processor = abc.Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Stopwatch:
    """Seconds of the stages of rounds. On CUDA `clock` is to synchronise."""

    def __init__(self, clock: abc.Callable[[], float]) -> None:
        self.clock = clock
        self.mark = 0.0
        self.seconds = dict.fromkeys(STAGES, 0.0)

    def start(self) -> float:
        """Begin a stage; return the time."""
        self.mark = self.clock()
        return self.mark

    def lap(self, stage: str) -> None:
        """End a stage, and begin the next."""
        now = self.clock()
        self.seconds[stage] += now - self.mark
        self.mark = now


@dataclass
class DecodeStats:
    """What decoding one text took. A round commits the accepted drafts and the next bonus token;
    the prefill yields the first bonus token, so `tokens = 1 + sum of the rounds' commits`. The
    seconds are those that passed while the text was being written, whatever other rows were written
    beside it."""

    prompt_tokens: int
    tokens: int = 0  # kept new tokens
    reused: int = 0  # tokens of the prompt that were not computed: an earlier text began alike
    rounds: int = 0
    histogram: list[int] = field(
        default_factory=list
    )  # [i]: rounds that committed i + 1 kept tokens
    seconds: float = 0.0  # wall-clock, prefill included
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per round."""
        return (self.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class TokenLogprob:
    """The target's own log-probability of a token, and its likeliest tokens at that place,
    likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(eq=False)
class Sequence:
    """One text: a prompt that waits, is being written, or is finished. `ids` are new tokens,
    nothing past the end; `commits` their counts round by round, the prefill's one first."""

    prompt: list[int]
    options: TextOptions
    processors: abc.Sequence[
        Processor
    ] = ()  # see the true prefix of a node; applied before the options' own
    grammar: GrammarState | None = None  # what the text must follow
    stats: DecodeStats = field(init=False)
    ids: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # how many nodes each round verified
    accepted: list[int] = field(
        default_factory=list
    )  # how many of them it accepted, past the text's end too
    logprobs: list[TokenLogprob] = field(
        default_factory=list
    )  # one a token, if the options ask for it
    rejected: list[list[int]] = field(
        default_factory=list
    )  # round by round, of a text with `trace`
    trace: bool = False  # note the likeliest rejected path of each round
    finish: str | None = (
        None  # "stop" (an end token or a stop string), "loop", "length" or "cancelled"
    )
    cancelled: bool = False
    began: tuple[float, dict[str, float]] | None = None  # time and the stages' seconds at admission
    number: int = 0  # of the texts that an engine was given
    reused: int = 0  # positions that need not be computed before it is written on
    # what is there of them, until it is given to the text's row
    kept: list[PrefixBlock] = field(default_factory=list)
    searched: np.ndarray | None = (
        None  # the end of prompt and ids, int64, once a tree has asked for it
    )
    noted: int = 0  # tokens of ids that are in it

    def __post_init__(self) -> None:
        self.stats = DecodeStats(prompt_tokens=len(self.prompt))

    @property
    def judged(self) -> bool:
        """Whether the target's logits are changed node by node."""
        return bool(self.processors) or self.grammar is not None

    @property
    def known(self) -> list[int]:
        """Prompt and tokens so far: all that is to be computed before the text is written on."""
        return self.prompt + self.ids

    def end(self, most: int) -> np.ndarray:
        """Return the last tokens so far, at most so many: (T,) int64."""
        before = np.array(self.prompt[-most:], np.int64) if self.searched is None else self.searched
        self.searched = np.concatenate([before, np.array(self.ids[self.noted :], np.int64)])[-most:]
        self.noted = len(self.ids)
        return self.searched

    def append(self, new: list[int], target: Target) -> None:
        """Add a round's tokens up to the end of the text."""
        before = len(self.ids)
        ids = self.ids + new
        length, self.finish = text_end(ids, before, self.options, target) or (len(ids), None)
        if self.finish == "stop" and self.grammar is not None and self.grammar.failed:
            self.finish = "length"
        self.ids += ids[before:length]
        del self.logprobs[len(self.ids) :]
        self.commits.append(len(self.ids) - before)


def check_text(options: TextOptions, target: Target) -> None:
    """Raise ValueError for options that this target cannot follow."""
    options.check()
    if options.stop and target.tokenizer is None:
        raise ValueError("stop strings need a tokenizer: load the target with load_target")
    follow(options, target)


def check_prompt(prompt: list[int], options: TextOptions, capacity: int, vocabulary: int) -> None:
    """Raise ValueError for a prompt that is empty, too long for an engine's rows of so many
    positions, or of tokens that the model does not have."""
    if not prompt:
        raise ValueError("every prompt needs at least one token")
    unknown = [id for id in (min(prompt), max(prompt)) if not 0 <= id < vocabulary]
    if unknown:
        raise ValueError(
            f"prompt: token {unknown[0]} does not exist, the model has 0 to {vocabulary - 1}"
        )
    if len(prompt) + options.max_new_tokens > capacity:
        raise ValueError(
            f"prompt and answer may take {len(prompt) + options.max_new_tokens} positions, "
            f"there are {capacity}: shorten either"
        )


def text_end(
    ids: list[int], first: int, options: TextOptions, target: Target
) -> tuple[int, str] | None:
    """Find where a text ends, from token `first` on: (length to keep, reason), or None if it goes
    on. An end token is kept, a stop string's tokens up to the one that completes it (`answer_text`
    cuts the text before it)."""
    limit = min(len(ids), options.max_new_tokens)
    end_ids = frozenset() if options.ignore_eos else target.end_ids
    for i in range(first, limit):
        if ids[i] in end_ids:
            return i + 1, "stop"
        if options.stop and reaches_stop(target.tokenizer, ids[: i + 1], options.stop):
            return i + 1, "stop"
        if options.loop_period and loop_period(ids, i + 1, options.loop_period):
            return i + 1, "loop"
    return (limit, "length") if limit == options.max_new_tokens else None
