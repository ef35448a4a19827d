"""How a masked model computes several states of one text in one pass: every state's row, or its block with a cache.

What a step sees must not depend on rounds, or the text would. So the cache's policy counts tokens: with `cache="dual"`
(Fast-dLLM's) a step is a *full* pass when a block begins and when `refresh` tokens were written since the last full
one. Every other step computes its block only, and sees the last full pass's keys and values of everything outside. A
round drafts up to the next full step and no further; the paper does not say how its rounds meet a refresh.

N states, T positions of a row, K computed positions of a block, P positions of a window, Q queries, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from infer.config import MaskedOptions
from infer.masked import MaskedModel
from infer.masks import additive
from infer.selfdraft import LONGEST, Plan, State


@dataclass(frozen=True)
class Computed:
    """What a pass says of the masks of its window, state by state, and of some masks behind it, in the first state."""

    window: list[int]
    logits: torch.Tensor  # (N, P, V)
    full: bool  # whether it computed the whole row
    ahead_window: list[int]
    ahead: torch.Tensor | None  # (1, P', V)


def with_writes(ids: torch.Tensor, states: Sequence[State]) -> torch.Tensor:
    """The row of every state: ids (T,) -> (N, T)."""
    rows = ids.repeat(len(states), 1)
    edits = [(row, *write) for row, state in enumerate(states) for write in state]
    if edits:
        row, position, token = torch.tensor(edits, device=ids.device).T
        rows[row, position] = token
    return rows


class Rows:
    """Every state a row of its own, computed whole: exact, for any model. `ids` (T,) is the text, which grows."""

    def __init__(self, model: MaskedModel, options: MaskedOptions, ids: torch.Tensor) -> None:
        self.model, self.options, self.ids = model, options, ids

    def plan(self, masked: list[int], start: int) -> Plan:
        """A draft may go into later blocks, and leaves one mask for the last step."""
        return Plan(masked, start, self.options.block_length, min(LONGEST, len(masked) - 1))

    def run(self, states: Sequence[State], plan: Plan) -> Computed:
        """The window has the masks that this round or the next one may write."""
        last = plan.masked[: 2 * (LONGEST + 1)][-1]
        window = [position for position in plan.masked if plan.block(position) <= plan.block(last)]
        positions = torch.tensor(window, device=self.ids.device)
        logits = self.model.logits(with_writes(self.ids, states), positions=positions)
        return Computed(window, logits, True, [], None)

    def wrote(self, count: int) -> None:
        """Nothing is kept between passes."""


class DualCache:
    """Keys and values of the last full pass; the states' blocks lie side by side behind them in one row, each of which
    sees what is cached outside the block, and itself. A round that begins with a full step runs the whole row and the
    blocks of its other states in the same pass: they see in every layer what the full row has just put there."""

    def __init__(self, model: MaskedModel, options: MaskedOptions, ids: torch.Tensor) -> None:
        self.model, self.options, self.ids = model, options, ids
        self.since = 0  # tokens written since the last full step
        self.full = True  # whether the next step is one
        widest = 2 * LONGEST if options.order == "mixed" else LONGEST + 1
        self.states = max(widest, options.nodes)
        self.cache = model.cache(len(ids) + self.states * (options.block_length + 1))

    def plan(self, masked: list[int], start: int) -> Plan:
        """No state reaches the next full step."""
        plan = Plan(masked, start, self.options.block_length, 0)
        open_ = plan.open(frozenset())
        self.full = len(open_) == self.options.block_length or self.since >= self.options.refresh
        if self.full:
            self.since = 0
        most = min(LONGEST, len(open_) - 1, self.options.refresh - self.since - 1)
        return Plan(masked, start, self.options.block_length, most)

    def run(self, states: Sequence[State], plan: Plan) -> Computed:
        """The window has the masks of the block, `ahead` those of the next block, where a full step computes them."""
        model, ids, device = self.model, self.ids, self.ids.device
        length, window = len(ids), plan.open(frozenset())
        end = plan.start + (plan.block(window[0]) + 1) * plan.block_length
        begin = end - plan.block_length - int(model.shifted)  # a shifted block's outputs begin one position before it
        blocks = states[1:] if self.full else states
        tokens = with_writes(ids, blocks)[:, begin:end].flatten()  # (N * K,)
        places = torch.arange(begin, end, device=device).repeat(len(blocks))
        if self.full:
            tokens, places = torch.cat([ids, tokens]), torch.cat([torch.arange(length, device=device), places])
            self.cache.keep([])
            with self.cache.add(1) as row:
                hidden = self._pass(tokens, places, row, begin, end)
                row.advance([length])
        else:
            hidden = self._pass(tokens, places, self.cache, begin, end)
        at = torch.tensor(window, device=device) - int(model.shifted)
        own = hidden[length * self.full :].view(len(blocks), end - begin, hidden.shape[-1])[:, at - begin]  # (N, P, D)
        if not self.full:
            return Computed(window, model.head(own), False, [], None)
        ahead = [position for position in plan.masked if end <= position < end + plan.block_length]
        beyond = torch.tensor(ahead, dtype=torch.long, device=device) - int(model.shifted)
        logits = model.head(torch.cat([hidden[at][None], own]))
        return Computed(window, logits, True, ahead, model.head(hidden[beyond])[None] if ahead else None)

    def _pass(self, tokens: torch.Tensor, places: torch.Tensor, row, begin: int, end: int) -> torch.Tensor:
        """Final hidden states (Q, D) of the new tokens (Q,), on top of what the row's cache holds."""
        length, width = len(self.ids), end - begin
        window = row.window(len(tokens))
        kept = torch.arange(window.extent, device=tokens.device)  # (S,) keys: the text, then blocks
        query = kept[-len(tokens) :]  # (Q,) the new tokens' own places among the keys

        def part(index: torch.Tensor) -> torch.Tensor:  # 0: the text, 1 and on: a state's block
            return torch.where(index < length, 0, (index - length) // width + 1)

        text = kept < length
        outside = text & ((kept < begin) | (kept >= end))
        seen = torch.where(query[:, None] < length, text, outside | (part(kept) == part(query)[:, None]) & ~text)
        mask = additive(seen[None, None], self.model.dtype)
        return self.model.hidden(tokens[None], places[None], mask, window)[0]

    def wrote(self, count: int) -> None:
        """Counts tokens towards the next full step."""
        self.since += count
