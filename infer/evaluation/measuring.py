"""Ways of decoding, measured on the same prompts in turn: what each wrote, and how long it took."""

import math
import statistics
import time
from collections import abc
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist
from transformers import GenerationConfig, StoppingCriteriaList

from infer.api import AnyTarget, open_engine
from infer.config import NO_NGRAMS, TEXT_NGRAMS, DecodeOptions, EvaluationConfig, TextOptions
from infer.drafters.base import Drafter
from infer.drafters.families import LOOKUP
from infer.drafters.lookup import Lookup
from infer.engine.loops import LONGEST_PERIOD, TIMES, loop_period
from infer.engine.sampling import derived_seed
from infer.engine.sequence import Sequence, text_end
from infer.evaluation.acceptance import AnyPrompt
from infer.evaluation.replay import ReplayedText
from infer.evaluation.results import GENERATE, PromptResult
from infer.evaluation.ruler import DISTURBED
from infer.evaluation.showing import Shown
from infer.targets.target import Target
from infer.trees.methods import ALONE, TREES, TreeMethod

SHARED = ("max_new_tokens", "temperature")  # with DecodeOptions
Progress = abc.Callable[[int, int], None]  # (prompts done, prompts)


@dataclass(frozen=True)
class Variant:
    """One way of decoding that is measured."""

    name: str
    budget: int  # drafted nodes a round; for a masked model, states
    options: DecodeOptions
    drafter: Drafter | None = None  # in the place of the one that is evaluated


@dataclass
class Measured:
    """What one variant wrote, and how long it took."""

    variant: Variant
    texts: list[Sequence] = field(default_factory=list)
    prompts: list[PromptResult] = field(default_factory=list)  # of the texts, in their order
    shown: Shown | None = (
        None  # of plain decoding: texts of the tree with the highest acceptance length
    )
    # of plain decoding: the greedy texts by other orders
    replayed: list[ReplayedText] = field(default_factory=list)
    again: int = 0  # prompts that something disturbed, which were measured again

    @property
    def seconds(self) -> float:
        return sum(sum(one.seconds) for one in self.prompts)

    @property
    def stats(self) -> list:
        """What decoding each text took."""
        return [text.stats for text in self.texts]

    def add(self, other: "Measured") -> None:
        """Add what was measured of the same variant on other prompts, in turn or by another
        process."""
        self.texts += other.texts
        self.prompts += other.prompts
        self.shown = self.shown or other.shown
        self.replayed += other.replayed
        self.again += other.again

    def disturbed(self) -> list[int]:
        """Return which prompts took more than DISTURBED times the median time a token."""
        paces = [one.seconds[0] / max(1, one.tokens) for one in self.prompts]
        return [i for i, pace in enumerate(paces) if pace > DISTURBED * statistics.median(paces)]


def join(shares: abc.Iterable[list[Measured]]) -> list[Measured]:
    """Join what was measured in turn, or by several processes: the variants that all of them
    measured."""
    of_one = [{(one.variant.name, one.variant.budget): one for one in share} for share in shares]
    joined = []
    for key, first in of_one[0].items():
        if all(key in each for each in of_one):
            joined.append(Measured(first.variant))
            for each in of_one:
                joined[-1].add(each[key])
    return joined


@dataclass(frozen=True)
class PromptSet:
    """The prompts of an evaluation that are reported together, and how they are decoded."""

    what: str | None  # what is different from the evaluation's own prompts; None: these are they
    prompts: list[AnyPrompt]
    numbers: list[int]  # of the prompts among all
    config: EvaluationConfig
    cut: str | None = None  # what was left out for want of time


def variants(drafter: Drafter, config: EvaluationConfig) -> list[Variant]:
    """Return plain decoding, transformers', then the other evaluated rows of the table of tree
    methods, in its order, and n-grams without the drafter. N-grams are measured with the budget in
    the middle: those that the user asked for; else, by DDTree, those that lie beside the drafter's
    weights."""
    asked = config.ngrams
    most = middle(config.budgets)
    found = []
    shared = {name: value for name, value in asdict(config).items() if name in SHARED}
    # positions: every method gets the budget that is measured
    shared |= {"loop_period": LONGEST_PERIOD, "max_num_seqs": 1, "max_num_batched_tokens": None}
    for row in TREES.values():
        options = DecodeOptions(method=row.name, ngrams=NO_NGRAMS, **shared)
        budgets = config.budgets if row.by_budget else [row.most_nodes(drafter.block_size)]
        if row.ngrams:  # where nobody asked for any, the engine takes the drafter's
            options = replace(options, method=row.name if asked else "ddtree", ngrams=asked)
            budgets = [most]
        if row.evaluated and (not row.ngrams or has_ngrams(row, drafter, asked)):
            found += [
                Variant(row.name, budget, replace(options, budget=max(1, budget)))
                for budget in budgets
            ]
    plain, *trees = found
    if asked != NO_NGRAMS and drafter.family is not LOOKUP:
        file = None if asked else drafter.ngrams
        options = DecodeOptions(
            budget=most, ngrams=asked or (None if file else TEXT_NGRAMS), **shared
        )
        trees.append(Variant(ALONE.name, most, options, Lookup(drafter.block_size, file)))
    return [plain, replace(plain, name=GENERATE.name), *trees]


def has_ngrams(row: TreeMethod, drafter: Drafter, asked: str | None) -> bool:
    """Return whether there are n-grams for a row that needs them."""
    if asked is None:
        return row.recalls and drafter.ngrams is not None
    return asked != NO_NGRAMS and (row.recalls or asked != TEXT_NGRAMS)


def decided(model: AnyTarget, value: object) -> object:
    """Return what the clock decided: where processes compute every pass of the target together
    (`target.shard`), the first one's, as they must not decide by clocks of their own."""
    values = [value]
    if model.spread:
        dist.broadcast_object_list(values)
    return values[0]


def cut_at(minutes: float | None, done: int, asked: int) -> str | None:
    """Return the sentence about prompts that a deadline left out, None where there are none."""
    return (
        f"evaluation.max_minutes={minutes:.3g} had time for {done} of {asked} prompts"
        if done < asked
        else None
    )


def middle(budgets: abc.Sequence[int]) -> int:
    """Return the budget in the middle, of two the larger one."""
    return sorted(budgets)[len(budgets) // 2]


def measure(
    model: AnyTarget,
    drafter: Drafter | None,
    variants: abc.Sequence[Variant],
    prompts: abc.Sequence[abc.Sequence[int]],
    progress: Progress = lambda done, total: None,
    numbers: abc.Sequence[int] | None = None,
    until: float = math.inf,
) -> list[Measured]:
    """Decode every prompt with every variant, one at a time. The variants take turns on the same
    prompts, each beginning as often as the others, so that a noisy machine is equally noisy for
    all; what was disturbed is measured again, until `until`. `numbers` are the prompts' own among
    all that are sampled with one seed, by default 0, 1, 2, ...: each has a seed derived from its
    number. None but the first begins after `until`, by time.monotonic."""
    clock = synchronised_clock(model.device)
    capacity = max(map(len, prompts), default=0) + max(
        variant.options.max_new_tokens for variant in variants
    )
    numbers = list(range(len(prompts)) if numbers is None else numbers)

    def run(variant: Variant, number: int, prompt: list[int]) -> Measured:
        options = replace(variant.options, seed=derived_seed(variant.options.seed, number))
        began = clock()
        if variant.name == GENERATE.name:
            text = decode_by_generate(model, prompt, options)
        else:
            engine = open_engine(model, variant.drafter or drafter, options, capacity, clock)
            text = engine.submit(prompt, options)
            while engine.busy:
                engine.step()
        taken = PromptResult(
            number=number,
            kind="",
            tokens=text.stats.tokens,
            rounds=text.stats.rounds,
            seconds=[clock() - began],
            looped=TIMES * loop_period(text.ids, len(text.ids), LONGEST_PERIOD)
            if text.finish == "loop"
            else 0,
        )
        return Measured(variant, [text], [taken])

    for variant in (
        variants if prompts else ()
    ):  # warm-up: first calls pay for allocations and kernels
        tokens = min(16, variant.options.max_new_tokens)
        short = replace(variant, options=replace(variant.options, max_new_tokens=tokens))
        run(short, numbers[0], list(prompts[0]))
    measured = [Measured(variant) for variant in variants]
    for i, (number, prompt) in enumerate(zip(numbers, prompts, strict=True)):
        if i and decided(model, time.monotonic() > until):
            break
        for turn in range(len(variants)):
            one = measured[(turn + i) % len(variants)]
            one.add(run(one.variant, number, list(prompt)))
        progress(i + 1, len(prompts))
    for one in measured:
        for i in decided(model, one.disturbed()):
            if decided(model, time.monotonic() > until):
                break
            one.prompts[i] = run(one.variant, numbers[i], list(prompts[i])).prompts[0]
            one.again += 1
    return measured


def decode_by_generate(target: Target, prompt: list[int], options: TextOptions) -> Sequence:
    """Continue a prompt with transformers' `generate`, as long as the engine would. A sampled text
    is another than the engine's: it is drawn with other noise."""
    sampled = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    ends = [] if options.ignore_eos else sorted(target.end_ids)
    config = GenerationConfig(
        max_new_tokens=options.max_new_tokens,
        do_sample=options.temperature > 0,
        # none: a token that cannot come, as None would be filled in from the model's own
        # configuration
        eos_token_id=ends or [target.vocabulary],
        pad_token_id=0,
        repetition_penalty=1.0,
        **(sampled if options.temperature else {}),
    )

    def looped(ids: torch.Tensor, scores: object, **unused: object) -> torch.Tensor:
        new = ids[0, len(prompt) :].tolist()
        return torch.tensor(
            [bool(new and loop_period(new, len(new), options.loop_period))], device=ids.device
        )

    ids = torch.tensor([prompt], device=target.device)
    stops = StoppingCriteriaList([looped] if options.loop_period else [])
    with (
        torch.random.fork_rng([target.device] if target.device.type == "cuda" else []),
        torch.no_grad(),
    ):
        torch.manual_seed(options.seed)
        out = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=config,
            stopping_criteria=stops,
        )
    text = Sequence(prompt, options)
    new = out[0, len(prompt) :].tolist()
    length, text.finish = text_end(new, 0, options, target) or (len(new), "length")
    text.ids = new[:length]
    text.commits = [1] * length
    text.stats.tokens = length
    text.stats.rounds = length - 1  # the first pass is the prompt's
    text.stats.histogram = [length - 1]
    return text


def synchronised_clock(device: torch.device) -> abc.Callable[[], float]:
    """Return a clock that waits for the device's work before it is read. Seconds."""
    if device.type != "cuda":
        return time.perf_counter

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock
