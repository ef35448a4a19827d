"""One training step.

Packed rows -> the target's features and final states (no gradient) -> anchors and their blocks ->
the drafter on all blocks at once under the prefix-shared mask -> annealed divergence to the target
at every drafted position -> gradients -> the optimiser's step.

B rows, T packed length, N anchors, K block size, L = K - 1, W positions of a block in the drafter,
D hidden size.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.nn import functional as F

from infer.drafters.base import Drafter, head_weight, packed_states, rows_of
from infer.drafters.heads.draft import teach
from infer.targets.target import Features, Target
from train.batches import StepRows
from train.blocks import Blocks
from train.config import TrainConfig
from train.engine import take_step
from train.features import stored_features
from train.objective import Batch, Correction, RowLoss, RowPlan, divergence, position_weights
from train.run.log import StepMetrics


def train_step(
    drafter: Drafter, engine, target: Target, drawn: StepRows, config: TrainConfig
) -> StepMetrics:
    """Take one optimiser step over the rows that `Prefetch` read; engine: the one around the
    drafter.

    The loss is divided by the weights of all blocks of all passes and processes, so that it depends
    neither on their number nor on how the blocks fell among them. A loss that is not finite in one
    process makes the gradients of all processes so, and all skip the step.
    """
    world = dist.get_world_size()
    device = target.device
    length = config.drafter.block_size - 1
    micro = [laid.to(device) for laid in drawn]
    weights = position_weights(config.objective, length).to(device, non_blocking=True)
    supervised = sum(laid.blocks.supervised.sum((0, 1)) for laid in micro).float()  # (L,)
    dist.all_reduce(supervised)
    total = (supervised * weights).sum().clamp(min=1e-6)

    loss_sum = torch.zeros((), device=device)
    agree_sum = torch.zeros(length, device=device)
    prefix_sum = torch.zeros(2, device=device)
    for laid in micro:
        blocks = laid.blocks
        result = block_loss(drafter, target, laid.rows, blocks, config, laid.plan, engine)
        loss = result.loss
        poison = torch.where(loss.detach().isfinite(), 1.0, float("nan"))
        engine.backward(
            poison * loss * (world * len(micro) / total)
        )  # DeepSpeed averages over both
        norm = take_step(engine)
        agree = result.agree.view(blocks.supervised.shape) & blocks.supervised  # (B, N, L)
        loss_sum += loss.detach()
        agree_sum += agree.sum((0, 1))
        prefix_sum += torch.stack(
            [agree.long().cumprod(-1).sum() + blocks.valid.sum(), blocks.valid.sum()]
        )
    sums = torch.cat([loss_sum[None], agree_sum, prefix_sum])
    dist.all_reduce(sums)
    return StepMetrics(
        loss=sums[0] / total,
        agreement=sums[1 : 1 + length] / supervised.clamp(min=1),
        prefix=sums[-2] / sums[-1].clamp(min=1),
        grad_norm=norm,
    )


def block_loss(
    drafter: Drafter,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    config: TrainConfig,
    plan: RowPlan | None = None,
    forward: Callable | None = None,
) -> RowLoss:
    """Compute the objective on a batch's blocks, G = B * N of them.

    rows: columns (B, T), with stored features if there are any; plan: `plan_rows` of the blocks,
        where
    it was made before; forward: what computes the drafter's pass, the engine around it or, by
    default, the drafter itself.
    """
    if "context" in rows:
        features = stored_features(rows, target.dtype)
    else:
        features = target.packed_features(
            rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
        )
    drafted = draft_states(drafter, target, rows, blocks, features, forward)
    return score(drafter, drafted, target, rows, blocks, features, config, plan)


def draft_states(
    drafter: Drafter,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    features: Features,
    forward: Callable | None = None,
) -> torch.Tensor:
    """Return the drafter's states at all slots of a batch's blocks, (G, W, D) in the target's
    dtype;
    forward: as in `block_loss`."""
    states = packed_states(
        drafter, target, rows, blocks.anchors, features.context, forward or drafter
    )  # (B, N, W, D)
    return states.flatten(0, 1).to(target.dtype)


def score(
    drafter: Drafter,
    drafted: torch.Tensor,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    features: Features,
    config: TrainConfig,
    plan: RowPlan | None = None,
) -> RowLoss:
    """Compute the objective on drafted states (B*N, W, D), block by block; a conditional head sees
    the true tokens.

    A drafter of a part of the vocabulary learns the target's distribution among its tokens,
    normalised, where the true token is one of them (EAGLE-3's mask). The others' rows weigh nothing
    and agree with nothing, but count: so the loss is, for texts of the target's own, the divergence
    times the probability of its tokens.
    """
    length = blocks.supervised.shape[-1]
    weights = position_weights(config.objective, length).to(drafted.device, non_blocking=True)
    weights = (weights * blocks.supervised).flatten(0, 1)
    counted = weights
    labels = drafter.vocabulary.columns(blocks.labels.flatten(0, 1))
    if drafter.d2t is not None:
        weights = weights * (labels >= 0)
        plan = None  # it was made for other rows
    head = drafter.conditional_head
    confidence = drafter.confidence_head
    correction = None
    states = drafted[:, drafter.first_draft_slot :]  # (G, L, D)
    if head is None:
        drafted = states.flatten(0, 1)
    else:
        # the true token before every label, (B, N, L)
        before = torch.cat(
            [rows["ids"].gather(1, blocks.anchors)[..., None], blocks.labels[..., :-1]], -1
        )
        answer = teach(drafter, target, drafted, before.flatten(0, 1))
        drafted = answer.read.flatten(0, 1).to(target.dtype)
        if answer.correction is not None:
            correction = Correction(answer.correction.flatten(0, 1).to(target.dtype), head.out)
    batch = Batch(
        teacher_hidden=features.last.flatten(0, 1),
        teacher_rows=blocks.teacher_rows.flatten(0, 1),
        labels=labels,
        weights=weights,
        head=rows_of(drafter, target),
        config=config.objective,
        scale=target.scale,
        top_k=0 if head is None else head.top_k,
        overlap=confidence is not None,
        plan=plan,
    )
    result = divergence(drafted, batch, head_weight(drafter, target), correction)
    if confidence is None:
        return result
    logits = confidence(states, answer)  # (G, L)
    entropy = F.binary_cross_entropy_with_logits(
        logits, result.overlap.to(logits), reduction="none"
    )
    return result._replace(loss=result.loss + (entropy * counted).sum())
