"""Prompts and rounds of a causal target: the same round eager, or captured as a CUDA graph in fixed
shapes.

B rows, M tree nodes, W = max depth + 1, V vocabulary.
"""

from collections import abc
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from infer.config import TEXT_NGRAMS, EngineConfig, TextOptions
from infer.drafters.base import Drafter
from infer.drafters.heads.draft import ConditionalDraft
from infer.engine.budget import SIZES, Budget, BudgetController, rule_of
from infer.engine.capture import Columns, Graphs
from infer.engine.choices import RowsAsked, sampling_of, texts_ask
from infer.engine.memory import Memory, Prefill
from infer.engine.packet import note_logprobs, pack, rejected_path, unpack
from infer.engine.prefixes import BLOCK, Prefixes
from infer.engine.round import Method, RoundResult, commit, follow_target, run_round
from infer.engine.sampling import Kind, condition_on_noise, judge_on_noise
from infer.engine.sequence import Processor, Sequence, Stopwatch
from infer.ngrams.model import NGram
from infer.targets.target import Features, Target, takes_uneven
from infer.targets.watch import Watch
from infer.trees.constrained import Rule, constrain
from infer.trees.methods import TreeMethod
from infer.trees.tree import DraftTree, Proposal, plain, root_only

SEARCHED = 8192  # tokens at a text's end in which trees with n-grams look for what came before
NGRAM_WEIGHT = 0.8  # of the n-gram model against the drafter


class Size(NamedTuple):
    """What a captured round is for; each is a graph of its own."""

    rows: int
    nodes: int
    kind: Kind


class Runner:
    """Runs what a `Scheduler` decides. A text does not depend on what is written beside it (float32;
    lower precisions round differently in other batch shapes). The drafter may be None for methods that
    draft nothing. On CUDA, rounds of texts without logits processors are graphs, one for every power of
    two of rows, every number of nodes and every `Kind` of sampling; the first two rounds of each take
    longer. Raises ValueError where options do not fit."""

    def __init__(
        self, target: Target, drafter: Drafter | None, options: EngineConfig, capacity: int, watch: Stopwatch
    ) -> None:
        asked, options = options.continuity, options.beside(None if drafter is None else drafter.ngrams)
        self.target, self.options, self.capacity, self.watch = target, options, capacity, watch
        self.vocabulary = target.vocabulary
        self.drafter, self.method = drafter if options.drafts else None, options.tree
        check_drafter(target, drafter, options)
        self.changes = target.follow_weights()
        self.build = self.method.load()
        self.ngram = ngrams_of(target, options, asked) if self.method.ngrams else None
        self.length, nodes = 0, 0  # L drafted positions
        if self.drafter is not None:
            self.length, auto = drafter.block_size - 1, options.budget == "auto"
            nodes = SIZES[-1] if auto else options.budget
            if self.method.most_nodes is not None:
                nodes = min(nodes, self.method.most_nodes(drafter.block_size))
        self.budget = Budget(nodes)
        if self.drafter is not None and auto:
            rule, uneven = rule_of(target, drafter, watch.clock), self.method.ranked and takes_uneven(target)
            self.budget = BudgetController(rule, nodes, uneven)
        # a round of texts without processors asks the host for nothing between its start and its end
        on_device = self.drafter is None or drafter.family.on_device
        on_device = on_device and not self.method.ngrams and target.lean
        self.captures = target.device.type == "cuda" and options.compile is not False and on_device
        # rounds that are replayed in the time of a pass over prompts, which is launched (docs/results/gpu.md)
        self.patience = 4 if self.captures else 0
        self.reset()

    def reset(self) -> None:
        """Make all memory anew; the old one is freed before."""
        rows, device = self.options.rows, self.target.device
        self.memory = self.prompts = None
        megabytes = self.options.prefix_memory
        # of recurrent layers there would be states to keep, behind every block
        self.prefixes = Prefixes(megabytes * 2**20) if megabytes and not self.target.recurrent else None
        whole = self.prefixes is not None
        self.memory = Memory(self.target, self.drafter, rows, self.capacity, self.budget.most, whole)
        self.weights = Watch(self.drafter or nn.Module())  # behind `Memory`, which joins a drafter's weights
        models = [self.target] if self.drafter is None else [self.target, self.drafter]
        self.graphs = Graphs(device, models)  # the old ones work on memory that is gone
        self.columns = Columns(rows, self.vocabulary, device)
        # texts, and how long they were, that the device knows as they are
        self.noted: list[tuple[Sequence, int]] = []

    def new_text(self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor] = ()) -> Sequence:
        """Return a text to be queued."""
        return Sequence(prompt, options, processors)

    def weights_changed(self, enters: bool) -> bool:
        """Return whether weights are others than those that all memory was computed with. Weights that
        were written to in a way that PyTorch does not see are looked at where a text `enters`."""
        if not (enters or self.target.watch.written() or self.weights.written() or self.changes != self.target.changes):
            return False
        before, self.changes = self.changes, self.target.follow_weights()
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
        """Take the rows into use whose prompts are computed: their last positions yield the first bonus
        tokens."""
        memory, last = self.memory, self.prompts.finish()
        self.prompts, rows = None, range(len(memory.cache.lengths) - len(texts), len(memory.cache.lengths))
        for row, text in zip(rows, texts, strict=True):
            self._keep_prefix(row, text)
            text.stats.reused = min(text.reused, len(text.prompt))
        start = torch.tensor([len(text.known) - 1 for text in texts], device=last.device)
        tree = root_only(torch.tensor([text.known[-1] for text in texts], device=last.device))
        asked = texts_ask(self.target, texts, start, 0)
        accepted, chosen = follow_target(self.target, tree, tree.ancestors(), last, asked)
        memory.bonuses[rows.start : rows.stop] = accepted.bonus
        found = RoundResult(tree, tree, Features(None, last), chosen, accepted)
        packet = pack(self.target, found, asked.sampling.kind.logprobs, promises=False)
        for text, row in zip(texts, packet.tolist(), strict=True):
            told = unpack(row, 1, 0)
            note_logprobs(text, told.logprobs)
            text.append(told.tokens, self.target)
            if len(text.commits) > 1:  # entered before, and waited after a step that raised
                text.commits[0] += text.commits.pop()

    def round(self, texts: list[Sequence], most: int) -> None:
        """Run a round with trees of `most` nodes at most."""
        began, memory = self.watch.start(), self.memory
        nodes = self.budget.most_nodes(len(texts), most)
        captured = self.captures and not any(text.judged for text in texts)
        if nodes or captured:
            memory.tell_drafter()
        found, packet = self._replay(texts, nodes) if captured else self._launch(texts, nodes)
        self.watch.lap("verify")
        path = found.accepted.path
        promised = found.whole.budget + 1 if captured and self.budget.adapts else 0
        told = [unpack(row, path.shape[1], promised) for row in self._to_host(packet[: len(texts)])]
        lengths = [len(row.tokens) for row in told]
        if captured:
            memory.count(lengths)
        else:
            commit(memory, found, path[:, : max(lengths)], lengths)
        drafted = found.tree.budgets
        for number, (text, row) in enumerate(zip(texts, told, strict=True)):
            note_logprobs(text, row.logprobs)
            text.append(row.tokens, self.target)
            text.drafted.append(drafted[number])
            text.accepted.append(len(row.path))
            text.stats.rounds += 1
            if text.trace:
                text.rejected.append(rejected_path(found.tree, number, [0, *row.path][-1]))
        self.noted = [(text, len(text.ids)) for text in texts] if captured else []
        seconds, paths = self.watch.clock() - began, [row.path for row in told]
        self.budget.note(seconds, sum(drafted) // len(texts), paths, [row.log_probs for row in told])
        self.watch.lap("commit")

    def _to_host(self, packet: torch.Tensor) -> list[list[float]]:
        return packet.tolist()

    def _launch(self, texts: list[Sequence], nodes: int) -> tuple[RoundResult, torch.Tensor]:
        """Run a round that nothing of is committed yet; return it and its `pack`."""
        asked = texts_ask(self.target, texts, self.memory.cache.ends_of(len(texts)), self.length)
        method = self._method(asked, nodes, self.budget.cut)
        found = run_round(self.memory, asked, method, self.watch.lap)
        return found, pack(self.target, found, asked.sampling.kind.logprobs, promises=False)

    def _replay(self, texts: list[Sequence], nodes: int) -> tuple[RoundResult, torch.Tensor]:
        """Run a round that is committed on the device already, in a graph of the next larger size."""
        rows = min(1 << (len(texts) - 1).bit_length(), self.options.rows)
        kind = Kind.of([text.options for text in texts], self.vocabulary)
        nodes = self.budget.nodes_ahead(len(texts), nodes) if nodes else 0
        if nodes not in (0, self.budget.most):  # graphs have few sizes
            nodes = max(size for size in SIZES if size <= nodes)
        size = Size(rows, nodes, kind)
        if kind != Kind() and self.noted != [(text, len(text.ids)) for text in texts]:
            self.columns.write(*sampling_of(self.target, texts))
        return self.graphs.run(size, partial(self._captured, size))

    def _captured(self, size: Size) -> tuple[RoundResult, torch.Tensor]:
        """Compute and commit a round on the device alone, in shapes that depend on nothing but its
        size, of whose rows the used ones are the first: what a CUDA graph can hold."""
        memory = self.memory
        with ExitStack() as fixed:
            fixed.enter_context(memory.cache.fixed(size.rows))
            if memory.state is not None:
                fixed.enter_context(memory.state.cache.fixed(size.rows))
            rows, start = slice(size.rows), memory.cache.ends_of(size.rows)
            sampling = self.columns.sampling.rows(rows, size.kind)
            seen = self.columns.seen[rows] if size.kind.penalised else None
            asked = RowsAsked(sampling, start, self.length + 1, self.vocabulary, seen)
            method = self._method(asked, self.budget.grown(size.nodes), lambda tree: tree.first(size.nodes))
            found = run_round(memory, asked, method)
            accepted, packet = found.accepted, pack(self.target, found, size.kind.logprobs, self.budget.adapts)
            if seen is not None:
                seen.scatter_(1, found.tree.tokens.gather(1, accepted.path), True)
                seen.scatter_(1, accepted.bonus[:, None], True)
            commit(memory, found, accepted.path, None)
            memory.tell_drafter()
        return replace(found, features=None, chosen=None), packet  # a graph keeps the memory of its results

    def _method(self, asked: RowsAsked, nodes: int, cut: abc.Callable[[DraftTree], DraftTree]) -> Method:
        """Return how trees come about: so many nodes are found, and cut."""
        if not nodes:
            return Method(partial(Proposal, self.memory.bonus, None), plain)

        def build(proposal: Proposal) -> DraftTree:
            return follow_grammars(self.build(proposal), proposal, asked.texts, self.method)

        return Method(partial(propose, self.memory, asked, nodes, self.options, self.ngram), build, cut)

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
            # the last token's position may be there or not, and a drafter's item there waits for the
            # next one
            ids = text.known[: self.memory.cache.lengths[row]]
            self.prefixes.keep(ids, partial(self.memory.read, row))


def check_drafter(target: Target, drafter: Drafter | None, options: EngineConfig) -> None:
    """Raise ValueError where there is no drafter, or one of another dtype."""
    if options.drafts and drafter is None:
        raise ValueError(f"method={options.method} needs a drafter: load one with load_drafter, or use method=plain")
    if drafter is not None and drafter.dtype not in (None, target.dtype):
        mine, theirs = (str(dtype).removeprefix("torch.") for dtype in (drafter.dtype, target.dtype))
        raise ValueError(f"the drafter's weights are {mine}, the target's {theirs}: load_drafter(folder, target.dtype)")


def ngrams_of(target: Target, options: EngineConfig, asked: str | None) -> NGram:
    """Return the n-grams that trees ask beside the text's own: those of the file that a user `asked`
    for, none where the text's are to do, else the drafter's."""
    if asked == TEXT_NGRAMS:
        return NGram.uniform(target.vocabulary)
    # a drafter's own belong to its target's ids, whatever template a user gave the tokenizer
    return NGram.open(options.continuity, target.tokenizer_digest if asked else None)


def propose(memory: Memory, asked: RowsAsked, nodes: int, options: EngineConfig, ngram: NGram | None) -> Proposal:
    """Draft behind the roots, and collect what else the tree method may use for `nodes` nodes at
    most."""
    target, drafter = memory.target, memory.drafter
    known = drafter.vocabulary
    seen = known.part(asked.seen)
    noise = asked.noise if known.tokens is None else asked.some_noise(slice(None), 0, asked.steps, known.tokens)
    told = asked.sampling, noise, None if seen is None else seen[:, None]
    block, steps = drafter.draft_block(target, memory.bonus, memory.state), None
    if drafter.head_row is not None:  # tokens depend on the ones drafted before them
        steps = ConditionalDraft(drafter, target, memory.bonus, block, judge_on_noise(*told))
    return Proposal(
        memory.bonus,
        condition_on_noise(block.marginals, *told),  # (B, L, V)
        nodes,
        ngram,
        [text.end(SEARCHED) for text in asked.texts] if ngram else (),
        NGRAM_WEIGHT,
        options.width,
        target.end_ids,
        steps,
        known,
    )


def follow_grammars(
    tree: DraftTree, proposal: Proposal, texts: abc.Sequence[Sequence], method: TreeMethod
) -> DraftTree:
    """Return the tree with the rows built anew whose texts follow a grammar."""
    if not method.ranked or not tree.budget:
        return tree
    rows = {
        row: Rule(partial(text.grammar.drafted, text.ids), text.grammar.forced(text.ids))
        for row, text in enumerate(texts)
        if text.grammar is not None
    }
    return constrain(tree, proposal, rows, method.by_budget) if rows else tree
