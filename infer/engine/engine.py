"""The round loop: draft, build, verify, walk, commit. One loop for every method.

A chain is a tree of width one and plain decoding is a tree with a root alone, so that baselines and methods are
measured by the same code. DDTree section 4.1 lists the steps.

B rows, M tree nodes, L drafted positions, W = max depth + 1, D hidden size, V vocabulary.
"""

import time
from collections import abc
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from infer.attention.kv_cache import KVCache
from infer.config import MASKED_METHODS, TEXT_NGRAMS, EngineConfig, TextOptions
from infer.drafters.base import Drafter, DraftState
from infer.drafters.heads.draft import ConditionalDraft
from infer.engine.base import EngineBase
from infer.engine.budget import SIZES, Pace, rule_of
from infer.engine.capture import Graphs
from infer.engine.choices import choose_tokens, held_tokens, logprobs_of, note_logprobs
from infer.engine.controls import Columns, FixedRows, Kind, most_logprobs
from infer.engine.grammar import asked_grammar
from infer.engine.prefixes import BLOCK, Prefixes
from infer.engine.rejection import children_noise, decide
from infer.engine.sampling import (
    adjust,
    condition_on_noise,
    judge_on_noise,
    round_noise,
    seen_at_nodes,
)
from infer.engine.sequence import Processor, Sequence
from infer.engine.verify import Accepted, walk
from infer.ngrams.model import NGram
from infer.targets.target import Features, Target, pad_ids
from infer.targets.watch import Watch
from infer.trees.constrained import Rule, constrain, forced_chains
from infer.trees.tree import DraftTree, Proposal, plain, root_only

BEHIND = 32  # rounds that draft nothing after which the drafter is given their features
SEARCHED = 8192  # tokens at a text's end in which trees with n-grams look for what came before
FEW = 16  # candidates of a position that small trees consider; larger ones two for each of their nodes


@dataclass
class Prefill:
    """The prompts that are being computed, in rows that are not in use yet."""

    rows: ExitStack  # closing it takes the rows into use
    cache: KVCache
    state: DraftState | None
    last: list[torch.Tensor | None]  # (D,) each: the final hidden state of a prompt's last token


@dataclass(frozen=True)
class Committed:
    """Newly committed positions, for the drafter."""

    context: torch.Tensor  # (B, C, F) features
    tokens: torch.Tensor  # (B, C)
    lengths: list[int]  # how many of them are real in every row
    lengths_on_device: torch.Tensor  # (B,)


@dataclass(frozen=True)
class Round:
    """What a round computes on the device before anything is committed."""

    tree: DraftTree
    nodes: int  # drafted ones that are verified in every row
    features: Features | None  # of all nodes; None: they are committed already
    chosen: torch.Tensor  # (B, M) the target's token after every node
    accepted: Accepted
    packet: torch.Tensor  # (B, 2 + 2 W) int64 for the host: lengths, bonus tokens, drafted tokens, their nodes;
    #                       then, for budget=auto, the bits of float32 log-probabilities of all nodes found
    logprobs: torch.Tensor | None = None  # (B, W, 1 + 2 k) float64, see `logprobs_of`, where a text asks for them
    drafted: bool = True  # false: grammars forced the trees


class Engine(EngineBase):
    """Decodes with a causal target: every row with its own tree and acceptance.

    A text does not depend on what is written beside it (float32; lower precisions round differently in other batch
    shapes). The drafter may be None for methods that draft nothing. On CUDA, rounds of texts without logits
    processors are graphs, one for every power of two of rows, every number of nodes and every `Kind` of sampling; the
    first two rounds of each take longer. Raises ValueError where options do not fit the drafter or the target.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: EngineConfig,
        capacity: int,
        clock: abc.Callable[[], float] = time.perf_counter,
    ) -> None:
        asked, options = options.continuity, options.beside(None if drafter is None else drafter.ngrams)
        super().__init__(target, options, capacity, clock)
        if options.method in MASKED_METHODS:
            raise ValueError(f"method={options.method} is for masked diffusion models, which {target.name} is not")
        self.changes = target.follow_weights()
        self.drafter, self.method, self.drafts = drafter, options.tree, options.drafts
        self.watch = Watch(drafter or nn.Module())
        self.build = self.method.load()
        if self.drafts and drafter is None:
            raise ValueError(
                f"method={options.method} needs a drafter: load one with load_drafter, or use method=plain"
            )
        self.pace: Pace | None = None
        self.ngram: NGram | None = None
        if self.method.ngrams:
            self.ngram = self._ngrams(asked)
        self.length, self.nodes, self.layers = 0, 0, ()
        # whether tokens depend on the ones drafted before them
        self.heads = drafter is not None and drafter.head_row is not None
        if drafter is not None and drafter.dtype not in (None, target.dtype):
            mine, theirs = (str(dtype).removeprefix("torch.") for dtype in (drafter.dtype, target.dtype))
            raise ValueError(
                f"the drafter's weights are {mine}, the target's {theirs}: load_drafter(folder, target.dtype)"
            )
        if self.drafts:
            self.length, self.layers = drafter.block_size - 1, drafter.layer_ids  # L
            self.nodes = SIZES[-1] if options.budget == "auto" else options.budget
            if self.method.most_nodes is not None:
                self.nodes = min(self.nodes, self.method.most_nodes(drafter.block_size))
            if options.budget == "auto":
                self.pace = Pace(rule_of(target, drafter, clock, self.rows), self.nodes)
        self.captures = target.device.type == "cuda" and options.compile is not False and self._on_device()
        self.reset()

    def reset(self) -> None:
        super().reset()
        self.cache = self.state = self.prefill = None  # the old memory goes first
        self.cache = self.target.cache(self.rows, self.capacity + self.nodes + 1)
        # forced trees commit more than a block, in a window that all rows share
        self.state = self.drafter.state(self.rows, self.capacity + self.nodes) if self.drafts else None
        self.bonuses = torch.zeros(self.rows, dtype=torch.long, device=self.target.device)
        self.graphs = Graphs(self.target.device)  # the old ones work on memory that is gone
        self.columns = Columns(self.rows, self.target.head_weight.shape[0], self.target.device)
        self.tokens_seen: torch.Tensor | None = None  # (rows, V) of captured rounds of texts with a penalty
        self.noted: list[tuple[Sequence, int]] = []  # texts, and how long they were, that the device knows as they are
        self.fresh: list[Committed] = []  # what the drafter has not seen yet
        self.prefill: Prefill | None = None
        memory = self.options.prefix_memory * 2**20
        self.prefixes = Prefixes(memory) if memory else None

    def _follow_weights(self) -> None:
        enters = bool(self.waiting) and len(self.writing) < self.most
        written = self.target.watch.written() or self.watch.written() or self.changes != self.target.changes
        if not (enters or written):
            return
        before, self.changes = self.changes, self.target.follow_weights()
        if self.watch.changed() or self.changes != before:
            self.waiting.extendleft(reversed(self._stop_writing()))
            self.reset()

    def _ngrams(self, asked: str | None) -> NGram:
        """Return the n-grams that trees ask beside the text's own: those of the file that a user asked for, none where
        the text's are to do, else the drafter's."""
        if asked == TEXT_NGRAMS:
            return NGram.uniform(self.target.head_weight.shape[0])
        # a drafter's own belong to its target's ids, whatever template a user gave the tokenizer
        return NGram.open(self.options.continuity, self.target.tokenizer_digest if asked else None)

    @property
    def bonus(self) -> torch.Tensor:
        """The newest token of every row, (B,)."""
        return self.bonuses[: self.cache.fixed_rows or len(self.writing)]

    def _on_device(self) -> bool:
        """Return whether a round of texts without processors asks the host for nothing between its start and its
        end."""
        return (not self.drafts or self.drafter.family.on_device) and not self.method.ngrams and self.target.lean

    @torch.inference_mode()
    def warm(
        self,
        report: abc.Callable[[int, int], None] = lambda done, all: None,
        texts: abc.Sequence[TextOptions] = (TextOptions(),),
    ) -> None:
        """Capture the rounds of texts with such options, each kind alone and all side by side, in all sizes, the
        largest first; `report` is told how many of how many are done. For an engine without texts: it changes none of
        their memory, but writes over the last tokens."""
        if not self.captures:
            return
        for width in (1, min(32, self.capacity)):  # prompts, for the kernels that they need
            with self.cache.add(1) as row:
                self.target.extend([[0] * width], row, self.layers)
            self.cache.keep([])
        buckets = {min(1 << bits, self.rows) for bits in range(self.rows.bit_length() + 1)}
        kinds = dict.fromkeys(
            Kind.of(beside, self.columns.vocabulary) for beside in (*([text] for text in texts), texts)
        )
        sizes = [(rows, nodes) for rows in sorted(buckets, reverse=True) for nodes in self._sizes(rows)]
        keys = [(*size, kind) for size in sizes for kind in kinds]
        for done, key in enumerate(keys):
            report(done, len(keys))
            for _ in range(2):
                self.graphs.run(key, partial(self._fixed_round, *key))
        report(len(keys), len(keys))

    def _sizes(self, rows: int) -> list[int]:
        """Return the node counts that rounds of so many rows, a power of two, may have, the largest first."""
        if not self.drafts:
            return [0]
        limited = self.options.positions is not None and not self.method.draws
        if not limited and self.pace is None:
            return [self.nodes]
        most = self.nodes
        if limited:
            most = min(most, max(2, max(self.options.positions, most + 1) >> (rows - 1).bit_length()) - 1)
        none = {0} if self.pace is not None else set()
        return sorted(none | {self._graph_size(nodes) for nodes in range(1, most + 1)}, reverse=True)

    def _graph_size(self, nodes: int) -> int:
        """Return how many nodes a graph for `nodes` has: the next smaller one of a few sizes, or all there may be."""
        return nodes if nodes in (0, self.nodes) else max(size for size in SIZES if size <= nodes)

    def _new_sequence(self, prompt: list[int], options: TextOptions, processors: abc.Sequence[Processor]) -> Sequence:
        judged = processors or asked_grammar(options) is not None
        if judged and self.method.draws and options.temperature > 0:
            raise ValueError(
                f"logits processors and grammars: a sampled {self.method.label} tree needs whole distributions; use "
                "another method"
            )
        return Sequence(prompt, options, processors)

    def _tree_positions(self, prompts: float) -> int:
        # a sampled text of a method that draws depends on its trees, which may not depend on the rows beside it
        return self.nodes + 1 if self.method.draws else super()._tree_positions(prompts)

    def _likely_positions(self) -> int:
        most = super()._likely_positions()
        return most if self.pace is None else min(most, self.pace.last + 1)

    def _prefill(self, width: int) -> int:
        """Run a piece of the prompts through target and drafter."""
        prompts = [text.known for text in self.entering]
        if self.prefill is None:
            rows = ExitStack()
            cache = rows.enter_context(self.cache.add(len(prompts)))
            state = None if self.state is None else rows.enter_context(self.state.add(len(prompts)))
            self.prefill = Prefill(rows, cache, state, [None] * len(prompts))
            self._restore_prefixes()
        prefill = self.prefill
        begun = [text.reused + self.done for text in self.entering]
        parts = [prompt[start : start + width] for prompt, start in zip(prompts, begun, strict=True)]
        features = self.target.extend(parts, prefill.cache, self.layers)
        if prefill.state is not None:
            tokens, counts = pad_ids(parts, features.context.device), [len(part) for part in parts]
            self.drafter.update_context(self.target, features.context, tokens, counts, prefill.state)
        for row, (prompt, part) in enumerate(zip(prompts, parts, strict=True)):
            reached, text = begun[row] + len(part), self.entering[row]
            if part and reached in text.borders:
                text.states[reached] = prefill.cache.states.read(row)
            if part and reached == len(prompt):
                prefill.last[row] = features.last[row, len(part) - 1]
        if all(last is not None for last in prefill.last):
            self._begin_writing()
        return len(parts) * max(map(len, parts))

    def _find_prefix(self, text: Sequence) -> object | None:
        if self.prefixes is None:
            return None
        known, found = text.known, self.prefixes.find(text.known)
        text.kept = found.with_states() if self.target.recurrent else found.blocks
        text.reused = BLOCK * len(text.kept)
        if self.target.recurrent:  # where its own blocks end, and where it leaves what others share
            shared, whole = BLOCK * len(found.blocks), (len(known) - 1) // BLOCK * BLOCK
            text.borders = frozenset({shared, whole} - set(range(text.reused + 1)))
        return found.next_key

    def _piece(self, room: float) -> int:
        width = super()._piece(room)
        ahead = [at - text.reused - self.done for text in self.entering for at in text.borders]
        return min([width, *(steps for steps in ahead if steps > 0)])

    def _restore_prefixes(self) -> None:
        """Give the rows that enter what is kept of their prompts."""
        for row, text in enumerate(self.entering):
            blocks, text.kept = text.kept, []
            if blocks:
                if self.target.recurrent:
                    self.prefill.cache.states.restore(row, blocks[-1].states)
                self.prefill.cache.restore(row, [block.target for block in blocks])
                if self.prefill.state is not None:
                    ids = text.known[: text.reused]
                    self.prefill.state.restore(row, ids, [block.drafter for block in blocks])

    def _keep_prefix(self, row: int, text: Sequence) -> None:
        """Keep what a used row holds of its text for texts to come."""
        if self.prefixes is None:
            return

        def read(start: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
            drafter = [] if self.state is None else self.state.read(row, start, BLOCK)
            return self.cache.read(row, start, BLOCK), drafter

        # the last token's position may be there or not, and a drafter's item there waits for the next one
        self.prefixes.keep(text.known[: self.cache.lengths[row]], read, text.states)
        text.states = {}

    def _begin_writing(self) -> None:
        """Take the rows into use whose prompts are computed: their last positions yield the first bonus tokens."""
        self._update_context()
        texts, last = self.entering, torch.stack(self.prefill.last)[:, None]  # (B, 1, D)
        known = [text.known for text in texts]
        self.prefill.rows.close()
        self.prefill = None
        for row, text in enumerate(texts, len(self.writing)):
            self._keep_prefix(row, text)
            text.stats.reused = min(text.reused, len(text.prompt))
        start = torch.tensor([len(ids) - 1 for ids in known], device=last.device)
        tree = root_only(torch.tensor([ids[-1] for ids in known], device=last.device))
        options = [text.options for text in texts]
        noise = round_noise(options, start, 1, self.target.head_weight.shape[0])
        seen = held_tokens(self.target, texts)
        within = None if seen is None else partial(seen_at_nodes, seen, tree.tokens, tree.ancestors())
        chosen = choose_tokens(self.target, tree, within, last, options, texts, noise)  # (B, 1)
        if (most := most_logprobs(options)) is not None:
            note_logprobs(logprobs_of(self.target, last, chosen, most).tolist(), [1] * len(texts), texts)
        self.bonuses[len(self.writing) :][: len(texts)] = chosen[:, 0]
        for text, token in zip(texts, chosen[:, 0].tolist(), strict=True):
            text.append([token], self.target)
            if len(text.commits) > 1:  # entered before, and waited after a step that raised
                text.commits[0] += text.commits.pop()
        self.writing, self.entering = self.writing + texts, []

    def _update_context(self) -> None:
        """Give the drafter the features of the committed nodes that it has not seen: of the last round, or of several
        that committed roots alone, at once."""
        fresh, self.fresh = self.fresh, []
        if len(fresh) > 1:
            context, tokens = (torch.cat([getattr(part, name) for part in fresh], 1) for name in ("context", "tokens"))
            fresh = [Committed(context, tokens, [len(fresh)] * len(tokens), torch.full_like(tokens[:, 0], len(fresh)))]
        for part in fresh:
            self.drafter.update_context(
                self.target, part.context, part.tokens, part.lengths, self.state, part.lengths_on_device
            )

    def _round(self) -> None:
        texts, began = self.writing, self.clock()
        options = [text.options for text in texts]
        most = nodes = self._tree_positions(self.computed) - 1 if self.drafts else 0
        if self.pace is not None:
            full = min(self.most, len(texts) + len(self.entering) + len(self.waiting))
            nodes = self.pace.most_nodes(len(texts), most, full)
        captured = self.captures and not any(text.judged for text in texts)
        if nodes or captured:
            self._update_context()
        if captured:
            rows = min(1 << (len(texts) - 1).bit_length(), self.rows)
            size = nodes if self.pace is None or not nodes else self.pace.nodes_ahead(len(texts), nodes)
            size, kind = self._graph_size(size), Kind.of(options, self.columns.vocabulary)
            self._note_rows(texts, kind)
            found = self.graphs.run((rows, size, kind), partial(self._fixed_round, rows, size, kind))
            mark = self._lap("verify", began)
        else:
            found = self._compute(options, nodes, texts, held_tokens(self.target, texts), self._forced(texts, most))
            mark = self.clock()
        paths = self._commit(found, captured)
        self.noted = [(text, len(text.ids)) for text in texts] if captured else []
        if self.pace is not None and found.drafted:
            self.pace.note(self.clock() - began, found.nodes, paths)
        self._lap("commit", mark)

    def _note_rows(self, texts: list[Sequence], kind: Kind) -> None:
        """Write to the device what captured rounds of a kind read there, where it is not what the last one left."""
        if kind == Kind() or self.noted == [(text, len(text.ids)) for text in texts]:
            return
        self.columns.write([text.options for text in texts])
        if kind.penalised:
            self._seen_rows(len(texts)).copy_(held_tokens(self.target, texts))

    def _seen_rows(self, rows: int) -> torch.Tensor:
        """Return the memory of captured rounds for which tokens the first rows hold, (rows, V) bool."""
        if self.tokens_seen is None:
            shape = self.rows, self.columns.vocabulary
            self.tokens_seen = torch.zeros(shape, dtype=torch.bool, device=self.target.device)
        return self.tokens_seen[:rows]

    def _fixed_round(self, rows: int, nodes: int, kind: Kind) -> Round:
        """Compute and commit a round of texts on the device alone, in shapes that depend on nothing but `rows`, of
        which the used ones are the first, nodes and the kind: what a CUDA graph can hold."""
        with ExitStack() as fixed:
            fixed.enter_context(self.cache.fixed(rows))
            if self.drafts:
                fixed.enter_context(self.state.cache.fixed(rows))
            options = [] if kind == Kind() else FixedRows(rows, kind, self.columns)
            seen = self._seen_rows(rows) if kind.penalised else None
            found = self._compute(options, nodes, (), seen)
            accepted = found.accepted
            if seen is not None:
                seen.scatter_(1, found.tree.tokens.gather(1, accepted.path), True)
                seen.scatter_(1, accepted.bonus[:, None], True)
            self.cache.commit(accepted.path, None, accepted.lengths)
            if self.drafts:
                context, tokens = self._along(found, accepted.path)
                self.drafter.update_context(self.target, context, tokens, None, self.state, accepted.lengths)
            self.bonuses[:rows] = accepted.bonus
        return replace(found, features=None)  # a graph keeps the memory of its results

    def _compute(
        self,
        options: abc.Sequence[TextOptions],
        nodes: int,
        texts: abc.Sequence[Sequence],
        seen: torch.Tensor | None,
        forced: abc.Sequence[list[int]] = (),
    ) -> Round:
        """Draft, build the trees of `nodes` nodes at most, verify them and walk; where grammars `forced` the trees,
        nothing is drafted; `seen` (B, V) are the tokens of every row, needed for a penalty only. Without options all
        rows are greedy, without texts nothing takes time on the host."""
        target, lap = self.target, self._lap if texts else lambda stage, mark: mark
        mark = self.clock() if texts else 0.0
        start = self.cache.ends_of(len(self.bonus))  # (B,) positions of the roots
        depth = max(self.length, *map(len, forced), 0) + 1
        noise = round_noise(options, start, depth, target.head_weight.shape[0])
        proposal, build, found = Proposal(self.bonus, None), self.build, nodes
        if forced:
            build = partial(forced_chains, forced)
        elif nodes:
            found = nodes if texts or self.pace is None else self.pace.grown(nodes)
            proposal = self._propose(options, start, noise, seen, found)
            mark = lap("draft", mark)
        elif self.drafts:
            build = plain
        whole = self._constrained(build(proposal), proposal)
        del proposal  # its marginals would be in memory as long as the round
        size = whole.budget if forced else min(nodes, whole.budget)
        if self.pace is not None and size and texts and not forced:
            size = self.pace.nodes(whole.log_probs, size)
        tree = whole if size == whole.budget else whole.first(size)
        ancestors = tree.ancestors()  # (B, M, M)
        mark = lap("build", mark)

        features = target.verify(tree, ancestors, self.cache, self.layers)
        within = None if seen is None else partial(seen_at_nodes, seen, tree.tokens, ancestors)
        if tree.draws is not None and tree.draws.q is not None:
            accepted, chosen = decide(tree, target.head(features.last), options, start, noise, within)
        else:
            chosen = choose_tokens(self.target, tree, within, features.last, options, texts, noise)  # (B, M)
            accepted = walk(tree, chosen, ancestors)
        drafted = tree.tokens.gather(1, accepted.path)  # (B, W)
        columns = [accepted.lengths[:, None], accepted.bonus[:, None], drafted, accepted.path]
        if self.pace is not None and not texts:
            columns.append(whole.log_probs.float().view(torch.int32).long())
        most, logprobs = most_logprobs(options), None
        if most is not None:
            along = features.last.gather(1, accepted.path[..., None].expand(-1, -1, features.last.shape[-1]))
            logprobs = logprobs_of(self.target, along, chosen.gather(1, accepted.path), most)
        lap("verify", mark)
        return Round(tree, size, features, chosen, accepted, torch.cat(columns, 1), logprobs, not forced)

    def _along(self, found: Round, path: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return features (B, W, F) and tokens (B, W) of the nodes of a path (B, W), for the drafter."""
        context = found.features.context
        return context.gather(1, path[..., None].expand(-1, -1, context.shape[-1])), found.tree.tokens.gather(1, path)

    def _forced(self, texts: abc.Sequence[Sequence], nodes: int) -> list[list[int]]:
        """Return what grammars force behind every row's root, as far as `nodes` and the text's room go, where that is
        as much as a draft has in every row, which then costs none; else nothing."""
        forced = []
        for text in texts if self.method.ranked and nodes else ():
            tokens = [] if text.grammar is None else text.grammar.forced(text.ids)
            tokens = tokens[: min(nodes, text.options.max_new_tokens - len(text.ids))]
            if len(tokens) < min(self.length, nodes):
                return []
            forced.append(tokens)
        return forced

    def _constrained(self, tree: DraftTree, proposal: Proposal) -> DraftTree:
        """Return the tree with the rows built anew whose texts follow a grammar; forced chains do already."""
        if proposal.marginals is None or not self.method.ranked or not tree.budget:
            return tree
        rows = {
            row: Rule(partial(text.grammar.drafted, text.ids), text.grammar.forced(text.ids))
            for row, text in enumerate(self.writing)
            if text.grammar is not None
        }
        return constrain(tree, proposal, rows, self.method.by_budget) if rows else tree

    def _propose(
        self,
        options: abc.Sequence[TextOptions],
        start: torch.Tensor,
        noise: torch.Tensor | None,
        seen: torch.Tensor | None,
        nodes: int,
    ) -> Proposal:
        """Draft behind the roots at positions start (B,), and collect what else the tree method may use for `nodes`
        nodes at most."""
        before, draws, drafter, steps = None if seen is None else seen[:, None], None, self.drafter, None
        conditional = drafter.conditional
        if self.heads:
            block = drafter.draft_block(self.target, self.bonus, self.state)
            marginals = block.marginals  # (B, L, V)
            judge = judge_on_noise(options, None if self.method.draws else noise, before)
            considered = self.options.candidates
            if self.method.by_budget:
                considered = min(considered, max(FEW, 2 * nodes))
            steps = ConditionalDraft(drafter, self.target, self.bonus, block, judge, considered)
            conditional = None if steps.recurrent else steps
        else:
            marginals = drafter.draft(self.target, self.bonus, self.state)
        if not self.method.draws:
            marginals = condition_on_noise(marginals, options, noise, before)
        else:  # independent of the noise that the target draws with
            marginals = adjust(marginals, options, before).log_softmax(-1)
            if noise is not None:
                draws = partial(children_noise, options, start, vocabulary=marginals.shape[-1])
        return Proposal(
            self.bonus,
            marginals,
            nodes,
            self.ngram,
            [text.end(SEARCHED) for text in self.writing] if self.ngram else (),
            self.options.continuity_weight,
            self.options.width,
            conditional,
            draws,
            self.target.end_ids,
            steps,
        )

    def _commit(self, found: Round, captured: bool) -> list[list[int]]:
        """Commit the accepted paths to cache and texts, `captured`: to the texts alone; return their nodes, the root
        left out. The only copy to the host of a greedy round."""
        tree, accepted, texts = found.tree, found.accepted, self.writing
        width = accepted.path.shape[1]  # W
        packet, logprobs = found.packet[: len(texts)], found.logprobs
        if logprobs is not None:
            logprobs = logprobs[: len(texts)]
            packet = torch.cat([packet.double(), logprobs.flatten(1)], 1)  # whole numbers below 2^53 stay what they are
        host = self._to_host(packet)
        if logprobs is not None:
            count = found.packet.shape[1]
            numbers = torch.tensor([row[count:] for row in host], dtype=torch.double).view(logprobs.shape).tolist()
            host = [[int(number) for number in row[:count]] for row in host]
        lengths = [row[0] for row in host]
        path = accepted.path[: len(texts), : max(lengths)]
        if captured:
            self.cache.count(lengths)
            if self.drafts:
                self.state.cache.count(lengths)
            if self.pace is not None:
                self.pace.expect([row[2 + 2 * width :] for row in host])
        else:
            self.cache.commit(path, lengths, accepted.lengths)
            if self.drafts:
                self._keep_fresh(Committed(*self._along(found, path), lengths, accepted.lengths))
            self.bonuses[: len(texts)] = accepted.bonus  # last: roots may be views of it
        if logprobs is not None:
            note_logprobs(numbers, lengths, texts)
        for text, (length, bonus, _, *tokens) in zip(texts, host, strict=True):
            text.append([*tokens[: length - 1], bonus], self.target)
            text.drafted.append(found.nodes)
            text.accepted.append(length - 1)
            text.stats.rounds += 1
        self._trace(tree, accepted, lengths)
        return [row[width + 3 : width + 2 + row[0]] for row in host]

    def _to_host(self, packet: torch.Tensor) -> list[list[int]]:
        return packet.tolist()

    def _keep_fresh(self, committed: Committed) -> None:
        """Note what the drafter has not seen; give it what is there before it becomes much."""
        if len(self.fresh) == BEHIND or (self.fresh and committed.tokens.shape[1] + self.fresh[0].tokens.shape[1] > 2):
            self._update_context()
        self.fresh.append(committed)

    def _trace(self, tree: DraftTree, accepted: Accepted, lengths: list[int]) -> None:
        """Note the likeliest rejected path of texts that ask for it: from the last accepted node on, each node's first
        child (siblings are sorted by probability)."""
        for row, text in enumerate(self.writing):
            if text.options.trace:
                tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
                node, rejected = int(accepted.path[row, lengths[row] - 1]), []
                while node in parents[node + 1 :]:
                    node = parents.index(node, node + 1)
                    rejected.append(tokens[node])
                text.rejected.append(rejected)

    def _free(self, finished: list[Sequence]) -> None:
        """Move the last rows into the rows of finished texts. At most one text enters over several rounds."""
        if any(text.finish is not None for text in self.entering):
            self.entering, self.prefill = [], None
        self._update_context()
        for row, text in enumerate(self.writing):
            if text.finish is not None:
                self._keep_prefix(row, text)
        for text in finished:
            text.stats.histogram = [0] * max(self.length + 1, *text.commits[1:], 0)
            for commit in text.commits[1:]:
                text.stats.histogram[commit - 1] += 1
        alive = [i for i, text in enumerate(self.writing) if text.finish is None]
        order = alive[:]
        for hole in [i for i, text in enumerate(self.writing) if text.finish is not None and i < len(alive)]:
            order.insert(hole, order.pop())
        self.writing = [self.writing[i] for i in order]
        self.cache.keep(order)
        if self.state is not None:
            self.state.keep(order)
        self.bonuses[: len(order)] = self.bonuses[torch.tensor(order, dtype=torch.long, device=self.bonuses.device)]
