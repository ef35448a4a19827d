"""Dataclasses with the results of evaluations, and functions that write and read them as JSON.

A field that is None is not written. Unknown keys of a JSON file are ignored. The JSON key of a
field is its `metadata["key"]` if it has one, else its name.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from infer.trees.methods import NGRAMS_ALONE_TREE_METHOD, TREE_METHODS, TreeMethod
from infer.utils.files import write_json

Result = TypeVar("Result")
# Properties of baseline decoding with `generate` of transformers, like the entries of TREE_METHODS
TRANSFORMERS_BASELINE_METHOD = TreeMethod(
    "generate",
    "transformers",
    "",
    "#e69f00",
    needs_drafter=False,
    max_nodes_for_block=lambda block_size: 0,
)


@dataclass(frozen=True)
class TextSample:
    """An output, cut into pieces of text that show which tokens were drafted.

    accepted: how many tokens the prefill and each round added to the output, in this order
    pieces: lists [text, kind]. The kind is "accepted" for accepted draft tokens, "rejected" for
        rejected draft tokens (not part of the output), "corrected" for the target's token after
        rejected draft tokens, or "bonus" for the target's token if no draft token was rejected
    """

    prompt: str
    completion: str
    accepted: list[int]
    pieces: list[list[str]]


@dataclass(frozen=True)
class ExampleNode:
    """A node of the draft tree in an `ExampleRound`."""

    word: str  # the token as text
    parent: int  # index of the parent node; the root's parent is the root
    probability: float  # the drafter's probability of the token, given the parent token
    accepted: bool


@dataclass(frozen=True)
class ExampleRound:
    """A decoding round that a report shows as an example.

    before: the end of the text before the root token of the draft tree
    nodes: the draft tree; the first node is the root
    added: the target's own token, which follows the accepted tokens
    """

    before: str
    nodes: list[ExampleNode]
    added: str


@dataclass(frozen=True)
class PromptResult:
    """The result of one method on one prompt."""

    number: int  # index of the prompt among all prompts of the evaluation
    kind: str  # kind of the prompt, such as "functions"
    tokens: int  # number of generated tokens
    rounds: int  # number of decoding rounds
    # A list with the decoding time; in files of earlier versions, with several times
    seconds: list[float]
    # If the output was ended because it repeated itself: number of repeated tokens at its end; else
    # 0
    loop_tokens: int = field(metadata={"key": "looped"})


@dataclass(frozen=True)
class AcceptanceCounts:
    """How many draft tokens were accepted at each position of chains (drafts without branches).

    rounds: number of rounds
    accepted: entry k is the number of rounds whose first k + 1 draft tokens were all accepted
    """

    rounds: int
    accepted: list[int]

    @property
    def acceptance_rates(self) -> list[float]:
        """For each k, the share of rounds whose first k + 1 draft tokens were all accepted."""
        return [count / max(1, self.rounds) for count in self.accepted]

    @property
    def mean_accepted(self) -> float:
        """Mean number of accepted draft tokens per round. The acceptance length τ is one more."""
        return sum(self.accepted) / max(1, self.rounds)

    @property
    def standard_error(self) -> float:
        """Standard error of `mean_accepted`, if the rounds are assumed to be independent."""
        # Sum over rounds of m squared, for a round that accepted m draft tokens
        squares = sum((2 * k + 1) * count for k, count in enumerate(self.accepted))
        variance = squares / max(1, self.rounds) - self.mean_accepted**2
        return math.sqrt(max(0.0, variance) / max(1, self.rounds))

    @classmethod
    def pool(cls, counts: Sequence["AcceptanceCounts"]) -> "AcceptanceCounts":
        """Return the counts of several outputs, added up."""
        columns = zip_longest(*(each.accepted for each in counts), fillvalue=0)
        return cls(sum(each.rounds for each in counts), [sum(column) for column in columns])


@dataclass(frozen=True)
class ReferenceAnswer:
    """A prompt, the target's greedy answer, and the acceptance of chains while it was decoded.

    prompt_text: the text that a client sends
    chat: whether the text is sent as a user message of a chat; if false, it is sent as text that
        the target continues
    prompt_ids, answer_ids: token ids of the prompt and of the answer
    acceptance: the acceptance for this answer; None if it was stored only for all answers together
    """

    prompt_text: str = field(metadata={"key": "said"})
    chat: bool
    prompt_ids: list[int] = field(metadata={"key": "prompt"})
    answer_ids: list[int] = field(metadata={"key": "ids"})
    acceptance: AcceptanceCounts | None = None


@dataclass(frozen=True)
class AcceptanceReference:
    """A drafter's acceptance with chains, and the prompts with which another engine can measure it.

    A chain is a draft without branches. Only rounds that begin before the last block_size - 1
    tokens of an answer are counted, because the end of the answer cuts the drafts of later rounds.
    The reference is published with the drafter. It contains only public prompts, and no names or
    paths.

    dtype: the dtype of the target
    acceptance: the counts of all answers together
    """

    dtype: str
    block_size: int
    acceptance: AcceptanceCounts
    answers: list[ReferenceAnswer] = field(metadata={"key": "texts"})

    @property
    def acceptance_by_answer(self) -> list[AcceptanceCounts]:
        """The acceptance of each answer.

        If any answer lacks its own counts, the list has a single entry for all answers together.
        """
        counts = [answer.acceptance for answer in self.answers if answer.acceptance is not None]
        return counts if len(counts) == len(self.answers) else [self.acceptance]


@dataclass(frozen=True)
class MethodResult:
    """The results of one decoding method over all prompts of an evaluation."""

    # Name of the method in TREE_METHODS; for a masked diffusion model, the drafting method and the
    # draft length
    name: str
    # Number of drafted tree nodes per round. For a masked diffusion model, number of copies of the
    # sequence with different masked positions per forward pass
    budget: int
    tau: float  # committed tokens of all rounds, divided by the number of rounds
    tau_prompt_mean: float  # mean over prompts of the committed tokens per round
    rounds: int
    tokens: int
    seconds: float  # wall-clock time, including the prefill
    tokens_per_second: float
    speedup: float  # speedup over the fastest baseline, see infer/evaluation/metrics.py
    histogram: list[int]  # entry i is the number of rounds that committed i + 1 tokens
    # Whether every output equals the output of baseline decoding. None if the outputs cannot be
    # compared, because they were sampled with other random numbers
    identical: bool | None = None
    # Number of outputs that differ from baseline decoding only because of rounding errors, see
    # `classify_difference`
    ties: int | None = None
    defects: int | None = None  # number of outputs that differ for another reason than rounding
    identical_outputs: int | None = field(
        default=None, metadata={"key": "same"}
    )  # number of outputs that equal those of baseline decoding
    # Speedup as publications compute it: the baseline's mean time per token divided by that of the
    # method, without the prefill
    decoding_speedup: float | None = None
    tau_interval: list[float] | None = None
    speedup_interval: list[float] | None = None
    prompts: list[PromptResult] | None = None
    # Number of prompts that were measured again because their first decoding time was unusually
    # long
    remeasured_prompts: int | None = field(default=None, metadata={"key": "again"})

    @property
    def significance(self) -> str:
        """ "faster" or "slower" if the method is significantly faster or slower than the baseline,
        else "undecided": the confidence interval of its speedup then contains 1 or is missing. ""
        for results of earlier versions, which have no confidence intervals.
        """
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
        """The properties of the method, see `find_tree_method`."""
        return find_tree_method(self.name)

    @property
    def label(self) -> str:
        """The name of the method in reports, such as plain, chain or DDTree 64 (node budget 64)."""
        row = self.tree_method
        return f"{row.label} {self.budget}" if row.scales_with_budget else row.label


def find_tree_method(name: str) -> TreeMethod:
    """Return the properties of the decoding method with the given name.

    The name is a key of TREE_METHODS, or the name of one of two methods that only evaluations use:
    drafting from n-grams without a drafter, and baseline decoding with transformers. For an unknown
    name, default properties are returned.
    """
    rows = TREE_METHODS | {
        row.name: row for row in (NGRAMS_ALONE_TREE_METHOD, TRANSFORMERS_BASELINE_METHOD)
    }
    if name in rows:
        return rows[name]
    return TreeMethod(name, name, builder_path="", max_nodes_for_block=lambda block_size: 0)


@dataclass(frozen=True)
class FirstChoiceAccuracy:
    """How often the drafter's first choice, its most likely token, is the token that the target
    generates. Each decoding round with a draft tree gives one attempt for each accepted draft
    token, and one for the token after them.

    source: which scores of the drafter choose the token: "head" for the scores with the conditional
        head, which depend on the token before; "marginals" for the scores without it
    prefix: "first choices" if all accepted tokens before the attempt were first choices; "a
        sibling" if one of them was a less likely token
    attempts: number of attempts at each depth of the tree, from depth 1
    correct: number of attempts at each depth in which the first choice was right
    intervals: confidence interval of the accuracy at each depth
    interval: confidence interval of the accuracy over all depths
    """

    source: str = field(metadata={"key": "by"})
    prefix: str = field(metadata={"key": "behind"})
    attempts: list[int] = field(metadata={"key": "asked"})
    correct: list[int] = field(metadata={"key": "right"})
    intervals: list[list[float] | None]
    interval: list[float] | None = None

    @property
    def accuracy(self) -> float:
        """The share of attempts, over all depths, in which the first choice was right."""
        return sum(self.correct) / max(1, sum(self.attempts))


@dataclass(frozen=True)
class ReplayResult:
    """The acceptance length of a tree method with one node budget, computed without decoding.

    nodes is the node budget. ranking is explained at `ReplayVariant` in infer/evaluation/replay.py.
    """

    method: str
    nodes: int
    ranking: str = field(metadata={"key": "by"})
    tau: float  # acceptance length: tokens per round
    tau_interval: list[float] | None = None


@dataclass(frozen=True)
class TreeStudy:
    """A comparison of trees and chains (drafts without branches). The acceptance with both was
    computed for given greedy outputs, without decoding them again (infer/evaluation/replay.py).

    nodes: node budget of the draft trees for which `first_choices` was counted
    first_choices: how often the most likely token of the drafter is right
    results: the acceptance length with each tree method and node budget
    """

    nodes: int
    first_choices: list[FirstChoiceAccuracy] = field(metadata={"key": "choices"})
    results: list[ReplayResult] = field(metadata={"key": "orders"})


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The results of every decoding method on the same prompts.

    The first method is baseline decoding by our engine. For a masked diffusion model, it is
    decoding with one denoising step per forward pass.
    """

    target: str
    device: str
    dtype: str
    prompts: int
    max_new_tokens: int
    temperature: float
    block_size: int | None = None  # None for a masked diffusion model
    methods: list[MethodResult]
    samples: list[TextSample]
    step: int | None = None  # training step of the evaluated checkpoint
    checkpoint: str | None = None
    drafter: str | None = None
    baseline: str | None = None  # name of the fastest baseline; None means "plain", our engine
    # Evaluations of the same methods on other prompts, or with sampling
    other_evaluations: "list[Evaluation] | None" = field(default=None, metadata={"key": "beside"})
    example: ExampleRound | None = None
    # Name of the prompt set, such as "temperature 1"; None for the held-out prompts of the main
    # evaluation
    prompt_set_name: str | None = field(default=None, metadata={"key": "what"})
    # Prompts, answers and acceptance with which the command `doctor` checks other engines
    reference: AcceptanceReference | None = None
    # None if nothing was replayed: for sampled outputs, and for prompt lookup
    tree_study: TreeStudy | None = field(default=None, metadata={"key": "trees"})
    # A sentence about the prompts that were not decoded because of evaluation.max_minutes; None if
    # all prompts were decoded
    time_limit_note: str | None = field(default=None, metadata={"key": "cut"})
    # Date of the measurement, such as 2026-11-28; None in files of earlier versions
    date: str | None = None

    @property
    def engine_methods(self) -> list[MethodResult]:
        """All methods except baseline decoding by transformers."""
        return [
            method for method in self.methods if method.name != TRANSFORMERS_BASELINE_METHOD.name
        ]

    @property
    def drafting_methods(self) -> list[MethodResult]:
        """All methods except our baseline decoding and that of transformers."""
        return self.engine_methods[1:]

    @property
    def drafter_methods(self) -> list[MethodResult]:
        """The methods that use the drafter, with or without n-grams."""
        return [
            method
            for method in self.drafting_methods
            if method.tree_method is not NGRAMS_ALONE_TREE_METHOD
        ]

    @property
    def best_drafter_method(self) -> MethodResult:
        """The fastest method that uses the drafter, see `select_best_method`."""
        return select_best_method(self.drafter_methods)

    @property
    def fastest_baseline(self) -> MethodResult:
        """The result of the fastest baseline decoder. Speedups are relative to it."""
        for method in self.methods:
            if method.name == self.baseline:
                return method
        return self.methods[0]

    @property
    def same_output(self) -> bool:
        """Whether all outputs of our engine equal those of baseline decoding, also in
        `other_evaluations`.
        """
        if not all(method.identical for method in self.engine_methods):
            return False
        return all(evaluation.same_output for evaluation in self.other_evaluations or ())

    @property
    def with_others(self) -> "list[Evaluation]":
        """This evaluation, followed by `other_evaluations`."""
        return [self, *(self.other_evaluations or ())]


def select_best_method(methods: Sequence[MethodResult]) -> MethodResult:
    """Return the method with the highest lower end of the confidence interval of its speedup. For a
    method without a confidence interval, the speedup itself is compared.
    """
    return max(methods, key=lambda method: (method.speedup_interval or [method.speedup])[0])


@dataclass(frozen=True)
class SetResult:
    """The results of one question set at one temperature."""

    settings: dict[str, object]  # all settings that determine the results, by name
    set: str
    title: str
    temperature: float
    questions: int
    answers: int  # number of chat turns that were answered
    left_out: int  # number of chat turns that were left out because they are too long
    result: Evaluation


@dataclass(frozen=True)
class SuiteResult:
    """The results of all question sets of a suite, sorted by temperature."""

    suite: str
    checkpoint: str
    target: str
    sets: list[SetResult]


def write_result(path: Path, result: object) -> None:
    """Write one of the dataclasses of this module to a JSON file."""
    write_json(path, to_json(result))


def read_result(path: Path, result_class: type[Result]) -> Result:
    """Read a JSON file that `write_result` wrote, and return the dataclass.

    Raises OSError if the file cannot be read, and ValueError if its content does not fit.
    """
    try:
        return from_json(json.loads(path.read_text(encoding="utf-8")), result_class)
    except TypeError as error:
        raise ValueError(
            f"{path} does not contain a result of the type {result_class.__name__} ({error}): "
            "measure again, or use another file"
        ) from error


def json_key(dataclass_field: Field) -> str:
    """Return the key of a dataclass field in JSON files."""
    return dataclass_field.metadata.get("key", dataclass_field.name)


def to_json(value: Any) -> Any:
    """Convert a value to JSON types. Dataclasses become dictionaries, at any depth.

    Fields that are None are left out, except `step`.
    """
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
    """Build a `result_class` dataclass from a dictionary that `to_json` returned."""
    hints = get_type_hints(result_class)
    values = {}
    for each in fields(result_class):  # ty: ignore[invalid-argument-type]
        key = json_key(each)
        if key in data:
            values[each.name] = decode_field_value(data[key], hints[each.name])
    return result_class(**values)


def decode_field_value(value: Any, annotation: Any) -> Any:
    """Convert the JSON value of a dataclass field to the type of the field.

    annotation: the type of the field, such as list[TextSample] or ExampleRound | None
    """
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
