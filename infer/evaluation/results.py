"""The results of evaluations as frozen dataclasses, and the reader and writer of their JSON files.

A field that is None is left out of the JSON. Keys without a field are ignored when reading. Some
fields have another name in the file than here: `metadata["key"]` is the name in the file.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from infer.trees.methods import NGRAMS_WITHOUT_DRAFTER_METHOD, TREE_METHODS, TreeMethod
from infer.utils.files import write_json

Result = TypeVar("Result")
# baseline decoding by transformers, measured in infer/evaluation/measurement.py
TRANSFORMERS_BASELINE = TreeMethod(
    "generate",
    "transformers",
    "",
    "#e69f00",
    needs_drafter=False,
    max_nodes_for_block=lambda block_size: 0,
)


@dataclass(frozen=True)
class TextSample:
    """One decoded output, cut into what each round committed."""

    prompt: str
    completion: str
    # tokens committed by each round; the first entry is the prefill's token
    accepted: list[int]
    # [text, kind]; kind is accepted, rejected (not in the completion), corrected or bonus
    pieces: list[list[str]]


@dataclass(frozen=True)
class ExampleNode:
    """One node of an example round's draft tree."""

    word: str  # the token as text
    parent: int  # index of the parent node; the root's parent is the root
    probability: float  # the drafter's probability, given the parent token
    accepted: bool


@dataclass(frozen=True)
class ExampleRound:
    """One round as an example: its draft tree, root first, and the token that the target added."""

    before: str  # the end of the text before the root
    nodes: list[ExampleNode]
    added: str


@dataclass(frozen=True)
class PromptResult:
    """Tokens, rounds and time that one method took on one prompt."""

    number: int  # index among all prompts of the evaluation
    kind: str
    tokens: int
    rounds: int
    seconds: list[float]  # one value; earlier versions measured repeatedly
    # tokens of the repetition that ended the output; 0 for an output that ended otherwise
    loop_tokens: int = field(metadata={"key": "looped"})


@dataclass(frozen=True)
class AcceptanceCounts:
    """Counts of accepted drafts by position, from rounds that drafted chains."""

    rounds: int
    accepted: list[int]  # [k]: number of rounds whose first k + 1 drafts were all accepted

    @property
    def acceptance_rates(self) -> list[float]:
        """Shares of the rounds whose first k + 1 drafts were all accepted."""
        return [count / max(1, self.rounds) for count in self.accepted]

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted drafts per round; the acceptance length is one more."""
        return sum(self.accepted) / max(1, self.rounds)

    @property
    def standard_error(self) -> float:
        """Standard error of `mean_accepted`, as if rounds were independent."""
        # sum over rounds of the squared number of accepted drafts
        squares = sum((2 * k + 1) * count for k, count in enumerate(self.accepted))
        variance = squares / max(1, self.rounds) - self.mean_accepted**2
        return math.sqrt(max(0.0, variance) / max(1, self.rounds))

    @classmethod
    def pool(cls, counts: Sequence["AcceptanceCounts"]) -> "AcceptanceCounts":
        """Add up the counts of several outputs."""
        columns = zip_longest(*(each.accepted for each in counts), fillvalue=0)
        return cls(sum(each.rounds for each in counts), [sum(column) for column in columns])


@dataclass(frozen=True)
class ReferenceAnswer:
    """A prompt, the target's greedy answer to it, and the acceptance of chains on that answer."""

    prompt_text: str = field(metadata={"key": "said"})  # as a client sends it
    chat: bool  # sent as a user message of a chat, not as text to complete
    prompt_ids: list[int] = field(metadata={"key": "prompt"})
    answer_ids: list[int] = field(metadata={"key": "ids"})
    # None: the file holds the acceptance of all answers together only
    acceptance: AcceptanceCounts | None = None


@dataclass(frozen=True)
class AcceptanceReference:
    """A drafter's acceptance with chains, with all that is needed to measure it again elsewhere.

    A round counts if it begins before the last block_size - 1 tokens of its answer, so that the end
    of the answer cuts no draft. The reference is published with the drafter: it holds no names or
    paths, and only prompts that may be public.
    """

    dtype: str  # of the target
    block_size: int
    acceptance: AcceptanceCounts  # of all answers together
    answers: list[ReferenceAnswer] = field(metadata={"key": "texts"})

    @property
    def acceptance_by_answer(self) -> list[AcceptanceCounts]:
        """The acceptance of each answer; one entry for all together if they were not stored."""
        counts = [answer.acceptance for answer in self.answers if answer.acceptance is not None]
        return counts if len(counts) == len(self.answers) else [self.acceptance]


@dataclass(frozen=True)
class MethodResult:
    """The measurements of one decoding method over all prompts: one row of every table."""

    name: str  # of the tree methods' table; for a masked model, drafting method and draft length
    budget: int  # drafted nodes per round; for a masked model, states
    tau: float  # tokens committed per round, pooled over rounds
    tau_prompt_mean: float  # the same, averaged over prompts
    rounds: int
    tokens: int
    seconds: float  # wall-clock time, prefill included
    tokens_per_second: float
    speedup: float  # over the fastest baseline decoder: infer/evaluation/metrics.py
    histogram: list[int]  # [i]: number of rounds that committed i + 1 tokens
    # whether every output equals baseline decoding's; None: sampled with other noise
    identical: bool | None = None
    ties: int | None = None  # prompts that differ from the baseline at a tie of rounded logits
    defects: int | None = None  # prompts that differ for any other reason
    identical_outputs: int | None = field(
        default=None, metadata={"key": "same"}
    )  # number of prompts
    # ratio of seconds per token without the prefill, averaged over outputs
    decoding_speedup: float | None = None
    tau_interval: list[float] | None = None
    speedup_interval: list[float] | None = None
    prompts: list[PromptResult] | None = None
    # prompts measured again because another process slowed the first measurement
    remeasured_prompts: int | None = field(default=None, metadata={"key": "again"})

    @property
    def significance(self) -> str:
        """What the speedup's interval shows: "faster", "slower" or "undecided"; "" for results of
        earlier versions, which have no intervals."""
        if self.speedup_interval is None:
            return "" if self.prompts is None else "undecided"
        low, high = self.speedup_interval
        if low > 1:
            return "faster"
        if high < 1:
            return "slower"
        return "undecided"

    @property
    def tree_method(self) -> TreeMethod:
        """The method's row in the table of tree methods, see `find_tree_method`."""
        return find_tree_method(self.name)

    @property
    def label(self) -> str:
        """The method's name in reports: plain, chain, DDTree 64."""
        row = self.tree_method
        return f"{row.label} {self.budget}" if row.scales_with_budget else row.label


def find_tree_method(name: str) -> TreeMethod:
    """Return a method's row in the table of tree methods, or of the methods that only evaluations
    have. Return a row of default values for other names."""
    rows = TREE_METHODS | {
        row.name: row for row in (NGRAMS_WITHOUT_DRAFTER_METHOD, TRANSFORMERS_BASELINE)
    }
    if name in rows:
        return rows[name]
    return TreeMethod(name, name, builder="", max_nodes_for_block=lambda block_size: 0)


@dataclass(frozen=True)
class FirstChoiceAccuracy:
    """How often the drafter's most likely token is the target's token, at the positions that the
    rounds of a tree reach."""

    source: str = field(
        metadata={"key": "by"}
    )  # "marginals", or "head" for the conditional head's distributions
    # accepted before in the round: "first choices" only, or also "a sibling" of a first choice
    prefix: str = field(metadata={"key": "behind"})
    attempts: list[int] = field(metadata={"key": "asked"})  # by depth, from 1
    correct: list[int] = field(metadata={"key": "right"})  # by depth, from 1
    intervals: list[list[float] | None]  # of the accuracy at each depth
    interval: list[float] | None = None  # of the accuracy over all depths

    @property
    def accuracy(self) -> float:
        """The accuracy over all depths."""
        return sum(self.correct) / max(1, sum(self.attempts))


@dataclass(frozen=True)
class ReplayResult:
    """The acceptance length that replaying one variant of drafting gave."""

    method: str
    nodes: int
    ranking: str = field(metadata={"key": "by"})  # see `infer.evaluation.replay.ReplayVariant`
    tau: float
    tau_interval: list[float] | None = None


@dataclass(frozen=True)
class TreeStudy:
    """What trees gain over chains and why, replayed on the greedy outputs of an evaluation."""

    nodes: int  # size of the trees whose rounds `first_choices` counts
    first_choices: list[FirstChoiceAccuracy] = field(metadata={"key": "choices"})
    results: list[ReplayResult] = field(metadata={"key": "orders"})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The measurements of every method on the same prompts. The first method is baseline decoding
    by our engine; for a masked model, decoding step by step."""

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
    baseline: str | None = None  # name of the fastest baseline decoder; None: plain
    # the same methods on other prompts, or sampled
    other_evaluations: "list[Evaluation] | None" = field(default=None, metadata={"key": "beside"})
    example: ExampleRound | None = None
    # of one of `other_evaluations`: how its prompts or options differ
    prompt_set_name: str | None = field(default=None, metadata={"key": "what"})
    reference: AcceptanceReference | None = None  # on the prompts from outside the data
    # None for sampled outputs, and for drafters that cannot be replayed
    tree_study: TreeStudy | None = field(default=None, metadata={"key": "trees"})
    # what was left out when evaluation.max_minutes were over
    time_limit_note: str | None = field(default=None, metadata={"key": "cut"})
    date: str | None = None  # of the measurement, as 2026-11-28; None in files of earlier versions

    @property
    def engine_methods(self) -> list[MethodResult]:
        """The methods of our engine, without transformers' baseline."""
        return [method for method in self.methods if method.name != TRANSFORMERS_BASELINE.name]

    @property
    def drafting_methods(self) -> list[MethodResult]:
        """The methods of our engine without baseline decoding."""
        return self.engine_methods[1:]

    @property
    def drafter_methods(self) -> list[MethodResult]:
        """The methods that use the drafter, with or without n-grams."""
        return [
            method
            for method in self.drafting_methods
            if method.tree_method is not NGRAMS_WITHOUT_DRAFTER_METHOD
        ]

    @property
    def best_drafter_method(self) -> MethodResult:
        """The drafter's method with the highest lower bound of its speedup."""
        return select_best_method(self.drafter_methods)

    @property
    def fastest_baseline(self) -> MethodResult:
        """The fastest baseline decoder, to which speedups refer."""
        for method in self.methods:
            if method.name == self.baseline:
                return method
        return self.methods[0]

    @property
    def same_output(self) -> bool:
        """Whether every method of our engine gave baseline decoding's outputs, here and in
        `other_evaluations`."""
        if not all(method.identical for method in self.engine_methods):
            return False
        return all(evaluation.same_output for evaluation in self.other_evaluations or ())

    @property
    def with_others(self) -> "list[Evaluation]":
        """This evaluation, followed by `other_evaluations`."""
        return [self, *(self.other_evaluations or ())]


def select_best_method(methods: Sequence[MethodResult]) -> MethodResult:
    """Return the method with the highest lower bound of its speedup's interval, or with the highest
    speedup if there are no intervals."""
    return max(methods, key=lambda method: (method.speedup_interval or [method.speedup])[0])


@dataclass(frozen=True)
class SetResult:
    """The results of one question set at one temperature."""

    settings: dict[str, object]  # everything that the results depend on
    set: str
    title: str
    temperature: float
    questions: int
    answers: int  # number of turns that were answered
    left_out: int  # number of turns that do not fit into the target's positions
    result: Evaluation


@dataclass(frozen=True)
class SuiteResult:
    """The results of all sets of a suite, temperature by temperature."""

    suite: str
    checkpoint: str
    target: str
    sets: list[SetResult]


def write_result(path: Path, result: object) -> None:
    """Write one of these dataclasses as JSON."""
    write_json(path, to_json(result))


def read_result(path: Path, result_class: type[Result]) -> Result:
    """Read what `write_result` wrote. Raises OSError, and ValueError for a file with other
    content."""
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), result_class)
    except TypeError as error:
        raise ValueError(f"{path} holds no {result_class.__name__}: {error}") from error


def json_key(dataclass_field: Field) -> str:
    """Return the key of a field in JSON files."""
    return dataclass_field.metadata.get("key", dataclass_field.name)


def to_json(value: Any) -> Any:
    """Convert dataclasses to dictionaries, at any depth. Fields that are None are left out, except
    `step`."""
    if is_dataclass(value):
        pairs = {each.name: (json_key(each), getattr(value, each.name)) for each in fields(value)}
        return {
            key: to_json(content)
            for name, (key, content) in pairs.items()
            if content is not None or name == "step"
        }
    if isinstance(value, dict):
        return {key: to_json(content) for key, content in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(item) for item in value]
    return value


def from_json(data: dict, result_class: type[Result]) -> Result:
    """Return the dataclass from which `to_json` made `data`."""
    hints = get_type_hints(result_class)
    values = {}
    for each in fields(result_class):  # ty: ignore[invalid-argument-type]
        key = json_key(each)
        if key in data:
            values[each.name] = decode_field_value(data[key], hints[each.name])
    return result_class(**values)


def decode_field_value(value: Any, annotation: Any) -> Any:
    """Convert a field's JSON value to the dataclasses that its annotation names, such as
    list[TextSample] or ExampleRound | None."""
    if value is None:
        return None
    if is_dataclass(annotation):
        return from_json(value, annotation)

    inner = [each for each in get_args(annotation) if is_dataclass(each) or get_args(each)]
    if not inner:
        return value
    if get_origin(annotation) is list:
        return [decode_field_value(item, inner[0]) for item in value]
    return decode_field_value(value, inner[0])
