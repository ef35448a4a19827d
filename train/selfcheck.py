"""Check before the first step that training computes what was meant.

A few blocks of the first batch are computed alone, without anything that makes training fast: their
document alone through Hugging Face's layers and through the drafter, a mask written out, the
divergence as its formula says. The training step's own numbers for the same blocks, from all blocks
of the batch under one mask, chunk by chunk, compiled if that is on, must agree. It takes one more
forward pass of a batch and a few of single documents.

N anchors, K block size, L = K - 1, W positions of a block in the drafter, T length of a document, D
hidden size, V vocabulary.
"""

import torch
import torch.distributed as dist
from torch.nn import functional as F

from data.packing import batch
from infer.attention.masks import additive
from infer.drafters.base import Drafter, head_weight
from infer.drafters.heads.base import Conditioned
from infer.drafters.heads.draft import teach
from infer.targets.target import Features, Target
from infer.utils.errors import Stopped
from train.batches import draw_blocks, first_draw
from train.config import TrainConfig
from train.divergences import DIVERGENCES
from train.engine import compute_dtype, micro_batch
from train.features import stored_features
from train.objective import IMPOSSIBLE, RowLoss

BLOCKS = 3  # that are computed alone
# How much a position's divergence may differ, relative to it, or to one nat where it is smaller:
# the largest one in float32; on average in bfloat16, which has three digits, and where a pass over
# a document alone rounds elsewhere than one over a packed row. On the embedded target (12 layers,
# 24 batches, both families) at most 1.4e-6 was seen, and in bfloat16 0.013 at a single position;
# larger targets round more often.
LARGEST = 1e-4
AVERAGE = 0.05


class SelfCheck:
    """Compute slow numbers from a drafter that is in no engine yet, and compare them with the fast
    ones when called."""

    @torch.no_grad()
    def __init__(self, drafter: Drafter, target: Target, dataset, config: TrainConfig) -> None:
        count, _ = micro_batch(config, dist.get_world_size())
        draw = first_draw(config, 0, 0, dist.get_rank(), dist.get_world_size())
        rows = batch(dataset, draw, count, config.seed)
        self.rows = {name: column.to(target.device) for name, column in rows.items()}
        self.blocks = draw_blocks(self.rows, config, draw)
        self.exact = (
            not target.quantised
            and target.dtype == compute_dtype(config, target.device) == torch.float32
        )
        there = self.blocks.valid.nonzero().tolist() or [[0, 0]]
        # as many in every process: a pass of a target that is spread over all takes them all
        self.some = [
            there[i * (len(there) - 1) // (BLOCKS - 1)] for i in range(BLOCKS)
        ]  # (row, slot)
        self.expected = torch.stack(
            [self.alone(drafter, target, b, n, config) for b, n in self.some]
        )  # (3, L)

    def alone(
        self, drafter: Drafter, target: Target, b: int, n: int, config: TrainConfig
    ) -> torch.Tensor:
        """Return the divergences of one block, (L,); 0 at positions without loss."""
        rows = self.rows
        anchor = int(self.blocks.anchors[b, n])
        inside = (rows["documents"][b] == rows["documents"][b, anchor]).nonzero()[:, 0]
        begin = int(inside[0])
        end = int(inside[-1]) + 1
        ids = rows["ids"][b : b + 1, begin:end]
        positions = torch.arange(end - begin, device=target.device)[None]
        if "context" in rows:
            part = {
                name: rows[name][b : b + 1, begin:end]
                for name in rows
                if name.startswith(("context", "last"))
            }
            features = stored_features(part, target.dtype)
        else:
            features = target.packed_features(
                ids, positions, torch.zeros_like(ids), drafter.layer_ids, library=True
            )
        anchor = anchor - begin
        kind = drafter.norm.weight.dtype
        masks = [
            self.mask(
                max(anchor - drafter.anchor_offset, 0), end - begin, drafter.num_queries, *view
            )
            for view in drafter.attention_patterns
        ]
        masks = [additive(mask.to(target.device), kind) for mask in masks]
        inputs = drafter.inputs(
            target, ids, positions, torch.tensor([[anchor]], device=target.device)
        )
        hidden = drafter(features.context.to(kind), positions, *inputs, *masks)[0]  # (W, D)
        return self.divergences(
            hidden.to(target.dtype), features, ids[0], anchor, b, n, drafter, target, config
        )

    @staticmethod
    def mask(start: int, length: int, width: int, causal: bool, window: int | None) -> torch.Tensor:
        """Return the mask of a block that begins at `start` in a document of `length` positions,
        (1, 1, W, T + W)."""
        block = start + torch.arange(width)
        context = torch.arange(length)
        before = (context < start).expand(width, -1)
        inside = torch.ones(width, width, dtype=torch.bool)
        seen = torch.cat([before, inside.tril() if causal else inside], 1)  # (W, T + W)
        distance = (block[:, None] - torch.cat([context, block])).abs()
        return (seen if window is None else seen & (distance < window))[None, None]

    def divergences(
        self, hidden, features: Features, ids, anchor, b, n, drafter, target, config
    ) -> torch.Tensor:
        """Return the divergences (L,) of a block's states (W, D); its document has `ids` (T,) and
        `features`."""
        # (1, W, D), (L, D)
        whole = hidden[None]
        hidden = hidden[drafter.first_draft_slot :]
        head = head_weight(drafter, target).to(target.dtype)
        out = torch.zeros(len(hidden), device=target.device)
        before = ids[
            (anchor + torch.arange(len(hidden), device=ids.device)).clamp(max=len(ids) - 1)
        ]
        answer = Conditioned(hidden)
        if drafter.conditional_head is not None:
            answer = teach(drafter, target, whole, before[None])
            answer = Conditioned(*(part if part is None else part[0] for part in answer))
        formula = DIVERGENCES[config.objective.divergence].formula
        known = drafter.vocabulary
        for t in range(len(hidden)):
            label = known.columns(ids[anchor + t + 1]) if self.blocks.supervised[b, n, t] else -1
            if label < 0:
                continue
            theirs = target.scale(
                F.linear(features.last[0, anchor + t], target.head_weight).float()
            )
            log_p = known.part(theirs).log_softmax(-1)
            alone = target.scale(F.linear(answer.read[t].to(target.dtype), head).float())
            scores = alone
            outside = torch.zeros_like(alone, dtype=torch.bool)
            if answer.correction is not None:
                module = drafter.conditional_head
                scores = (
                    alone
                    + F.linear(
                        answer.correction[t].to(target.dtype), module.out.to(target.dtype)
                    ).float()
                )
                if module.top_k:
                    likely = alone.topk(module.top_k).indices
                    likely[-1] = torch.where((likely == label).any(), likely[-1], label)
                    outside = torch.ones_like(outside).index_fill(0, likely, False)
            compared = (x.masked_fill(outside, IMPOSSIBLE).log_softmax(-1) for x in (log_p, scores))
            out[t] = formula(*compared, label)
            if config.objective.marginal_weight:
                out[t] += config.objective.marginal_weight * formula(
                    log_p, alone.log_softmax(-1), label
                )
        return out

    def __call__(self, fast: RowLoss) -> str:
        """Compare with the training step's numbers of `rows` and `blocks`; return a sentence.
        Raises Stopped where they differ."""
        slots = self.blocks.anchors.shape[1]
        found = torch.stack([fast.rows[b * slots + n] for b, n in self.some])  # (3, L)
        error = (found - self.expected).abs() / self.expected.abs().clamp(min=1)
        if self.exact:
            error = error.max().item()
            most = LARGEST
            how = "at most"
        else:
            error = (error.sum() / self.expected.count_nonzero().clamp(min=1)).item()
            most = AVERAGE
            how = "on average"
        if not error <= most:  # a difference that is not a number is one
            raise Stopped(
                f"self-check: the training step and a slow plain computation of the same blocks differ by {error:.1e} "
                f"{how} ({most:.0e} is rounding): mask, objective or compilation is wrong on this "
                "machine; compile=false leaves out one of them, self_check=false the check"
            )
        return f"self-check: {BLOCKS} blocks computed alone differ from the training step by {how} {error:.1e}"
