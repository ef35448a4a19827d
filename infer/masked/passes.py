"""How a masked model computes states of texts in one pass: every state's row, or its block with a cache.

What a step sees must not depend on rounds, or the text would. So the cache's policy counts tokens: with `cache="dual"`
(Fast-dLLM's) a step is a *full* pass when a block begins and when `refresh` tokens were written since the last full
one. Every other step computes its block only, and sees the last full pass's keys and values of everything outside. A
round drafts up to the next full step and no further; the paper does not say how its rounds meet a refresh.

B texts of a pass, T positions of the longest, N states, K computed positions of a block, Q queries or outputs asked
for, S keys, H key/value heads, E head size, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence

from infer.attention.masks import additive
from infer.config import EngineConfig
from infer.masked.drafting import LONGEST, Plan, State
from infer.masked.model import MaskedModel
from infer.masked.sequence import MaskedSequence


@dataclass(frozen=True)
class Task:
    """A text's part in a round: the states that are computed, the text as it is first, and what is asked of each."""

    text: MaskedSequence
    plan: Plan
    states: Sequence[State]
    asked: Sequence[Sequence[int]]  # masked positions, state by state


def with_writes(ids: torch.Tensor, states: Sequence[State]) -> torch.Tensor:
    """The row of every state: ids (T,) -> (N, T)."""
    rows = ids.repeat(len(states), 1)
    edits = [(row, *write) for row, state in enumerate(states) for write in state]
    if edits:
        row, position, token = torch.tensor(edits, device=ids.device).T
        rows[row, position] = token
    return rows


class Rows:
    """Every state a row of its own, computed whole: exact, for any model."""

    def __init__(self, model: MaskedModel, options: EngineConfig) -> None:
        self.model, self.block_length = model, options.block_length

    def plan(self, text: MaskedSequence) -> Plan:
        """A draft may go into later blocks, and leaves one mask for the last step."""
        return text.plan(self.block_length, min(LONGEST, len(text.masked) - 1))

    def asked(self, text: MaskedSequence, plan: Plan, states: Sequence[State]) -> list[list[int]]:
        """The masks that this round or the next one may write."""
        last = plan.masked[: 2 * (LONGEST + 1)][-1]
        window = [position for position in plan.masked if plan.block(position) <= plan.block(last)]
        return [window] * len(states)

    def groups(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Which tasks share a pass: all of them, or those of one length where the model takes no padding."""
        if self.model.native:
            return [list(tasks)]
        lengths = dict.fromkeys(len(task.text.row) for task in tasks)
        return [[task for task in tasks if len(task.text.row) == length] for length in lengths]

    def logits(self, tasks: Sequence[Task]) -> torch.Tensor:
        """Logits (Q, V) of everything asked for: task by task, state by state, in the order of the positions."""
        rows = [row for task in tasks for row in with_writes(task.text.row, task.states)]
        ids = pad_sequence(rows, batch_first=True)  # (all states, T)
        lengths = [len(row) for row in rows]
        allowed = None
        if min(lengths) < max(lengths):
            allowed = torch.arange(max(lengths), device=ids.device) < torch.tensor(lengths, device=ids.device)[:, None]
        asked = [positions for task in tasks for positions in task.asked]
        at = torch.tensor([(row, position) for row, some in enumerate(asked) for position in some], device=ids.device)
        return self.model.logits(ids, allowed, (at[:, 0], at[:, 1]))


@dataclass(frozen=True)
class Kept:
    """What one pass sees of the kept keys and values; Hugging Face's attention layers call `update`. A full pass makes
    those of its texts anew and looks at its own; any other looks at the kept ones, then at its own."""

    buffer: torch.Tensor  # (2 * layers, rows, capacity, H, E)
    slots: torch.Tensor  # (B,) the texts' rows
    longest: int  # T
    full: bool

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """New positions (B, H, Q, E) of one layer; returns all that a query may look at, (B, H, S, E)."""
        if self.full:
            for index, new in ((2 * layer, keys), (2 * layer + 1, values)):
                self.buffer[index, self.slots, : self.longest] = new[:, :, : self.longest].transpose(1, 2)
            return keys, values
        kept = (self.buffer[index, self.slots, : self.longest].transpose(1, 2) for index in (2 * layer, 2 * layer + 1))
        return torch.cat([next(kept), keys], 2), torch.cat([next(kept), values], 2)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0 if self.full else self.longest


class DualCache:
    """Keys and values of each text's last full pass; its states' blocks lie side by side behind them, each of which
    sees what is kept outside the block, and itself. A round that begins with a full step runs the whole row and the
    blocks of its other states in the same pass: they see in every layer what the full row has just put there."""

    def __init__(self, model: MaskedModel, options: EngineConfig, rows: int, capacity: int) -> None:
        self.model, self.options = model, options
        self.width = options.block_length + int(model.shifted)  # K: a shifted block's outputs begin one position before
        self.buffer = model.cache(rows, capacity)

    def plan(self, text: MaskedSequence) -> Plan:
        """No state reaches the next full step."""
        length, refresh = self.options.block_length, self.options.refresh
        open_ = text.plan(length, 0).open(frozenset())
        text.full = len(open_) == length or text.since >= refresh
        if text.full:
            text.since = 0
        return text.plan(length, min(LONGEST, len(open_) - 1, refresh - text.since - 1))

    def asked(self, text: MaskedSequence, plan: Plan, states: Sequence[State]) -> list[list[int]]:
        """The masks of the block; of the text as it is those of the next block too, where a full step computes them."""
        window = plan.open(frozenset())
        following = plan.block(window[0]) + 1
        ahead = [position for position in plan.masked if text.full and plan.block(position) == following]
        return [window + ahead, *([window] * (len(states) - 1))]

    def groups(self, tasks: Sequence[Task]) -> list[list[Task]]:
        """Full steps share a pass, and the others: a few blocks padded to whole rows would cost what they save."""
        both = [[task for task in tasks if task.text.full], [task for task in tasks if not task.text.full]]
        return [group for group in both if group]

    def logits(self, tasks: Sequence[Task]) -> torch.Tensor:
        """Logits (Q, V) of everything asked for: task by task, state by state, in the order of the positions."""
        full, width, device = tasks[0].text.full, self.width, self.model.device
        begins = [self._begin(task) for task in tasks]
        apart = [task.states[1:] if full else task.states for task in tasks]  # whose blocks lie behind the rows
        rows = pad_sequence([task.text.row for task in tasks], batch_first=True)  # (B, T)
        blocks = pad_sequence(
            [
                with_writes(task.text.row, states)[:, begin : begin + width].flatten()
                for task, states, begin in zip(tasks, apart, begins, strict=True)
            ],
            batch_first=True,
        )  # (B, N * K)
        longest, first = rows.shape[1], torch.tensor(begins, device=device)[:, None]  # (B, 1)
        places = first + torch.arange(width, device=device).repeat(blocks.shape[1] // width)
        mask = self._mask([len(task.text.row) for task in tasks], first, longest, blocks.shape[1], full)
        if full:
            blocks = torch.cat([rows, blocks], 1)
            places = torch.cat([torch.arange(longest, device=device).expand(len(tasks), -1), places], 1)
        slots = torch.tensor([task.text.slot for task in tasks], device=device)
        kept = Kept(self.buffer, slots, longest, full)
        hidden = self.model.hidden(blocks, places, mask, kept)  # (B, Q, D)

        shift, at = int(self.model.shifted), []
        for row, (task, begin) in enumerate(zip(tasks, begins, strict=True)):
            for state, positions in enumerate(task.asked):
                column = longest + (state - 1) * width - begin if full else state * width - begin
                column = 0 if full and state == 0 else column
                at += [(row, column + position - shift) for position in positions]
        row, column = torch.tensor(at, device=device).T
        return self.model.head(hidden[row, column])

    def _begin(self, task: Task) -> int:
        """Where the block's computed positions begin."""
        block = task.plan.block(task.asked[0][0])
        return task.plan.start + (block + 1) * task.plan.block_length - self.width

    def _mask(self, lengths: Sequence[int], first: torch.Tensor, longest: int, apart: int, full: bool) -> torch.Tensor:
        """Additive (B, 1, Q, S). Keys are the texts' rows, then `apart` positions of blocks; queries are all of them,
        or the blocks' alone."""
        key = torch.arange(longest + apart, device=first.device)  # (S,)
        row = key < longest
        known = row & (key < torch.tensor(lengths, device=first.device)[:, None])  # (B, S)
        outside = known & ((key < first) | (key >= first + self.width))
        block = torch.where(row, -1, (key - longest) // self.width)
        query = block if full else block[longest:]  # (Q,)
        own = block == query[:, None]  # (Q, S)
        seen = torch.where((query < 0)[:, None], known[:, None], outside[:, None] | own & ~row)  # (B, Q, S)
        return additive(seen[:, None], self.model.dtype)
