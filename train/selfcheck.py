"""The self-check: before the first step, compare the training loss with a slow reference
computation.

The reference computation handles a few blocks of the first batch, one block at a time, without the
optimisations of training. For each block, it runs the block's document, without the other documents
of its packed sequence, through Hugging Face's layers and through the drafter. It uses an explicit
attention mask. Then it applies the divergence's formula. The training step computes these blocks
together with all other blocks of the batch: with one attention mask for all, in chunks, and under
torch.compile if the option compile is true. The results must agree. The self-check costs one more
forward pass of a batch, and a few forward passes of single documents.

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
from train.batches import draw_blocks, first_sequence_index
from train.blocks import Blocks
from train.comparison import LOGIT_OF_NON_CANDIDATE_TOKENS
from train.config import TrainConfig
from train.divergences import DIVERGENCE_TABLE
from train.engine import compute_micro_batch_sizes, get_drafter_matmul_dtype
from train.features import dequantise_features
from train.objective import BlockLoss

if TYPE_CHECKING:
    from datasets import Dataset

    from train.features import StoredFeatures

TRAINING_SELF_CHECK_BLOCK_COUNT = 3
# The self-check compares the divergence at each drafted position with the divergence that the slow
# computation gives. The error is the difference of the two divergences. It is divided by the slowly
# computed divergence if that is above one nat. In float32 the largest error is limited. In bfloat16
# only the mean error is limited, because bfloat16 has fewer than three decimal digits and a single
# document is rounded differently from the same document in a packed sequence. With the small target
# model in this repository (12 layers, 24 batches, both drafter families), the largest error was
# 1.4e-6 in float32 and 0.013 in bfloat16. Errors are larger with targets of more layers.
MAX_TRAINING_SELF_CHECK_FLOAT32_ERROR = 1e-4
MAX_TRAINING_SELF_CHECK_MEAN_ERROR = 0.05


class TrainingLossCheck:
    """Computes the divergences of a few training blocks slowly, one block at a time, and compares
    them with the divergences of the training step.

    The constructor runs the slow computation. Create this object before the DeepSpeed engine,
    because the engine can shard the drafter. Then compute the loss of the blocks in the attributes
    `batch` and `blocks` in the same way as in a training step, and pass this loss to `compare`.
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
        micro_batch_size, _ = compute_micro_batch_sizes(config, world_size)
        first_index = first_sequence_index(config, 0, 0, dist.get_rank(), world_size)
        columns = read_batch(dataset, first_index, micro_batch_size, config.seed)
        self.batch = {name: column.to(target.device) for name, column in columns.items()}
        self.blocks = draw_blocks(self.batch, config, first_index)
        self.is_exact = (
            not target.is_int8
            and target.dtype == get_drafter_matmul_dtype(config, target.device) == torch.float32
        )

        # Every process must check the same number of blocks, because all processes take part in
        # each forward pass of a sharded target.
        valid_slots = self.blocks.valid.nonzero().tolist() or [[0, 0]]
        # the checked blocks, as (index of the packed sequence, index of the block in the sequence)
        self.checked_slots = []
        for i in range(TRAINING_SELF_CHECK_BLOCK_COUNT):
            index = i * (len(valid_slots) - 1) // (TRAINING_SELF_CHECK_BLOCK_COUNT - 1)
            self.checked_slots.append(valid_slots[index])
        plain = _ReferenceLoss(drafter, target, config, self.batch, self.blocks)
        expected = [plain.compute_block_divergences(row, slot) for row, slot in self.checked_slots]
        self.expected = torch.stack(expected)  # (number of checked blocks, num_drafted)

    def compare(self, result: BlockLoss) -> str:
        """Compare the slow computation with the training step, and return a sentence for the user
        that states the difference.

        result: the loss that the training step computes for the attributes `batch` and `blocks`.
        Raises RunAborted if the difference is larger than rounding explains.
        """
        num_slots = self.blocks.anchors.shape[1]
        actual = torch.stack(
            [result.divergences[row * num_slots + slot] for row, slot in self.checked_slots]
        )  # (number of checked blocks, num_drafted)
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

        is_within_limit = error <= limit  # also False if the error is NaN
        if not is_within_limit:
            raise RunAborted(
                "self-check: the divergences of the training step and of a slow reference "
                f"computation differ by {statistic} {error:.1e}, and rounding explains only "
                f"{limit:.0e}. The attention mask, the loss or the compilation is wrong on this "
                "machine. Try compile=false, which turns torch.compile off. self_check=false turns "
                "this check off"
            )
        return (
            f"self-check: {TRAINING_SELF_CHECK_BLOCK_COUNT} blocks computed one at a time differ "
            f"from the training step by {statistic} {error:.1e}"
        )


@dataclass(frozen=True)
class _ReferenceLoss:
    """A slow computation of the training loss of single blocks, with which the loss of the training
    step is compared."""

    drafter: Drafter
    target: Target
    config: TrainConfig
    # Keys are columns of the data set, for example "ids". Values have the shape (packed sequences,
    # tokens); columns with stored hidden states of the target have further dimensions.
    batch: dict[str, torch.Tensor]
    blocks: Blocks

    def compute_block_divergences(self, row: int, slot: int) -> torch.Tensor:
        """Return the divergence of target and drafter at each drafted position of one block,
        (num_drafted,). It is 0 at positions without loss.

        row: index of the packed sequence in the batch. slot: index of the block in this sequence.
        """
        # of type Any, because only subclasses of Drafter define `prepare_training_inputs`
        drafter: Any = self.drafter
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
        inputs = drafter.prepare_training_inputs(target, ids, positions, anchors)
        # (num_queries, hidden_size)
        states = drafter(features.layer_features.to(dtype), positions, *inputs, *masks)[0]
        supervised = self.blocks.supervised[row, slot].tolist()
        return self.compute_divergences(
            states.to(target.dtype), features, ids[0], anchor, supervised
        )

    def compute_features(
        self, row: int, start: int, end: int, ids: torch.Tensor, positions: torch.Tensor
    ) -> Features:
        """Return the target's features (the hidden states that the drafter reads, and the last
        hidden states) of one document.

        If the batch has stored features, these are returned. Otherwise Hugging Face's layers
        compute the features.

        row: index of the document's packed sequence in the batch. start, end: the document's range
        of tokens in this sequence. ids, positions: (1, num_tokens) the document's token ids and
        positions.
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
        """Return the target's log-probabilities of the next token after a position of a document,
        for the tokens of the drafter's vocabulary.

        features: the target's hidden states of the document.
        """
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
        """Return the divergence of target and drafter at each drafted position of a block,
        (num_drafted,). It is 0 at positions without loss.

        states: (num_queries, hidden_size) the drafter's hidden states for the block.
        features: the target's hidden states of the block's document.
        ids: (num_tokens,) the document's token ids.
        anchor: position in the document of the block's first token.
        supervised: for each drafted position, whether it has a loss.
        """
        drafter = self.drafter
        target = self.target
        config = self.config.objective
        formula = DIVERGENCE_TABLE[config.divergence].formula
        drafter_head = get_head_weight(drafter, target).to(target.dtype)
        draft_states = states[drafter.first_draft_slot :]  # (num_drafted, hidden_size)
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
            if label < 0:  # -1 means that the label is not in the drafter's vocabulary
                continue
            log_p = self.compute_target_log_probs(features, anchor + t)
            products = F.linear(conditioned.head_input[t].to(target.dtype), drafter_head)
            uncorrected = target.logit_scale(products.float())
            logits = uncorrected
            excluded = torch.zeros_like(uncorrected, dtype=torch.bool)
            if conditioned.low_rank_correction is not None:
                correction = conditioned.low_rank_correction[t].to(target.dtype)
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
        """Add the conditional head's correction to the logits of one drafted position.

        uncorrected: (vocab_size,) the logits before the correction. correction: (rank,) the vector
        that the head computed for this position. label: scalar, the true token.

        Returns the corrected logits (vocab_size,), and whether each token is excluded from the
        divergence, (vocab_size,) bool. If `head.top_k` is not 0, all tokens are excluded except for
        the `head.top_k` likeliest tokens and the true token.
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
            # if the true token is not among the candidates, it replaces the least likely candidate
            candidates[-1] = torch.where((candidates == label).any(), candidates[-1], label)
            excluded = torch.ones_like(excluded).index_fill(0, candidates, False)
        return logits, excluded


def build_block_mask(
    block_start: int, length: int, num_queries: int, causal: bool, window: int | None
) -> torch.Tensor:
    """Return the attention mask of one block, (1, 1, num_queries, length + num_queries) bool:
    whether each query of the block sees each position of the document and each position of the
    block.

    block_start: position of the block's first query in the document.
    length: number of tokens of the document.
    num_queries: number of queries of the block.
    causal: whether a query sees, within the block, only itself and earlier positions.
    window: size of the sliding window, None for no window.
    """
    block_positions = block_start + torch.arange(num_queries)
    context_positions = torch.arange(length)
    sees_context = (context_positions < block_start).expand(num_queries, -1)
    sees_block = torch.ones(num_queries, num_queries, dtype=torch.bool)
    if causal:
        sees_block = sees_block.tril()
    mask = torch.cat([sees_context, sees_block], 1)  # (num_queries, length + num_queries)
    if window is not None:
        all_positions = torch.cat([context_positions, block_positions])
        mask = mask & ((block_positions[:, None] - all_positions).abs() < window)
    return mask[None, None]
