"""One training step.

1. The frozen target computes context features and last hidden states of the packed sequences.
2. The drafter processes the blocks behind all anchors in one forward pass.
3. At every drafted position, the drafter's distribution is compared with the target's.
4. The loss is the weighted sum of these divergences. It is differentiated, and the optimiser takes
   one step.

Shapes: B packed sequences, T tokens each, N anchors, K block size, L = K - 1 drafted positions,
G = B * N blocks, W positions of a block in the drafter, D hidden size, V vocabulary.
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
    compute_divergence,
    position_weights,
)
from train.run.log import StepMetrics

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

    from infer.drafters.heads.base import Head
    from infer.drafters.heads.draft import teacher_force_head


def count_supervised_positions(micro_batches: list[MicroBatch]) -> torch.Tensor:
    """Return for each drafted position, (L,), the number of blocks with a loss there, over all
    processes."""
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

    The loss is divided by the total weight of all blocks in all micro-batches and processes, so it
    does not depend on how the blocks are distributed over them. If the loss of any process is not
    finite, the gradients of all processes become NaN, and all processes skip the step.
    """
    device = target.device
    world_size = dist.get_world_size()
    num_drafted = config.drafter.block_size - 1  # drafted positions of a block, L in shapes
    micro_batches = [micro_batch.to_device(device) for micro_batch in micro_batches]

    # the total weight of all supervised positions of the step
    weights = position_weights(config.objective, num_drafted).to(device, non_blocking=True)
    supervised_counts = count_supervised_positions(micro_batches)
    total_weight = (supervised_counts * weights).sum().clamp(min=1e-6)
    # DeepSpeed averages gradients over processes and micro-batches. This factor turns the averages
    # into sums divided by the total weight.
    gradient_scale = world_size * len(micro_batches) / total_weight

    loss_sum = torch.zeros((), device=device)
    agreement_sum = torch.zeros(num_drafted, device=device)
    # sum of the acceptance lengths of all blocks, and the number of blocks
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

        agrees = result.agrees.view(blocks.supervised.shape) & blocks.supervised  # (B, N, L)
        num_blocks = blocks.valid.sum()
        prefix_lengths = agrees.long().cumprod(-1).sum() + num_blocks
        loss_sum += result.loss.detach()
        agreement_sum += agrees.sum((0, 1))
        prefix_sum += torch.stack([prefix_lengths, num_blocks])

    # all metrics are reduced in a single collective operation
    sums = torch.cat([loss_sum[None], agreement_sum, prefix_sum])
    dist.all_reduce(sums)
    return StepMetrics(
        loss=sums[0] / total_weight,
        agreement=sums[1 : 1 + num_drafted] / supervised_counts.clamp(min=1),
        prefix=sums[-2] / sums[-1].clamp(min=1),
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
    """Run target and drafter on a batch of packed sequences, and return the loss of the blocks.

    batch: columns of the packed sequences, (B, T) each, and of their stored features if there are
        any. Without stored features, the target computes the features.
    chunk_plan: the result of `plan_chunks` for the blocks. None means that it is computed here.
    forward: what is called for the drafter's forward pass, for example the DeepSpeed engine. None
        means that the drafter itself is called.
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
    """Run the drafter on all blocks, and return its hidden states at all positions of the blocks,
    (G, W, D), in the target's dtype.

    features: the target's features of the batch. forward: see `compute_block_loss`.
    """
    states = compute_packed_block_states(
        drafter, target, batch, blocks.anchors, features.context, forward or drafter
    )  # (B, N, W, D)
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
    """Compare the drafter's distributions with the target's, and return the loss.

    states: (G, W, D) the drafter's hidden states. features: the target's features of the batch.
    A conditional head gets the true previous tokens (teacher forcing).

    If the drafter has a reduced vocabulary, it learns the target's distribution renormalised over
    that vocabulary. It learns only at positions whose true token belongs to the vocabulary
    (EAGLE-3's mask). All other positions have weight 0, and still count in the divisor of the loss.
    On text of the target, this multiplies a divergence by its probability of that vocabulary.
    """
    num_drafted = blocks.supervised.shape[-1]  # drafted positions of a block, L in shapes
    weights = position_weights(config.objective, num_drafted).to(states.device, non_blocking=True)
    weights = (weights * blocks.supervised).flatten(0, 1)  # (G, L)
    divergence_weights = weights
    labels = drafter.vocabulary.ids_to_columns(blocks.labels.flatten(0, 1))  # (G, L)
    if drafter.d2t is not None:
        divergence_weights = weights * (labels >= 0)
        # the given plan has other weights: those of a drafter with the full vocabulary
        chunk_plan = None

    draft_states = states[:, drafter.first_draft_slot :]  # (G, L, D)
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
        head=get_target_head_weight(drafter, target),
        config=config.objective,
        scale=target.logit_scale,
        top_k=0 if head is None else head.top_k,
        needs_overlap=confidence_head is not None,
        chunk_plan=chunk_plan,
    )
    result = compute_divergence(head_inputs, inputs, get_head_weight(drafter, target), correction)
    if confidence_head is None:
        return result

    assert result.overlap is not None
    logits = confidence_head(draft_states, conditioned)  # (G, L)
    confidence_loss = compute_confidence_loss(logits, result.overlap, weights)
    return result._replace(loss=result.loss + confidence_loss)


def compute_confidence_loss(
    logits: torch.Tensor, acceptance: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Return the loss of the confidence head, a weighted sum of cross-entropies (scalar).

    The confidence head predicts the probability that each draft is accepted. logits: its outputs.
    acceptance: the true probabilities. weights: weights of the drafted positions. All are (G, L).
    """
    losses = F.binary_cross_entropy_with_logits(logits, acceptance.to(logits), reduction="none")
    return (losses * weights).sum()


def build_correction(
    head: "Head", conditioned: "HeadOutput", dtype: torch.dtype
) -> LogitCorrection | None:
    """Return the conditional head's correction of the logits of all blocks, None if the head
    corrects no logits.

    conditioned: the output of the conditional head. dtype: the dtype of the correction's vectors.
    """
    if conditioned.correction is None:
        return None
    assert head.correction_matrix is not None
    return LogitCorrection(conditioned.correction.flatten(0, 1).to(dtype), head.correction_matrix)


def run_conditional_head(
    drafter: Drafter,
    target: Target,
    states: torch.Tensor,
    batch: dict[str, torch.Tensor],
    blocks: Blocks,
) -> "HeadOutput":
    """Run the conditional head on all blocks and return its output. At each drafted position, the
    head gets the true token before the label (teacher forcing).

    states: (G, W, D) the drafter's hidden states.
    """
    bonus_tokens = batch["ids"].gather(1, blocks.anchors)[..., None]  # (B, N, 1)
    previous_tokens = torch.cat([bonus_tokens, blocks.labels[..., :-1]], -1)  # (B, N, L)
    return teacher_force_head(drafter, target, states, previous_tokens.flatten(0, 1))
