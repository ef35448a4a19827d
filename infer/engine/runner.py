"""Prompts and rounds of a causal target: the same round eager, or captured as CUDA graphs in fixed
shapes.

B rows, M tree nodes, W = most nodes on a path, V vocabulary.
"""

from collections import abc
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from infer.config import EngineConfig, TextOptions
from infer.drafters.base import Drafter
from infer.drafters.heads.draft import ConditionalDraft
from infer.engine.budget import SIZES, Budget
from infer.engine.capture import Columns, Graphs
from infer.engine.choices import (
    Accepted,
    RowsAsked,
    choose_on_host,
    choose_tokens,
    sampling_of,
    texts_ask,
    walk,
)
from infer.engine.memory import Memory, Prefill
from infer.engine.packet import Told, note_logprobs, pack, rejected_path, unpack
from infer.engine.prefixes import BLOCK, Prefixes
from infer.engine.round import RoundPlan, RoundResult, run_round
from infer.engine.sampling import Kind, condition_on_noise, judge_on_noise
from infer.engine.sequence import Processor, Sequence, Stopwatch
from infer.ngrams.model import NGram
from infer.targets.target import Target
from infer.targets.watch import Watch
from infer.trees.constrained import Rule, constrain
from infer.trees.methods import TreeMethod
from infer.trees.tree import DraftTree, Proposal, plain, root_only

SEARCHED = 8192  # tokens at a text's end in which trees with n-grams look for what came before
NGRAM_WEIGHT = 0.8  # of the n-gram model against the drafter


class GraphKey(NamedTuple):
    """What a captured round, or a stage of one, is for; each is a graph of its own."""

    stage: str  # "round" for all of it
    rows: int
    nodes: int
    kind: Kind
    grammar: bool = False  # trees may be built anew behind the draft


@dataclass(frozen=True)
class DeviceState:
    """What a runner keeps on the device. After an error its contents are unknown, and it is made
    anew."""

    memory: Memory
    graphs: Graphs  # they work on this memory
    columns: Columns
    prefixes: Prefixes | None  # None: nothing is kept of texts


class Runner:
    """Runs what a `Scheduler` decides. A text does not depend on what is written beside it
    (float32; lower precisions round differently in other batch shapes). The drafter may be None for
    methods that draft nothing. What it works with is made by `infer.engine.engine.make_runner`.

    On CUDA, rounds are graphs, one for every power of two of rows, every number of nodes and every
    `Kind` of sampling; the first two rounds of each take longer. A round with texts that have a
    grammar or logits processors is three graphs, between which the host looks after these texts."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: EngineConfig,
        capacity: int,
        ngram: NGram | None,
        budget: Budget,
        watch: Stopwatch,
        make_state: abc.Callable[[], DeviceState],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.capacity = capacity
        self.ngram = ngram
        self.budget = budget
        self.watch = watch
        self.make_state = make_state
        self.vocabulary = target.vocabulary
        self.method = options.tree
        self.build = self.method.load()
        self.length = 0 if drafter is None else drafter.block_size - 1  # L drafted positions
        self.changes = target.changes  # of its weights, see `weights_changed`
        # a round asks the host for nothing between the start and the end of a stage
        on_device = drafter is None or drafter.family.on_device
        on_device = on_device and not self.method.ngrams and target.lean is not None
        self.captures = target.device.type == "cuda" and options.compile is not False and on_device
        # rounds that are replayed in the time of a pass over prompts, which is launched
        # (docs/results/gpu.md)
        self.patience = 4 if self.captures else 0
        self.reset()

    def reset(self) -> None:
        """Make all memory anew; the old one is freed before."""
        self.memory = self.prompts = self.graphs = self.columns = self.prefixes = None
        state = self.make_state()
        self.memory = state.memory
        self.graphs = state.graphs
        self.columns = state.columns
        self.prefixes = state.prefixes
        self.weights = Watch(
            self.drafter or nn.Module()
        )  # behind `Memory`, which joins a drafter's weights
        # texts, and how long they were, that the device knows as they are
        self.noted: list[tuple[Sequence, int]] = []

    def new_text(
        self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor] = ()
    ) -> Sequence:
        """Return a text to be queued."""
        return Sequence(prompt, options, processors)

    def weights_changed(self, enters: bool) -> bool:
        """Return whether weights are others than those that all memory was computed with. Weights
        that were written to in a way that PyTorch does not see are looked at where a text
        `enters`."""
        if not (
            enters
            or self.target.watch.written()
            or self.weights.written()
            or self.changes != self.target.changes
        ):
            return False
        before = self.changes
        self.changes = self.target.follow_weights()
        return self.weights.changed() or self.changes != before

    def find_prefix(self, text: Sequence) -> object | None:
        """Note what is kept of a text's prompt, see `Scheduler`."""
        if self.prefixes is None:
            return None
        text.kept, next_key = self.prefixes.find(text.known)
        text.reused = BLOCK * len(text.kept)
        return next_key

    def prefill(self, texts: list[Sequence], done: int, width: int) -> int:
        """Compute the next `width` positions of prompts; return how many there were, padding
        included."""
        self.prompts = self.prompts or Prefill(self.memory, texts)
        return self.prompts.run(done, width)

    def begin(self, texts: list[Sequence]) -> None:
        """Take the rows into use whose prompts are computed: their last positions yield the first
        bonus tokens."""
        memory = self.memory
        last = self.prompts.finish()
        self.prompts = None
        rows = range(len(memory.cache.lengths) - len(texts), len(memory.cache.lengths))
        for row, text in zip(rows, texts, strict=True):
            self._keep_prefix(row, text)
            text.stats.reused = min(text.reused, len(text.prompt))
        accepted, packet = self._choose_first(texts, last)
        memory.bonuses[rows.start : rows.stop] = accepted.bonus
        for text, row in zip(texts, packet.tolist(), strict=True):
            told = unpack(row, 1, 0)
            note_logprobs(text, told.logprobs)
            text.append(told.tokens, self.target)
            if len(text.commits) > 1:  # entered before, and waited after a step that raised
                text.commits[0] += text.commits.pop()

    def _choose_first(
        self, texts: list[Sequence], last: torch.Tensor
    ) -> tuple[Accepted, torch.Tensor]:
        """Choose the tokens behind prompts whose last tokens have final states (B, 1, D); return
        them, and their `pack`."""
        target = self.target
        start = torch.tensor([len(text.known) - 1 for text in texts], device=last.device)
        tree = root_only(torch.tensor([text.known[-1] for text in texts], device=last.device))
        asked = texts_ask(target, texts, start, 0)
        ancestors = tree.ancestors()
        chosen = choose_tokens(target, tree, ancestors, last, asked)
        judged = {row: text for row, text in enumerate(texts) if text.judged}
        choose_on_host(target, tree, ancestors, last, asked, judged, chosen)
        accepted = walk(tree, chosen)
        return accepted, pack(target, tree, last, chosen, accepted, asked.sampling.kind.logprobs)

    def round(self, texts: list[Sequence], most: int) -> None:
        """Run a round with trees of `most` nodes at most."""
        began = self.watch.start()
        memory = self.memory
        nodes = self.budget.choose_nodes(len(texts), most)
        if nodes:
            memory.tell_drafter()
        result = self._replay(texts, nodes) if self.captures else self._launch(texts, nodes)
        self.watch.lap("verify")
        width = result.accepted.path.shape[1]
        rows = [
            unpack(row, width, result.log_probs)
            for row in self._to_host(result.packet[: len(texts)])
        ]
        memory.note_lengths([len(row.tokens) for row in rows])
        drafted = result.tree.budgets
        for number, (text, row) in enumerate(zip(texts, rows, strict=True)):
            self._note_row(text, row, drafted[number], result.tree, number)
        self.noted = [(text, len(text.ids)) for text in texts]
        seconds = self.watch.clock() - began
        paths = [row.path for row in rows]
        log_probs = [row.log_probs for row in rows] if result.log_probs else None
        self.budget.note(seconds, drafted, paths, log_probs)
        self.watch.lap("commit")

    def _note_row(
        self, text: Sequence, row: Told, drafted: int, tree: DraftTree, number: int
    ) -> None:
        """Give a text what a round has committed in its batch row `number`."""
        note_logprobs(text, row.logprobs)
        text.append(row.tokens, self.target)
        text.drafted.append(drafted)
        text.accepted.append(len(row.path))
        text.stats.rounds += 1
        if text.trace:
            text.rejected.append(rejected_path(tree, number, [0, *row.path][-1]))

    def _to_host(self, packet: torch.Tensor) -> list[list[float]]:
        return packet.tolist()

    def _launch(self, texts: list[Sequence], nodes: int) -> RoundResult:
        """Run a round kernel by kernel."""
        memory = self.memory
        ask = partial(texts_ask, self.target, texts, memory.cache.ends_of(len(texts)), self.length)
        found = self.budget.nodes_to_find(len(texts), nodes)
        plan = self._plan(texts, ask, found, self.budget.cut)
        return run_round(memory, plan, self.watch.lap)

    def _replay(self, texts: list[Sequence], nodes: int) -> RoundResult:
        """Run a round as a graph of the next larger size; as a graph for every stage where the host
        has a say."""
        rows = min(1 << (len(texts) - 1).bit_length(), self.options.max_num_seqs)
        kind = Kind.of([text.options for text in texts], self.vocabulary)
        if nodes not in (0, self.budget.most):  # graphs have few sizes
            nodes = max(size for size in SIZES if size <= nodes)
        if kind != Kind() and self.noted != [(text, len(text.ids)) for text in texts]:
            self.columns.write(*sampling_of(self.target, texts))
        judged = any(text.judged for text in texts)
        plan = self._plan(
            texts if judged else (),
            partial(self._ask_columns, rows, kind),
            self.budget.nodes_to_find(rows, nodes),
            lambda tree: tree.first(nodes),
        )

        def run(stage: str, function: abc.Callable[[], object]) -> object:
            return self.graphs.run(
                GraphKey(stage, rows, nodes, kind, plan.constrain is not None), function
            )

        with self.memory.fixed(rows):
            if judged:
                return run_round(self.memory, plan, run=run)
            return run("round", partial(run_round, self.memory, plan))

    def _ask_columns(self, rows: int, kind: Kind) -> RowsAsked:
        """Return what the first `rows` rows ask, from device memory that stays where it is."""
        sampling = self.columns.sampling.rows(slice(rows), kind)
        seen = self.columns.seen[:rows] if kind.penalised else None
        return RowsAsked(
            sampling, self.memory.cache.ends_of(rows), self.length + 1, self.vocabulary, seen
        )

    def _plan(
        self,
        texts: abc.Sequence[Sequence],
        ask: abc.Callable[[], RowsAsked],
        nodes: int,
        cut: abc.Callable[[DraftTree], DraftTree],
    ) -> RoundPlan:
        """Return what a round does that finds so many nodes and cuts them. `texts`: those that the
        host has a say in."""
        log_probs = self.captures and self.budget.adapts  # else `cut` sees them
        if not nodes:
            return RoundPlan(
                ask, lambda asked: Proposal(self.memory.bonus, None), plain, texts=texts
            )
        contexts = [text.end(SEARCHED) for text in texts] if self.ngram else ()
        return RoundPlan(
            ask,
            partial(propose, self.memory, nodes, self.options, self.ngram, contexts),
            self.build,
            cut,
            self._constrain(texts),
            texts,
            log_probs,
        )

    def _constrain(
        self, texts: abc.Sequence[Sequence]
    ) -> abc.Callable[[DraftTree, Proposal], DraftTree] | None:
        """Return what builds the trees of texts with a grammar anew; None where nothing does."""
        if not self.method.ranked or all(text.grammar is None for text in texts):
            return None
        return partial(follow_grammars, texts, self.method)

    def free(self, texts: list[Sequence], entering: list[Sequence], order: list[int]) -> None:
        """Give up the rows of finished texts: row i becomes what row order[i] was."""
        if not entering:
            self.prompts = None
        self.memory.tell_drafter()
        for row, text in enumerate(texts):
            if text.finish is not None:
                self._keep_prefix(row, text)
                text.stats.histogram = [0] * max(self.length + 1, *text.commits[1:], 0)
                for commit in text.commits[1:]:
                    text.stats.histogram[commit - 1] += 1
        self.memory.keep(order)

    def _keep_prefix(self, row: int, text: Sequence) -> None:
        """Keep what a used row holds of its text for texts to come."""
        if self.prefixes is not None:
            # the last token's position may be there or not, and a drafter's item there waits for
            # the next one
            ids = text.known[: self.memory.cache.lengths[row]]
            self.prefixes.keep(ids, partial(self.memory.read, row))


def propose(
    memory: Memory,
    nodes: int,
    options: EngineConfig,
    ngram: NGram | None,
    contexts: abc.Sequence[abc.Sequence[int]],
    asked: RowsAsked,
) -> Proposal:
    """Draft behind the roots, and collect what else the tree method may use for `nodes` nodes at
    most;
    contexts: with an n-gram model, the ends of the rows' texts."""
    target = memory.target
    drafter = memory.drafter
    known = drafter.vocabulary
    seen = known.part(asked.seen)
    noise = (
        asked.noise
        if known.tokens is None
        else asked.some_noise(slice(None), 0, asked.steps, known.tokens)
    )
    told = asked.sampling, noise, None if seen is None else seen[:, None]
    block = drafter.draft_block(target, memory.bonus, memory.state)
    steps = None
    if drafter.head_row is not None:  # tokens depend on the ones drafted before them
        steps = ConditionalDraft(drafter, target, memory.bonus, block, judge_on_noise(*told))
    return Proposal(
        memory.bonus,
        condition_on_noise(block.marginals, *told),  # (B, L, V)
        nodes,
        ngram,
        contexts,
        NGRAM_WEIGHT,
        options.width,
        target.end_ids,
        steps,
        known,
    )


def follow_grammars(
    texts: abc.Sequence[Sequence], method: TreeMethod, tree: DraftTree, proposal: Proposal
) -> DraftTree:
    """Return the trees with those of texts that follow a grammar built anew."""
    if not tree.budget:
        return tree
    rows = {
        row: Rule(partial(text.grammar.drafted, text.ids), text.grammar.forced(text.ids))
        for row, text in enumerate(texts)
        if text.grammar is not None
    }
    return constrain(tree, proposal, rows, method.by_budget)
