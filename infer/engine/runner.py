"""Run the prefills and decoding rounds of a target model. A round runs eagerly, or as CUDA graphs
with fixed shapes."""

import warnings
from collections import abc
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from infer.config import EngineConfig, SamplingOptions
from infer.drafters.base import Drafter
from infer.engine.batch_state import BatchState, PrefillBatch
from infer.engine.budget import NodeBudget
from infer.engine.capture import CudaGraphs, SamplingBuffers
from infer.engine.prefix_cache import PREFIX_CACHE_BLOCK_TOKENS, BlockKey, PrefixCache
from infer.engine.proposals import constrain_to_grammars, run_drafter
from infer.engine.round import RoundPlan, RoundResult, run_round
from infer.engine.round_cost import CANDIDATE_DRAFTED_NODE_COUNTS
from infer.engine.round_outcome import (
    RowOutcome,
    append_logprobs,
    find_rejected_path,
    pack_outcomes,
    unpack_outcome,
)
from infer.engine.sampling import SamplingKind
from infer.engine.sequence import LogitsProcessor, Sequence, Stopwatch
from infer.engine.verification import (
    AcceptedPath,
    SamplingBatch,
    choose_tokens,
    choose_tokens_on_host,
    make_sampling_batch,
    make_sampling_tensors,
    walk,
)
from infer.ngrams.model import NGramModel
from infer.targets.target import Target
from infer.targets.weight_watcher import WeightWatcher
from infer.trees.tree import DraftTree, Proposal, build_root_only_trees, make_root_trees

# Tree methods that use the sequence's own n-grams search this many of its last tokens.
MAX_SEQUENCE_TOKENS_SEARCHED_FOR_NGRAMS = 8192
# On CUDA a prefill takes about as long as this many rounds. Rounds are replayed as CUDA graphs, but
# the kernels of a prefill are launched one by one (docs/results/gpu.md).
PREFILL_COST_IN_CUDA_GRAPH_ROUNDS = 4


class GraphKey(NamedTuple):
    """Identifies the CUDA graph of a whole round, or of one stage of a round."""

    stage: str  # "draft", "verify" or "commit"; "round" for all stages together
    rows: int  # number of batch rows, padding included
    nodes: int  # number of drafted nodes per batch row that are verified
    kind: SamplingKind
    may_rebuild_trees: bool = False  # whether a sequence of the batch has a grammar


@dataclass(frozen=True)
class DeviceResources:
    """All device memory that a runner allocates. After an exception its contents are undefined, and
    all of it is allocated anew."""

    batch_state: BatchState
    graphs: CudaGraphs  # the graphs address the memory of `batch_state`
    sampling_buffers: SamplingBuffers
    prefix_cache: PrefixCache | None  # None if prefixes are not cached


class Runner:
    """Runs the prefills and decoding rounds that a `Scheduler` decides on.

    Use `infer.engine.engine.make_runner` to create one. `drafter` is None for methods without a
    drafter. In float32 the output of a sequence does not depend on the other sequences of the
    batch. In lower precisions it may, because rounding depends on the batch size.

    On CUDA, rounds run as CUDA graphs. There is one graph for each combination of the number of
    batch rows (a power of two), the number of nodes and the `SamplingKind`. The first two rounds of
    each combination take longer: the first compiles kernels, the second records the graph. If a
    sequence has a grammar or logits processors, a round consists of three graphs, and the host
    handles such sequences between these graphs.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        options: EngineConfig,
        capacity: int,
        ngram_model: NGramModel | None,
        budget: NodeBudget,
        stopwatch: Stopwatch,
        allocate: abc.Callable[[], DeviceResources],
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.options = options
        self.capacity = capacity
        self.ngram_model = ngram_model
        self.budget = budget
        self.stopwatch = stopwatch
        self.allocate = allocate
        self.vocab_size = target.vocab_size
        self.method = options.tree_method
        self.build_tree = self.method.load_builder()
        # number of positions that the drafter predicts after the bonus token
        self.draft_length = 0 if drafter is None else drafter.block_size - 1
        self.weights_version = target.weight_version

        # A round can run as CUDA graphs only if its stages compute nothing on the host.
        runs_on_device = drafter is None or drafter.family.drafts_on_device
        runs_on_device = runs_on_device and not self.method.needs_ngrams
        runs_on_device = runs_on_device and not target.is_sharded
        is_requested = target.device.type == "cuda" and options.compile is not False
        self.uses_cuda_graphs = is_requested and runs_on_device
        if is_requested and self.method.needs_ngrams:
            warnings.warn(
                f"rounds with n-grams (ngrams={options.ngrams}) are not recorded as CUDA graphs, "
                "because the n-grams are looked up on the host: decoding is slower than with "
                "ngrams=none unless the n-grams raise acceptance a lot",
                stacklevel=2,
            )
        self.rounds_per_prefill = PREFILL_COST_IN_CUDA_GRAPH_ROUNDS if self.uses_cuda_graphs else 0
        self.reallocate_device_memory()

    def reallocate_device_memory(self) -> None:
        """Free all device memory of the runner, and allocate it anew."""
        self.batch_state: BatchState = None  # ty: ignore[invalid-assignment]
        self.graphs: CudaGraphs = None  # ty: ignore[invalid-assignment]
        self.sampling_buffers: SamplingBuffers = None  # ty: ignore[invalid-assignment]
        self.prefix_cache: PrefixCache | None = None
        self.prefill_batch: PrefillBatch | None = None
        resources = self.allocate()
        self.batch_state = resources.batch_state
        self.graphs = resources.graphs
        self.sampling_buffers = resources.sampling_buffers
        self.prefix_cache = resources.prefix_cache
        # Create the watcher after the allocation, which rearranges the drafter's weights.
        self.drafter_watch = WeightWatcher(self.drafter or nn.Module())
        # The sequences whose sampling options are in `sampling_buffers`, each with its output
        # length when the options were written.
        self.buffered_sequences: list[tuple[Sequence, int]] = []

    def create_sequence(
        self,
        prompt: list[int],
        options: SamplingOptions,
        processors: abc.Sequence[LogitsProcessor] = (),
    ) -> Sequence:
        """Return a new sequence for the scheduler's queue."""
        return Sequence(prompt, options, processors)

    def weights_changed(self, checks_contents: bool) -> bool:
        """Return whether the weights of target or drafter changed since the caches were filled.

        With `checks_contents`, the contents of the weights are compared too. This also detects
        writes that do not increase the version counters of PyTorch's tensors.
        """
        may_have_changed = (
            checks_contents
            or self.target.weight_watcher.detect_changes_quickly()
            or self.drafter_watch.detect_changes_quickly()
            or self.weights_version != self.target.weight_version
        )
        if not may_have_changed:
            return False
        old_version = self.weights_version
        self.weights_version = self.target.drop_decoder_if_weights_changed()
        return self.drafter_watch.detect_changes() or self.weights_version != old_version

    def find_cached_prefix(self, sequence: Sequence) -> BlockKey | None:
        """Look up the longest prefix of a sequence that is in the prefix cache, and store its
        blocks in the sequence.

        Return the key of the sequence's first block that is not cached. Return None if too few
        tokens are left for another block, or if there is no prefix cache.
        """
        if self.prefix_cache is None:
            return None
        sequence.prefix_blocks, uncached_key = self.prefix_cache.find_prefix(sequence.token_ids)
        sequence.cached_length = PREFIX_CACHE_BLOCK_TOKENS * len(sequence.prefix_blocks)
        return uncached_key

    def prefill(self, sequences: list[Sequence], start: int, length: int) -> int:
        """Prefill the next `length` positions of each prompt. The first `start` positions after the
        cached prefix were prefilled before. Return the number of computed positions, padding
        included."""
        if self.prefill_batch is None:
            self.prefill_batch = PrefillBatch(self.batch_state, sequences)
        return self.prefill_batch.run_chunk(start, length)

    def prepare_for_decoding(self, sequences: list[Sequence]) -> None:
        """Make the batch rows of prefilled sequences take part in decoding rounds, and choose the
        token after each prompt, which becomes the row's bonus token."""
        assert self.prefill_batch is not None
        state = self.batch_state
        last_hidden = self.prefill_batch.finish()
        self.prefill_batch = None
        num_rows = len(state.cache.lengths)
        rows = range(num_rows - len(sequences), num_rows)
        for row, sequence in zip(rows, sequences, strict=True):
            self._cache_prefix(row, sequence)
            sequence.stats.cached_tokens = min(sequence.cached_length, len(sequence.prompt))

        accepted, packed_outcomes = self._choose_first_tokens(sequences, last_hidden)
        state.set_bonus_tokens(rows, accepted.bonus)
        for sequence, values in zip(sequences, packed_outcomes.tolist(), strict=True):
            outcome = unpack_outcome(values, path_width=1, num_node_log_probs=0)
            append_logprobs(sequence, outcome.token_logprobs)
            sequence.append(outcome.tokens, self.target)
            if len(sequence.commits) > 1:  # the sequence already had output and was prefilled again
                sequence.commits[0] += sequence.commits.pop()

    def _choose_first_tokens(
        self, sequences: list[Sequence], last_hidden: torch.Tensor
    ) -> tuple[AcceptedPath, torch.Tensor]:
        """Choose the token after each prompt. `last_hidden` (B, 1, hidden_size) are the final
        hidden states of the prompts' last tokens.

        The last tokens of the prompts are treated as trees that have only a root. Return the
        accepted paths of these trees, whose bonus tokens are the chosen tokens, and the result of
        `pack_outcomes`.
        """
        target = self.target
        device = last_hidden.device
        last_positions = [len(sequence.token_ids) - 1 for sequence in sequences]
        root_positions = torch.tensor(last_positions, device=device)
        last_tokens = [sequence.token_ids[-1] for sequence in sequences]
        tree = make_root_trees(torch.tensor(last_tokens, device=device))
        ancestors = tree.build_ancestor_mask()
        sampling = make_sampling_batch(target, sequences, root_positions, max_depth=0)

        tokens = choose_tokens(target, tree, ancestors, last_hidden, sampling)
        host_sequences = {
            row: sequence
            for row, sequence in enumerate(sequences)
            if sequence.has_processors_or_grammar
        }
        choose_tokens_on_host(
            target, tree, ancestors, last_hidden, sampling, host_sequences, tokens
        )
        accepted = walk(tree, tokens)
        num_logprobs = sampling.tensors.kind.num_logprobs
        return accepted, pack_outcomes(target, tree, last_hidden, tokens, accepted, num_logprobs)

    def decode_round(self, sequences: list[Sequence], max_nodes: int) -> None:
        """Run a round for all running sequences with trees of at most `max_nodes` drafted nodes,
        and append the committed tokens to the sequences."""
        start = self.stopwatch.start()
        num_nodes = self.budget.choose_num_nodes(len(sequences), max_nodes)
        if num_nodes:
            self.batch_state.flush_to_drafter()
        if self.uses_cuda_graphs:
            result = self._run_captured(sequences, num_nodes)
        else:
            result = self._run_eager(sequences, num_nodes)
        self.stopwatch.lap("verify")

        path_width = result.accepted.path.shape[1]
        outcomes = [
            unpack_outcome(values, path_width, result.num_node_log_probs)
            for values in self._copy_to_host(result.packed_outcomes[: len(sequences)])
        ]
        self.batch_state.record_committed_counts([len(outcome.tokens) for outcome in outcomes])
        drafted_counts = result.tree.drafted_counts
        for row, (sequence, outcome) in enumerate(zip(sequences, outcomes, strict=True)):
            self._append_outcome(sequence, outcome, drafted_counts[row], result.tree, row)
        self.buffered_sequences = [(sequence, len(sequence.ids)) for sequence in sequences]

        seconds = self.stopwatch.clock() - start
        paths = [outcome.path for outcome in outcomes]
        node_log_probs = None
        if result.num_node_log_probs:
            node_log_probs = [outcome.node_log_probs for outcome in outcomes]
        self.budget.record_round(seconds, drafted_counts, paths, node_log_probs)
        self.stopwatch.lap("commit")

    def _append_outcome(
        self, sequence: Sequence, outcome: RowOutcome, num_drafted: int, tree: DraftTree, row: int
    ) -> None:
        """Append what a round committed in batch row `row` to the row's sequence. `num_drafted` is
        the number of verified nodes of the row."""
        append_logprobs(sequence, outcome.token_logprobs)
        sequence.append(outcome.tokens, self.target)
        sequence.drafted.append(num_drafted)
        sequence.accepted.append(len(outcome.path))
        sequence.stats.rounds += 1
        if sequence.records_rejected:
            last_node = outcome.path[-1] if outcome.path else 0
            sequence.rejected.append(find_rejected_path(tree, row, last_node))

    def _copy_to_host(self, packed_outcomes: torch.Tensor) -> list[list[float]]:
        """Copy the packed outcomes of a round to the host. This is the only GPU-to-CPU
        synchronisation of a round."""
        return packed_outcomes.tolist()

    def _run_eager(self, sequences: list[Sequence], num_nodes: int) -> RoundResult:
        """Run a round eagerly, that is without CUDA graphs. `num_nodes` is the number of drafted
        nodes per batch row."""
        root_positions = self.batch_state.cache.get_device_lengths(len(sequences))
        make_sampling = partial(
            make_sampling_batch, self.target, sequences, root_positions, self.draft_length
        )
        tree_nodes = self.budget.count_nodes_to_build(len(sequences), num_nodes)
        plan = self._make_plan(sequences, make_sampling, tree_nodes, self.budget.prune)
        return run_round(self.batch_state, plan, self.stopwatch.lap)

    def _run_captured(self, sequences: list[Sequence], num_nodes: int) -> RoundResult:
        """Run a round as one CUDA graph, or as one graph per stage if the host chooses tokens of
        some sequences. The number of batch rows is padded to a power of two. `num_nodes` is the
        number of drafted nodes per row."""
        rows = min(1 << (len(sequences) - 1).bit_length(), self.options.max_num_seqs)
        kind = SamplingKind.from_options(
            [sequence.options for sequence in sequences], self.vocab_size
        )
        if num_nodes not in (0, self.budget.max_nodes):
            # Round down to one of CANDIDATE_DRAFTED_NODE_COUNTS, so that there are few graphs.
            num_nodes = max(count for count in CANDIDATE_DRAFTED_NODE_COUNTS if count <= num_nodes)

        current = [(sequence, len(sequence.ids)) for sequence in sequences]
        if kind != SamplingKind() and self.buffered_sequences != current:
            self.sampling_buffers.write(*make_sampling_tensors(self.target, sequences))

        needs_host = any(sequence.has_processors_or_grammar for sequence in sequences)
        plan = self._make_plan(
            sequences if needs_host else (),
            partial(self._read_sampling_buffers, rows, kind),
            self.budget.count_nodes_to_build(rows, num_nodes),
            lambda tree: tree.keep_first(num_nodes),
        )

        def run_stage(stage: str, function: abc.Callable[[], Any]) -> Any:
            key = GraphKey(stage, rows, num_nodes, kind, plan.constrain_to_grammars is not None)
            return self.graphs.run(key, function)

        with self.batch_state.fix_batch_size(rows):
            if needs_host:
                return run_round(self.batch_state, plan, run_stage=run_stage)
            return run_stage("round", partial(run_round, self.batch_state, plan))

    def _read_sampling_buffers(self, rows: int, kind: SamplingKind) -> SamplingBatch:
        """Return the sampling options of the first `rows` batch rows, as views of
        `sampling_buffers`."""
        tensors = self.sampling_buffers.tensors.select_rows(slice(rows), kind)
        seen = self.sampling_buffers.seen[:rows] if kind.uses_penalty else None
        root_positions = self.batch_state.cache.get_device_lengths(rows)
        return SamplingBatch(tensors, root_positions, self.draft_length + 1, self.vocab_size, seen)

    def _make_plan(
        self,
        sequences: abc.Sequence[Sequence],
        make_sampling: abc.Callable[[], SamplingBatch],
        tree_nodes: int,
        prune: abc.Callable[[DraftTree], DraftTree],
    ) -> RoundPlan:
        """Return the plan of a round.

        sequences: the sequence of every batch row. Empty if the host neither chooses tokens nor
            looks up n-grams.
        make_sampling: returns the sampling options of the batch
        tree_nodes: number of drafted nodes per tree before pruning
        prune: removes the nodes that are not verified
        """
        if not tree_nodes:
            return RoundPlan(
                make_sampling,
                lambda sampling: Proposal(self.batch_state.bonus_tokens, None),
                build_root_only_trees,
                sequences=sequences,
            )
        contexts: list[np.ndarray] = []
        if self.ngram_model is not None:
            contexts = [
                sequence.last_tokens(MAX_SEQUENCE_TOKENS_SEARCHED_FOR_NGRAMS)
                for sequence in sequences
            ]
        draft = partial(
            run_drafter, self.batch_state, tree_nodes, self.options, self.ngram_model, contexts
        )
        # Without CUDA graphs the round need not return the nodes' log-probabilities, because
        # `self.budget.prune` gets them from the trees.
        returns_log_probs = self.uses_cuda_graphs and self.budget.needs_log_probs
        return RoundPlan(
            make_sampling,
            draft,
            self.build_tree,
            prune,
            self._make_grammar_constraint(sequences),
            sequences,
            returns_log_probs,
        )

    def _make_grammar_constraint(
        self, sequences: abc.Sequence[Sequence]
    ) -> abc.Callable[[DraftTree, Proposal], DraftTree] | None:
        """Return a function that rebuilds the trees of sequences with a grammar. Return None if no
        sequence has a grammar, or if the tree method does not rank nodes by probability."""
        if not self.method.sorts_nodes_by_probability or all(
            sequence.grammar is None for sequence in sequences
        ):
            return None
        return partial(constrain_to_grammars, sequences, self.method)

    def release_finished_rows(
        self, sequences: list[Sequence], prefilling: list[Sequence], order: list[int]
    ) -> None:
        """Release the batch rows of finished sequences, and move row order[i] to row i. `sequences`
        has the sequence of every batch row. `prefilling` are the sequences whose prefill is not
        complete; if there are none, the prefill batch is dropped."""
        if not prefilling:
            self.prefill_batch = None
        self.batch_state.flush_to_drafter()
        for row, sequence in enumerate(sequences):
            if sequence.finish_reason is not None:
                self._cache_prefix(row, sequence)
                sequence.stats.histogram = self._build_commit_histogram(sequence)
        self.batch_state.keep_and_reorder_rows(order)

    def _build_commit_histogram(self, sequence: Sequence) -> list[int]:
        """Return a histogram of a sequence's rounds: entry i is the number of rounds that committed
        i + 1 tokens."""
        commits = sequence.commits[1:]  # without the first entry, which is for the prefill
        histogram = [0] * max(self.draft_length + 1, *commits, 0)
        for commit in commits:
            histogram[commit - 1] += 1
        return histogram

    def _cache_prefix(self, row: int, sequence: Sequence) -> None:
        """Copy the KV cache blocks of the sequence in batch row `row` to the prefix cache."""
        if self.prefix_cache is not None:
            # Copy only positions that the KV cache contains. The last token's position may be
            # missing: the drafter's entry for it is incomplete until the next token is known.
            cached_ids = sequence.token_ids[: self.batch_state.cache.lengths[row]]
            self.prefix_cache.insert(cached_ids, partial(self.batch_state.copy_block, row))
