"""Passes of a masked model over states of texts: every state's row, or its block with a cache.

The inputs of a step must not depend on rounds, or the text would: with Fast-dLLM's `cache="dual"` a
step is a *full* pass when a block begins. Every other step computes its block only, and attends to
the full pass's keys and values of everything outside. A round drafts up to the next full step and
no further; the paper does not specify this.

B texts of a pass, T positions of the longest, N states, K computed positions of a block, Q queries
or outputs asked for, S keys, H key/value heads, E head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from infer.attention.masks import additive
from infer.masked.config import LONGEST, MaskedConfig
from infer.masked.drafting import Plan, State
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedSequence


@dataclass(frozen=True)
class Task:
    """A text's part in a round: the states that are computed, the current text first, and the
    positions asked of each."""

    text: MaskedSequence
    plan: Plan
    states: Sequence[State]
    asked: Sequence[Sequence[int]]  # masked positions, state by state


def with_writes(ids: torch.Tensor, states: Sequence[State]) -> torch.Tensor:
    """Return the row of every state: ids (T,) -> (N, T)."""
    rows = ids.repeat(len(states), 1)
    edits = [(row, *write) for row, state in enumerate(states) for write in state]
    if edits:
        row, position, token = torch.tensor(edits, device=ids.device).T
        rows[row, position] = token
    return rows


class Rows:
    """Computes every state as a whole row of its own: exact, for any model."""

    def __init__(self, model: MaskedModel, options: MaskedConfig) -> None:
        self.model = model
        self.block_length = options.block_length

    def plan(self, text: MaskedSequence) -> Plan:
        """Plan drafts that may reach into later blocks, and leave one mask for the last step."""
        return text.plan(self.block_length, min(LONGEST, len(text.masked) - 1))

    def asked(self, text: MaskedSequence, plan: Plan, states: Sequence[State]) -> list[list[int]]:
        """Return the masks that this round or the next one may write, for every state."""
        last = plan.masked[: 2 * (LONGEST + 1)][-1]
        window = [position for position in plan.masked if plan.block(position) <= plan.block(last)]
        return [window] * len(states)

    def kind(self, text: MaskedSequence) -> int:
        """Return which texts go through one pass: all, or those of one length where the model takes
        no padding."""
        return 0 if self.model.native else len(text.row)

    def logits(self, tasks: Sequence[Task]) -> torch.Tensor:
        """Return logits (Q, V) of all positions asked for: task by task, state by state, in the
        order of the positions."""
        rows = [row for task in tasks for row in with_writes(task.text.row, task.states)]
        ids = pad_sequence(rows, batch_first=True)  # (all states, T)
        lengths = [len(row) for row in rows]
        allowed = (
            torch.arange(max(lengths), device=ids.device)
            < torch.tensor(lengths, device=ids.device)[:, None]
        )
        asked = [positions for task in tasks for positions in task.asked]
        at = torch.tensor(
            [(row, position) for row, some in enumerate(asked) for position in some],
            device=ids.device,
        )
        return self.model.logits(ids, allowed, (at[:, 0], at[:, 1]))


@dataclass(frozen=True)
class Kept:
    """One pass's view of the kept keys and values; Hugging Face's attention layers call `update`. A
    full pass replaces those of its texts and attends to its own; any other attends to the kept
    ones, then to its own."""

    buffer: torch.Tensor  # (2 * layers, rows, capacity, H, E)
    slots: torch.Tensor  # (B,) the texts' rows
    longest: int  # T
    full: bool

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take new positions (B, H, Q, E) of one layer; return all keys and values of the pass, (B,
        H, S, E) each."""
        if self.full:
            for index, new in ((2 * layer, keys), (2 * layer + 1, values)):
                self.buffer[index, self.slots, : self.longest] = new[
                    :, :, : self.longest
                ].transpose(1, 2)
            return keys, values
        kept = (
            self.buffer[index, self.slots, : self.longest].transpose(1, 2)
            for index in (2 * layer, 2 * layer + 1)
        )
        return torch.cat([next(kept), keys], 2), torch.cat([next(kept), values], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0 if self.full else self.longest


class DualCache:
    """Keeps keys and values of each text's last full pass. The blocks of its states follow side by
    side, and each attends to what is kept outside the block, and to itself. A round that begins
    with a full step computes the whole row and the blocks of its other states in one pass: in every
    layer they attend to the full row's new keys."""

    def __init__(self, model: MaskedModel, options: MaskedConfig, capacity: int) -> None:
        self.model = model
        self.block_length = options.block_length
        # K: a shifted block's outputs begin one position before
        self.width = self.block_length + int(model.shifted)
        self.buffer = model.cache(options.max_num_seqs, capacity)

    def plan(self, text: MaskedSequence) -> Plan:
        """Plan drafts that do not reach the next full step."""
        left = len(text.plan(self.block_length, 0).open(frozenset()))
        text.full = left == self.block_length
        return text.plan(self.block_length, min(LONGEST, left - 1))

    def asked(self, text: MaskedSequence, plan: Plan, states: Sequence[State]) -> list[list[int]]:
        """Return the masks of the block, and of the current text also those of the next block,
        where a full step computes them."""
        window = plan.open(frozenset())
        following = plan.block(window[0]) + 1
        ahead = [
            position for position in plan.masked if text.full and plan.block(position) == following
        ]
        return [window + ahead, *([window] * (len(states) - 1))]

    def kind(self, text: MaskedSequence) -> bool:
        """Return which texts go through one pass: full steps, and the others; blocks padded to
        whole rows would cost what they save."""
        return text.full

    def logits(self, tasks: Sequence[Task]) -> torch.Tensor:
        """Return logits (Q, V) of all positions asked for: task by task, state by state, in the
        order of the positions."""
        full = tasks[0].text.full
        width = self.width
        device = self.model.device
        begins = [self._begin(task) for task in tasks]
        # states whose blocks follow the rows
        apart = [task.states[1:] if full else task.states for task in tasks]
        rows = pad_sequence([task.text.row for task in tasks], batch_first=True)  # (B, T)
        blocks = pad_sequence(
            [
                with_writes(task.text.row, states)[:, begin : begin + width].flatten()
                for task, states, begin in zip(tasks, apart, begins, strict=True)
            ],
            batch_first=True,
        )  # (B, N * K)
        # (B, 1)
        longest = rows.shape[1]
        first = torch.tensor(begins, device=device)[:, None]
        places = first + torch.arange(width, device=device).repeat(blocks.shape[1] // width)
        mask = self._mask(
            [len(task.text.row) for task in tasks], first, longest, blocks.shape[1], full
        )
        if full:
            blocks = torch.cat([rows, blocks], 1)
            places = torch.cat(
                [torch.arange(longest, device=device).expand(len(tasks), -1), places], 1
            )
        slots = torch.tensor([task.text.slot for task in tasks], device=device)
        kept = Kept(self.buffer, slots, longest, full)
        hidden = self.model.hidden(blocks, places, mask, kept)  # (B, Q, D)

        shift = int(self.model.shifted)
        at = []
        for row, (task, begin) in enumerate(zip(tasks, begins, strict=True)):
            for state, positions in enumerate(task.asked):
                column = longest + (state - 1) * width - begin if full else state * width - begin
                column = 0 if full and state == 0 else column
                at += [(row, column + position - shift) for position in positions]
        row, column = torch.tensor(at, device=device).T
        return self.model.head(hidden[row, column])

    def _begin(self, task: Task) -> int:
        """Return the first computed position of the block."""
        block = task.plan.block(task.asked[0][0])
        return task.plan.start + (block + 1) * task.plan.block_length - self.width

    def _mask(
        self, lengths: Sequence[int], first: torch.Tensor, longest: int, apart: int, full: bool
    ) -> torch.Tensor:
        """Return the additive mask (B, 1, Q, S). Keys are the texts' rows, then `apart` positions
        of blocks; queries are all of them, or those of the blocks alone."""
        key = torch.arange(longest + apart, device=first.device)  # (S,)
        row = key < longest
        known = row & (key < torch.tensor(lengths, device=first.device)[:, None])  # (B, S)
        outside = known & ((key < first) | (key >= first + self.width))
        block = torch.where(row, -1, (key - longest) // self.width)
        query = block if full else block[longest:]  # (Q,)
        own = block == query[:, None]  # (Q, S)
        seen = torch.where(
            (query < 0)[:, None], known[:, None], outside[:, None] | own & ~row
        )  # (B, Q, S)
        return additive(seen[:, None], self.model.dtype)
