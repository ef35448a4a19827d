"""What an evaluation found, as frozen dataclasses, and the one reader and writer of their JSON.

A field that is None is left out of the JSON, and a key that no field has is ignored when reading.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar, get_args, get_origin, get_type_hints

from infer.trees.methods import ALONE, TREES, TreeMethod
from infer.utils.files import write_json

Result = TypeVar("Result")
GENERATE = TreeMethod(  # plain decoding by transformers: infer/evaluation/measuring.py
    "generate", "transformers", "", "#e69f00", drafts=False, most_nodes=lambda block_size: 0
)


@dataclass(frozen=True)
class TextSample:
    """One decoded text, cut into what each round committed."""

    prompt: str
    completion: str
    accepted: list[int]  # tokens committed round by round, the prefill's one first
    pieces: list[
        list[str]
    ]  # [text, kind]; accepted, rejected (no part of the completion), corrected or bonus


@dataclass(frozen=True)
class RoundNode:
    """A token of a round's tree."""

    word: str  # the token as text
    parent: int  # number of the node; the root's is itself
    probability: float  # the drafter's, behind the token before
    accepted: bool


@dataclass(frozen=True)
class ExampleRound:
    """One round as an example: its tree, the root first, and the token that the target added."""

    before: str  # the end of the text before the root
    nodes: list[RoundNode]
    added: str


@dataclass(frozen=True)
class PromptResult:
    """What one method took on one prompt."""

    number: int  # among all prompts of the evaluation
    kind: str
    tokens: int
    rounds: int
    seconds: list[float]  # one; earlier versions measured repeatedly
    looped: int  # tokens of the repetition that ended the text, 0 for one that ended otherwise


@dataclass(frozen=True)
class Acceptance:
    """How many drafts of chains were accepted."""

    rounds: int
    accepted: list[int]  # [k]: rounds whose first k + 1 drafts were all accepted

    @property
    def shares(self) -> list[float]:
        """The share of rounds whose first k + 1 drafts were all accepted."""
        return [count / max(1, self.rounds) for count in self.accepted]

    @property
    def mean(self) -> float:
        """Drafts accepted a round; one more is the acceptance length."""
        return sum(self.accepted) / max(1, self.rounds)

    @property
    def standard_error(self) -> float:
        """The standard error of the mean, were the rounds drawn at random."""
        squares = sum(
            (2 * k + 1) * count for k, count in enumerate(self.accepted)
        )  # of the drafts accepted a round
        variance = squares / max(1, self.rounds) - self.mean**2
        return math.sqrt(max(0.0, variance) / max(1, self.rounds))

    @classmethod
    def of_all(cls, parts: Sequence["Acceptance"]) -> "Acceptance":
        """Return the acceptance of all rounds of several texts together."""
        columns = zip_longest(*(part.accepted for part in parts), fillvalue=0)
        return cls(sum(part.rounds for part in parts), [sum(column) for column in columns])


@dataclass(frozen=True)
class KnownText:
    """A prompt as a client sends it, as the target reads it, the target's own greedy answer, and
    what of the chains on it was accepted."""

    said: str
    chat: bool  # sent as a chat's question, not as the beginning of a text
    prompt: list[int]
    ids: list[int]
    acceptance: Acceptance | None = None  # None: it was written down of all texts together


@dataclass(frozen=True)
class Reference:
    """What a drafter's chains were measured to be worth, in a form that can be measured again
    elsewhere. A round counts if it begins before the last block_size - 1 tokens of its text, so
    that the text's end cuts none. It is published with the drafter: no names, no paths, and texts
    that anybody may see."""

    dtype: str  # of the target
    block_size: int
    acceptance: Acceptance  # of all texts together
    texts: list[KnownText]

    @property
    def by_text(self) -> list[Acceptance]:
        """The acceptance text by text; where that is not known, one for all."""
        known = [text.acceptance for text in self.texts if text.acceptance is not None]
        return known if len(known) == len(self.texts) else [self.acceptance]


@dataclass(frozen=True)
class MethodResult:
    """What one method took on all prompts: a row of every table."""

    name: str  # of the table of tree methods; for a masked model, order and length of its drafts
    budget: int  # drafted nodes a round; for a masked model, states
    tau: float  # tokens committed a round, pooled over rounds
    tau_prompt_mean: float  # the same, averaged over prompts
    rounds: int
    tokens: int
    seconds: float  # wall-clock, prefill included
    tokens_per_second: float
    speedup: float  # over the fastest plain decoder: infer/evaluation/ruler.py
    histogram: list[int]  # [i]: rounds that committed i + 1 tokens
    identical: bool | None = (
        None  # whether every text equals plain decoding's; None: drawn with other noise
    )
    ties: int | None = None  # prompts that differ from plain decoding at a tie of rounded logits
    defects: int | None = None  # prompts that differ for any other reason
    same: int | None = None  # texts that equal plain decoding's
    decoding_speedup: float | None = (
        None  # ratio of seconds a token without the prefill, averaged over texts
    )
    tau_interval: list[float] | None = None
    speedup_interval: list[float] | None = None
    prompts: list[PromptResult] | None = None
    again: int | None = None  # prompts that something disturbed, which were measured again

    @property
    def finding(self) -> str:
        """What the speedup shows: faster, slower or undecided (not significant); nothing for
        figures of earlier versions, which have no intervals."""
        if self.speedup_interval is None:
            return "" if self.prompts is None else "undecided"
        low, high = self.speedup_interval
        return "undecided" if low <= 1 <= high else "faster" if low > 1 else "slower"

    @property
    def tree(self) -> TreeMethod:
        """The method's row, see `tree_of`."""
        return tree_of(self.name)

    @property
    def label(self) -> str:
        """What reports call the method: plain, chain, DDTree 64."""
        return f"{self.tree.label} {self.budget}" if self.tree.by_budget else self.tree.label


def tree_of(name: str) -> TreeMethod:
    """Return a method's row in the table of tree methods, or of transformers' decoders; a plain one
    for other names."""
    rows = TREES | {row.name: row for row in (ALONE, GENERATE)}
    return rows.get(name) or TreeMethod(name, name, builder="", most_nodes=lambda block_size: 0)


@dataclass(frozen=True)
class FirstChoices:
    """How often the drafter's first choice is the target's token, at the places that a tree's
    rounds reach."""

    by: str  # "marginals", or "head" where the drafter has a conditional one
    behind: str  # what was accepted before in the round: "first choices" alone, or also "a sibling" of one
    asked: list[int]  # by depth, from 1
    right: list[int]
    intervals: list[list[float] | None]  # of the share at each depth
    interval: list[float] | None = None  # of the share at all depths

    @property
    def share(self) -> float:
        """Of all depths."""
        return sum(self.right) / max(1, sum(self.asked))


@dataclass(frozen=True)
class ReplayedOrder:
    """What rounds would commit by one order of the drafter's candidates."""

    method: str
    nodes: int
    by: str  # of `infer.evaluation.replay.Order`
    tau: float
    tau_interval: list[float] | None = None


@dataclass(frozen=True)
class TreeStudy:
    """What trees gain and why, replayed on an evaluation's greedy texts."""

    nodes: int  # of the trees whose rounds `choices` are of
    choices: list[FirstChoices]
    orders: list[ReplayedOrder]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What every method took on the same prompts. The first method is plain decoding by our engine;
    for a masked model, step by step."""

    target: str
    device: str
    dtype: str
    prompts: int
    max_new_tokens: int
    temperature: float
    block_size: int | None = None  # None for a masked model
    methods: list[MethodResult]
    samples: list[TextSample]
    step: int | None = None  # of the training run
    checkpoint: str | None = None
    drafter: str | None = None
    baseline: str | None = None  # the fastest plain decoder, whose speed is 1; None: plain
    beside: "list[Evaluation] | None" = None  # the same methods on other prompts, or sampled
    example: ExampleRound | None = None
    what: str | None = None  # of an evaluation beside another: what is different
    reference: Reference | None = None  # of the prompts from outside the data
    trees: TreeStudy | None = (
        None  # None for sampled texts, and for drafters that cannot be replayed
    )
    cut: str | None = None  # what was left out for want of time
    date: str | None = None  # of the measurement, as 2026-11-28; None in files of earlier versions

    @property
    def ours(self) -> list[MethodResult]:
        """The methods of our engine."""
        return [method for method in self.methods if method.name != GENERATE.name]

    @property
    def drafting(self) -> list[MethodResult]:
        """Our methods that draft, all but plain decoding."""
        return self.ours[1:]

    @property
    def of_drafter(self) -> list[MethodResult]:
        """The methods that use the drafter, with n-grams or without."""
        return [method for method in self.drafting if method.tree is not ALONE]

    @property
    def fastest(self) -> MethodResult:
        """The method of the drafter whose speedup is surely the highest, see `surest`."""
        return surest(self.of_drafter)

    @property
    def plain(self) -> MethodResult:
        """The fastest plain decoder, over which speedups are."""
        return next(
            (method for method in self.methods if method.name == self.baseline), self.methods[0]
        )

    @property
    def same_output(self) -> bool:
        """Whether every method of ours wrote what plain decoding wrote, on these prompts and on
        those beside them."""
        return all(method.identical for method in self.ours) and all(
            one.same_output for one in self.beside or ()
        )


def surest(methods: Sequence[MethodResult]) -> MethodResult:
    """Return the method with the highest lower end of its speedup's interval; where there is none,
    of the speedup."""
    return max(methods, key=lambda method: (method.speedup_interval or [method.speedup])[0])


@dataclass(frozen=True)
class SetResult:
    """One question set at one temperature."""

    settings: dict[str, object]  # everything that the figures depend on
    set: str
    title: str
    temperature: float
    questions: int
    answers: int  # turns that were answered
    left_out: int  # turns that do not fit into the target's positions
    result: Evaluation


@dataclass(frozen=True)
class SuiteResult:
    """A suite's sets, temperature by temperature."""

    suite: str
    checkpoint: str
    target: str
    sets: list[SetResult]


def write_result(path: Path, result: object) -> None:
    """Write one of these dataclasses as JSON."""
    write_json(path, to_json(result))


def read_result(path: Path, kind: type[Result]) -> Result:
    """Read what `write_result` wrote. Raises OSError, and ValueError for a file that holds
    something else."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), kind)
    except TypeError as error:
        raise ValueError(f"{path} holds no {kind.__name__}: {error}") from error


def to_json(result: object) -> dict[str, object]:
    """Return dictionaries and lists for dataclasses, at any depth."""
    return asdict(
        result,
        dict_factory=lambda pairs: {key: x for key, x in pairs if x is not None or key == "step"},
    )


def from_json(data: dict, kind: type[Result]) -> Result:
    """Return the dataclass that `to_json` made these dictionaries of."""
    return kind(
        **{
            name: with_parts(data[name], hint)
            for name, hint in get_type_hints(kind).items()
            if name in data
        }
    )


def with_parts(value: object, hint: object) -> object:
    """Return a field's value with the dataclasses in it, by its annotation: list[TextSample],
    ExampleRound | None."""
    parts = [part for part in get_args(hint) if is_dataclass(part) or get_args(part)]
    if value is not None and is_dataclass(hint):
        return from_json(value, hint)
    if value is None or not parts:
        return value
    return (
        [with_parts(item, parts[0]) for item in value]
        if get_origin(hint) is list
        else with_parts(value, parts[0])
    )
