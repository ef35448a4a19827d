"""One training step.

1. The frozen target processes the packed sequences. The hidden states of the layers that the
   drafter reads, and the last hidden states, are kept.
2. The drafter processes all training blocks in one forward pass. A block starts at an anchor, a
   position of a packed sequence.
3. At every drafted position, the divergence between the drafter's and the target's distribution is
   computed.
4. The loss is the weighted sum of these divergences. The optimiser takes one step with its
   gradient.

"""

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F

from infer.drafters.base import Drafter, get_head_weight, get_target_head_weight
from infer.drafters.blocks import compute_packed_block_states
from infer.drafters.heads.base import HeadOutput
from infer.drafters.heads.draft import teacher_force_head
from infer.targets.target import Features, Target
from train.batches import MicroBatch
from train.blocks import Blocks
from train.chunk_plan import ChunkPlan
from train.config import TrainConfig
from train.engine import step_engine
from train.features import dequantise_features
from train.objective import (
    BlockLoss,
    DivergenceInputs,
    LogitCorrection,
    compute_divergence_loss,
    position_weights,
)
from train.run.log import StepMetrics

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from infer.drafters.heads.base import ConditionalHead
    from infer.drafters.heads.draft import teacher_force_head


def count_supervised_blocks_per_position(micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Count, for each drafted position of a block, the blocks that have a loss at this position.

    The blocks of this step's micro-batches in all processes are counted. Returns (num_drafted,)
    float32.
    """
    counts = [micro_batch.blocks.supervised.sum((0, 1)) for micro_batch in micro_batches]
    supervised_counts = torch.stack(counts).sum(0).float()
    dist.all_reduce(supervised_counts)
    return supervised_counts


def train_step(
    drafter: Drafter,
    engine: "DeepSpeedEngine",
    target: Target,
    micro_batches: list[MicroBatch],
    config: TrainConfig,
) -> StepMetrics:
    """Take one optimiser step on this process's micro-batches and return the step's metrics.

    engine: the DeepSpeed engine around `drafter`.

    The loss is divided by the total weight of all drafted positions in all micro-batches and
    processes. The loss therefore does not depend on the number of micro-batches and processes. If
    the loss of any process is not finite, all processes skip the step.
    """
    device = target.device
    world_size = dist.get_world_size()
    num_drafted = config.drafter.block_size - 1  # drafted positions of a block
    micro_batches = [micro_batch.to_device(device) for micro_batch in micro_batches]

    weights = position_weights(config.objective, num_drafted).to(device, non_blocking=True)
    supervised_counts = count_supervised_blocks_per_position(micro_batches)
    total_weight = (supervised_counts * weights).sum().clamp(min=1e-6)
    # DeepSpeed averages gradients over processes and micro-batches. This factor turns the average
    # into the sum, divided by the total weight of all drafted positions.
    gradient_scale = world_size * len(micro_batches) / total_weight

    loss_sum = torch.zeros((), device=device)
    agreement_sum = torch.zeros(num_drafted, device=device)
    # (sum of the acceptance lengths of all blocks, number of blocks)
    prefix_sum = torch.zeros(2, device=device)
    for micro_batch in micro_batches:
        blocks = micro_batch.blocks
        result = compute_block_loss(
            drafter, target, micro_batch.batch, blocks, config, micro_batch.chunk_plan, engine
        )

        # If the loss is not finite, the gradients must become NaN in every process, so that all
        # processes skip the step.
        finite_or_nan = torch.where(result.loss.detach().isfinite(), 1.0, float("nan"))
        engine.backward(finite_or_nan * result.loss * gradient_scale)
        grad_norm = step_engine(engine)  # updates the weights only after the last micro-batch

        # (B, blocks per sequence, num_drafted)
        agrees = result.agrees.view(blocks.supervised.shape) & blocks.supervised
        num_blocks = blocks.valid.sum()
        prefix_lengths = agrees.long().cumprod(-1).sum() + num_blocks
        loss_sum += result.loss.detach()
        agreement_sum += agrees.sum((0, 1))
        prefix_sum += torch.stack([prefix_lengths, num_blocks])

    # Reduce all metrics in a single collective operation.
    sums = torch.cat([loss_sum[None], agreement_sum, prefix_sum])
    dist.all_reduce(sums)
    return StepMetrics(
        loss=sums[0] / total_weight,
        agreement=sums[1 : 1 + num_drafted] / supervised_counts.clamp(min=1),
        acceptance_length=sums[-2] / sums[-1].clamp(min=1),
        grad_norm=grad_norm,
    )


def compute_block_loss(
    drafter: Drafter,
    target: Target,
    batch: dict[str, torch.Tensor],
    blocks: Blocks,
    config: TrainConfig,
    chunk_plan: ChunkPlan | None = None,
    forward: Callable | None = None,
) -> BlockLoss:
    """Run target and drafter on a batch of packed sequences, and return the training loss of the
    blocks in them.

    batch: the columns of the packed sequences, (B, num_tokens, ...) each. If they include stored
        hidden states of the target, the target is not run.
    chunk_plan: the result of `plan_chunks` for the blocks. None means that it is computed here.
    forward: called in place of the drafter for its forward pass, for example the DeepSpeed engine
        around it. None means that the drafter itself is called.
    """
    if "context" in batch:
        features = dequantise_features(batch, target.dtype)
    else:
        features = target.compute_packed_features(
            batch["ids"], batch["positions"], batch["documents"], drafter.layer_ids
        )
    states = compute_drafter_states(drafter, target, batch, blocks, features, forward)
    return compute_loss_from_states(
        drafter, states, target, batch, blocks, features, config, chunk_plan
    )


def compute_drafter_states(
    drafter: Drafter,
    target: Target,
    batch: dict[str, torch.Tensor],
    blocks: Blocks,
    features: Features,
    forward: Callable | None = None,
) -> torch.Tensor:
    """Run the drafter on all training blocks and return its hidden states, in the target's dtype.

    batch: the columns of the packed sequences.
    features: the target's hidden states of the packed sequences.
    forward: called in place of the drafter for its forward pass. None means the drafter itself.

    The result has the shape (num_blocks, num_queries, hidden_size), where num_queries is the number
    of input positions of the drafter per block.
    """
    states = compute_packed_block_states(
        drafter, target, batch, blocks.anchors, features.layer_features, forward or drafter
    )  # (B, blocks per sequence, num_queries, hidden_size)
    return states.flatten(0, 1).to(target.dtype)


def compute_loss_from_states(
    drafter: Drafter,
    states: torch.Tensor,
    target: Target,
    batch: dict[str, torch.Tensor],
    blocks: Blocks,
    features: Features,
    config: TrainConfig,
    chunk_plan: ChunkPlan | None = None,
) -> BlockLoss:
    """Compare the drafter's distributions with the target's, and return the training loss.

    states: (num_blocks, num_queries, hidden_size) the drafter's hidden states. features: the
    target's hidden states. A conditional head gets the true previous tokens (teacher forcing).

    A drafter with a reduced vocabulary learns the target's distribution renormalised over this
    vocabulary, and only at positions whose true token is in this vocabulary (EAGLE-3's mask). The
    other positions have weight 0, but count in the total weight by which the loss is divided.
    """
    num_drafted = blocks.supervised.shape[-1]  # number of drafted positions of a block
    weights = position_weights(config.objective, num_drafted).to(states.device, non_blocking=True)
    weights = (weights * blocks.supervised).flatten(0, 1)  # (num_blocks, num_drafted)
    divergence_weights = weights
    labels = drafter.vocabulary.ids_to_columns(blocks.labels.flatten(0, 1))
    if drafter.d2t is not None:
        divergence_weights = weights * (labels >= 0)
        # The given chunk plan was computed with other weights, so it is not valid here.
        chunk_plan = None

    draft_states = states[:, drafter.first_draft_slot :]
    head_inputs = draft_states.flatten(0, 1)
    conditioned = correction = None
    head = drafter.conditional_head
    if head is not None:
        conditioned = run_conditional_head(drafter, target, states, batch, blocks)
        head_inputs = conditioned.head_input.flatten(0, 1).to(target.dtype)
        correction = build_correction(head, conditioned, target.dtype)

    confidence_head = drafter.confidence_head
    inputs = DivergenceInputs(
        teacher_hidden=features.last_hidden_states.flatten(0, 1),
        teacher_rows=blocks.teacher_rows.flatten(0, 1),
        labels=labels,
        weights=divergence_weights,
        target_head=get_target_head_weight(drafter, target),
        config=config.objective,
        logit_scale=target.logit_scale,
        top_k=0 if head is None else head.top_k,
        needs_overlap=confidence_head is not None,
        chunk_plan=chunk_plan,
    )
    head_weight = get_head_weight(drafter, target)
    result = compute_divergence_loss(head_inputs, inputs, head_weight, correction)
    if confidence_head is None:
        return result

    assert result.overlap is not None
    logits = confidence_head(draft_states, conditioned)  # (num_blocks, num_drafted)
    confidence_loss = compute_confidence_loss(logits, result.overlap, weights)
    return result._replace(loss=result.loss + confidence_loss)


def compute_confidence_loss(
    logits: torch.Tensor, acceptance: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the loss of the confidence head, a weighted sum of binary cross-entropies (scalar).

    The confidence head predicts the probability that each draft is accepted.

    logits: the outputs of the confidence head. acceptance: the true acceptance probabilities.
    weights: the weights of the drafted positions. All three have the shape (num_blocks,
    num_drafted).
    """
    losses = F.binary_cross_entropy_with_logits(logits, acceptance.to(logits), reduction="none")
    return (losses * weights).sum()


def build_correction(
    head: "ConditionalHead", conditioned: "HeadOutput", dtype: torch.dtype
) -> LogitCorrection | None:
    """Return what the conditional head adds to the logits of all blocks, or None for a head that
    adds nothing to the logits.

    conditioned: the output of the conditional head. dtype: dtype of `LogitCorrection.vectors`.
    """
    if conditioned.low_rank_correction is None:
        return None
    assert head.correction_matrix is not None
    return LogitCorrection(
        conditioned.low_rank_correction.flatten(0, 1).to(dtype), head.correction_matrix
    )


def run_conditional_head(
    drafter: Drafter,
    target: Target,
    states: torch.Tensor,
    batch: dict[str, torch.Tensor],
    blocks: Blocks,
) -> "HeadOutput":
    """Run the conditional head on all blocks and return its output. At each drafted position, the
    head gets the true previous token (teacher forcing).

    states: (num_blocks, num_queries, hidden_size) the drafter's hidden states. batch: the columns
    of the packed sequences.
    """
    bonus_tokens = batch["ids"].gather(1, blocks.anchors)[..., None]  # (B, blocks per sequence, 1)
    # (B, blocks per sequence, num_drafted)
    previous_tokens = torch.cat([bonus_tokens, blocks.labels[..., :-1]], -1)
    return teacher_force_head(drafter, target, states, previous_tokens.flatten(0, 1))
