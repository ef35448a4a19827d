"""The self-check: before the first step, compare the training loss with a slow, plain computation.

The plain computation handles a few blocks of the first batch, one block at a time, without the
optimisations of training. Each block's document alone runs through Hugging Face's layers and
through the drafter, with an explicit attention mask, and the loss is the divergence's formula. The
training step computes these blocks together with all other blocks of the batch: with one attention
mask for all, in chunks, and under torch.compile if that is on. The results must agree. The
self-check costs one more forward pass of a batch, and a few forward passes of single documents.

Shapes: K block size, L = K - 1 drafted positions, W positions of a block in the drafter, T length
of a document, D hidden size, V vocabulary, r rank of a conditional head's correction.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from data.packing import read_batch
from infer.attention.masks import to_additive_mask
from infer.drafters.base import Drafter, get_head_weight
from infer.drafters.heads.base import HeadOutput
from infer.drafters.heads.draft import teacher_force_head
from infer.targets.target import Features, Target
from infer.utils.errors import RunAborted
from train.batches import draw_blocks, first_draw_index
from train.blocks import Blocks
from train.comparison import LOGIT_OF_NON_CANDIDATE_TOKENS
from train.config import TrainConfig
from train.divergences import DIVERGENCE_TABLE
from train.engine import compute_dtype, split_batch
from train.features import dequantise_features
from train.objective import BlockLoss

if TYPE_CHECKING:
    from datasets import Dataset

    from train.features import StoredFeatures

TRAINING_SELF_CHECK_BLOCK_COUNT = 3
# Two limits of the error of a position's divergence. The error is relative to the divergence, or
# absolute if the divergence is below one nat. In float32 the first limit applies to the largest
# error. Otherwise the second limit applies to the mean error: bfloat16 has only three digits, and a
# document alone is rounded differently from the same document in a packed sequence. On the embedded
# target (12 layers, 24 batches, both drafter families), the largest error was 1.4e-6 in float32 and
# 0.013 in bfloat16; errors are larger with targets of more layers.
MAX_TRAINING_SELF_CHECK_FLOAT32_ERROR = 1e-4
MAX_TRAINING_SELF_CHECK_MEAN_ERROR = 0.05


class TrainingLossCheck:
    """Computes the divergences of a few blocks slowly, and compares them with the training step's.

    The constructor runs the slow computation. It must run before the engine is built, because the
    engine can shard the drafter. The attributes `batch` and `blocks` are the inputs for which the
    training step must then be computed.
    """

    @torch.no_grad()
    def __init__(
        self,
        drafter: Drafter,
        target: Target,
        dataset: "StoredFeatures | Dataset",
        config: TrainConfig,
    ) -> None:
        world_size = dist.get_world_size()
        micro_batch_size, _ = split_batch(config, world_size)
        first_index = first_draw_index(config, 0, 0, dist.get_rank(), world_size)
        columns = read_batch(dataset, first_index, micro_batch_size, config.seed)
        self.batch = {name: column.to(target.device) for name, column in columns.items()}
        self.blocks = draw_blocks(self.batch, config, first_index)
        self.is_exact = (
            not target.is_int8
            and target.dtype == compute_dtype(config, target.device) == torch.float32
        )

        # Every process checks the same number of blocks: each forward pass of a sharded target
        # needs all processes, so all must run equally many.
        valid_slots = self.blocks.valid.nonzero().tolist() or [[0, 0]]
        self.checked_slots = []  # (index of the packed sequence in the batch, anchor slot)
        for i in range(TRAINING_SELF_CHECK_BLOCK_COUNT):
            index = i * (len(valid_slots) - 1) // (TRAINING_SELF_CHECK_BLOCK_COUNT - 1)
            self.checked_slots.append(valid_slots[index])
        plain = _PlainComputation(drafter, target, config, self.batch, self.blocks)
        expected = [plain.compute_block(row, slot) for row, slot in self.checked_slots]
        self.expected = torch.stack(expected)  # (TRAINING_SELF_CHECK_BLOCK_COUNT, L)

    def compare(self, result: BlockLoss) -> str:
        """Compare the slow computation with the training step's `result` for the attributes `batch`
        and `blocks`. Return a sentence for the user about the difference.

        Raises RunAborted if the difference is larger than rounding explains.
        """
        num_slots = self.blocks.anchors.shape[1]
        actual = torch.stack(
            [result.divergences[row * num_slots + slot] for row, slot in self.checked_slots]
        )  # (TRAINING_SELF_CHECK_BLOCK_COUNT, L)
        errors = (actual - self.expected).abs() / self.expected.abs().clamp(min=1)
        if self.is_exact:
            error = errors.max().item()
            limit = MAX_TRAINING_SELF_CHECK_FLOAT32_ERROR
            statistic = "at most"
        else:
            num_positions = self.expected.count_nonzero().clamp(min=1)
            error = (errors.sum() / num_positions).item()
            limit = MAX_TRAINING_SELF_CHECK_MEAN_ERROR
            statistic = "on average"

        is_within_limit = error <= limit  # false if the error is NaN
        if not is_within_limit:
            raise RunAborted(
                "self-check: the training step and a plain computation of the same blocks differ "
                f"by {statistic} {error:.1e}, and rounding explains only {limit:.0e}. The "
                "attention mask, the objective or the compilation is wrong on this machine. "
                "compile=false turns the compilation off, self_check=false turns this check off"
            )
        return (
            f"self-check: {TRAINING_SELF_CHECK_BLOCK_COUNT} blocks computed one at a time differ "
            f"from the training step by {statistic} {error:.1e}"
        )


@dataclass(frozen=True)
class _PlainComputation:
    """The slow computation of the loss of single blocks of a batch."""

    drafter: Drafter
    target: Target
    config: TrainConfig
    # The key is a column of the data set, for example "ids". The value has the shape (packed
    # sequences, tokens); columns of stored features have further dimensions.
    batch: dict[str, torch.Tensor]
    blocks: Blocks

    def compute_block(self, row: int, slot: int) -> torch.Tensor:
        """Return the divergence at each drafted position of one block, (L,). It is 0 at positions
        without loss.

        row: index of the packed sequence in the batch. slot: the block's anchor slot.
        """
        drafter: Any = self.drafter  # `prepare_inputs` is defined only by its subclasses
        target = self.target
        anchor_in_row = int(self.blocks.anchors[row, slot])
        documents = self.batch["documents"][row]
        token_indices = (documents == documents[anchor_in_row]).nonzero()[:, 0]
        start = int(token_indices[0])
        end = int(token_indices[-1]) + 1
        length = end - start
        anchor = anchor_in_row - start  # position of the anchor in its document
        ids = self.batch["ids"][row : row + 1, start:end]
        positions = torch.arange(length, device=target.device)[None]
        features = self.compute_features(row, start, end, ids, positions)

        dtype = drafter.dtype
        block_start = max(anchor - drafter.anchor_offset, 0)
        masks = []
        for causal, window in drafter.attention_patterns:
            mask = build_block_mask(block_start, length, drafter.num_queries, causal, window)
            masks.append(to_additive_mask(mask.to(target.device), dtype))
        anchors = torch.tensor([[anchor]], device=target.device)
        inputs = drafter.prepare_inputs(target, ids, positions, anchors)
        states = drafter(features.context.to(dtype), positions, *inputs, *masks)[0]  # (W, D)
        supervised = self.blocks.supervised[row, slot].tolist()
        return self.compute_divergences(
            states.to(target.dtype), features, ids[0], anchor, supervised
        )

    def compute_features(
        self, row: int, start: int, end: int, ids: torch.Tensor, positions: torch.Tensor
    ) -> Features:
        """Return the target's features of one document. Stored features are returned if the batch
        has them; otherwise Hugging Face's layers compute the features.

        row, start, end: the document's packed sequence in the batch, and its range of tokens there.
        ids, positions: (1, T) the document's token ids and positions.
        """
        if "context" not in self.batch:
            documents = torch.zeros_like(ids)
            return self.target.compute_packed_features(
                ids, positions, documents, self.drafter.layer_ids, use_transformers=True
            )
        stored = {}
        for name, column in self.batch.items():
            if name.startswith(("context", "last")):
                stored[name] = column[row : row + 1, start:end]
        return dequantise_features(stored, self.target.dtype)

    def compute_target_log_probs(self, features: Features, position: int) -> torch.Tensor:
        """Return the target's log-probabilities at a position of a document, for the tokens of the
        drafter's vocabulary."""
        products = F.linear(features.last_hidden_states[0, position], self.target.head_weight)
        logits = self.target.logit_scale(products.float())
        draft_logits = self.drafter.vocabulary.select_columns(logits)
        assert draft_logits is not None
        return draft_logits.log_softmax(-1)

    def compute_divergences(
        self,
        states: torch.Tensor,
        features: Features,
        ids: torch.Tensor,
        anchor: int,
        supervised: list[bool],
    ) -> torch.Tensor:
        """Return the divergence at each drafted position of a block, (L,). It is 0 at positions
        without loss.

        states: (W, D) the drafter's hidden states for the block. features: the target's features of
        the block's document. ids: (T,) the document's token ids. anchor: the anchor's position in
        the document. supervised: for each of the L drafted positions, whether it has a loss.
        """
        drafter = self.drafter
        target = self.target
        config = self.config.objective
        formula = DIVERGENCE_TABLE[config.divergence].formula
        drafter_head = get_head_weight(drafter, target).to(target.dtype)
        draft_states = states[drafter.first_draft_slot :]  # (L, D)
        num_drafted = len(draft_states)

        conditioned = HeadOutput(draft_states)
        if drafter.conditional_head is not None:
            previous_indices = anchor + torch.arange(num_drafted, device=ids.device)
            previous_tokens = ids[previous_indices.clamp(max=len(ids) - 1)]
            batched = teacher_force_head(drafter, target, states[None], previous_tokens[None])
            conditioned = HeadOutput._make(None if t is None else t[0] for t in batched)

        divergences = torch.zeros(num_drafted, device=target.device)
        for t in range(num_drafted):
            if not supervised[t]:
                continue
            label = drafter.vocabulary.ids_to_columns(ids[anchor + t + 1])
            if label < 0:  # the label is not in the drafter's vocabulary
                continue
            log_p = self.compute_target_log_probs(features, anchor + t)
            products = F.linear(conditioned.head_input[t].to(target.dtype), drafter_head)
            uncorrected = target.logit_scale(products.float())
            logits = uncorrected
            excluded = torch.zeros_like(uncorrected, dtype=torch.bool)
            if conditioned.correction is not None:
                correction = conditioned.correction[t].to(target.dtype)
                logits, excluded = self.apply_correction(uncorrected, correction, label)

            compared_log_p = log_p.masked_fill(excluded, LOGIT_OF_NON_CANDIDATE_TOKENS).log_softmax(
                -1
            )
            log_q = logits.masked_fill(excluded, LOGIT_OF_NON_CANDIDATE_TOKENS).log_softmax(-1)
            divergences[t] = formula(compared_log_p, log_q, label)
            if config.marginal_weight:
                divergences[t] += config.marginal_weight * formula(
                    log_p, uncorrected.log_softmax(-1), label
                )
        return divergences

    def apply_correction(
        self, uncorrected: torch.Tensor, correction: torch.Tensor, label: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Apply the conditional head's correction at one drafted position.

        uncorrected: (V,) the logits before the correction. correction: (r,) the head's vector.
        label: scalar, the true token. Returns the corrected logits (V,), and which tokens are
        excluded because they are not among the head's candidates, (V,) bool.
        """
        head = self.drafter.conditional_head
        assert head is not None
        assert head.correction_matrix is not None
        logits = (
            uncorrected + F.linear(correction, head.correction_matrix.to(correction.dtype)).float()
        )
        excluded = torch.zeros_like(uncorrected, dtype=torch.bool)
        if head.top_k:
            candidates = uncorrected.topk(head.top_k).indices
            # if the label is not among the candidates, it replaces the least likely one
            candidates[-1] = torch.where((candidates == label).any(), candidates[-1], label)
            excluded = torch.ones_like(excluded).index_fill(0, candidates, False)
        return logits, excluded


def build_block_mask(
    block_start: int, length: int, width: int, causal: bool, window: int | None
) -> torch.Tensor:
    """Return the attention mask of one block, (1, 1, W, T + W) bool: whether each of the block's W
    queries sees each of the T context positions and W block positions.

    block_start: position of the block's first query in the document. length: T, the length of the
    document. width: W, the number of queries. causal: whether a query sees only earlier positions
    of the block and itself. window: size of the sliding window, None for no window.
    """
    block_positions = block_start + torch.arange(width)
    context_positions = torch.arange(length)
    sees_context = (context_positions < block_start).expand(width, -1)
    sees_block = torch.ones(width, width, dtype=torch.bool)
    if causal:
        sees_block = sees_block.tril()
    mask = torch.cat([sees_context, sees_block], 1)  # (W, T + W)
    if window is not None:
        all_positions = torch.cat([context_positions, block_positions])
        mask = mask & ((block_positions[:, None] - all_positions).abs() < window)
    return mask[None, None]
