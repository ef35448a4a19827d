"""What an engine keeps on the device of the texts that are written, a row each; and of prompts that
enter.

B rows, C positions, F features of a position, D hidden size.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch

from infer.drafters.base import Drafter
from infer.engine.choices import Accepted
from infer.engine.prefixes import BLOCK, Part
from infer.engine.sequence import Sequence
from infer.targets.target import Features, Target, pad_ids
from infer.trees.tree import DraftTree

MAX_PENDING_ROUNDS = 32  # rounds that draft nothing after which the drafter is given their features


@dataclass
class Committed:
    """Newly committed positions, for the drafter."""

    context: torch.Tensor  # (B, C, F) features
    tokens: torch.Tensor  # (B, C)
    lengths_on_device: torch.Tensor  # (B,) how many of them are real in every row
    lengths: list[int] | None = None  # the same on the host; None until it knows them


class Memory:
    """Keys and values of target and drafter, and the bonus tokens; rows in use are the first ones.
    A row holds `capacity` positions, and trees of so many nodes behind them. `drafter` is None
    where nothing is drafted; what it has is kept `whole` where texts to come begin with it."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None,
        rows: int,
        capacity: int,
        nodes: int,
        whole: bool,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.layers = () if drafter is None else drafter.layer_ids
        self.cache = target.cache(rows, capacity + nodes + 1)
        # forced trees commit more than a block, in a window that all rows share
        self.state = None if drafter is None else drafter.state(rows, capacity + nodes, whole)
        self.bonuses = torch.zeros(rows, dtype=torch.long, device=target.device)
        self.pending: list[Committed] = []  # what the drafter has not seen yet

    @property
    def bonus(self) -> torch.Tensor:
        """The newest token of every row, (B,): chosen by the target, not yet run through it."""
        return self.bonuses[: self.cache.fixed_rows or len(self.cache.lengths)]

    @contextmanager
    def fixed(self, rows: int) -> Iterator[None]:
        """Inside, rounds have the shapes of `rows` rows, see `KVCache`."""
        with ExitStack() as stack:
            stack.enter_context(self.cache.fixed(rows))
            if self.state is not None:
                stack.enter_context(self.state.cache.fixed(rows))
            yield

    def commit(self, tree: DraftTree, features: Features, accepted: Accepted) -> None:
        """Keep the accepted nodes of a round in the cache, note them for the drafter, and begin the
        next round with the target's tokens behind them: on the device alone, `note_lengths` is to
        follow."""
        path = accepted.path
        self.cache.commit(path, accepted.lengths)
        if self.state is not None:
            context = features.context.gather(
                1, path[..., None].expand(-1, -1, features.context.shape[-1])
            )
            self._note(Committed(context, tree.tokens.gather(1, path), accepted.lengths))
        self.bonuses[: len(accepted.bonus)] = accepted.bonus  # last: roots may be views of it

    def note_lengths(self, lengths: list[int]) -> None:
        """Note on the host how many positions a round has committed of every row."""
        self.cache.note_lengths(lengths)
        if self.pending:
            self.pending[-1].lengths = lengths
        elif self.state is not None:
            self.state.cache.note_lengths(lengths)

    def _note(self, committed: Committed) -> None:
        """Note what the drafter has not seen; give it what is there before it becomes much. In
        rounds of fixed shapes it is given all at once, as the next round may have another shape."""
        pending = self.pending
        wide = pending and committed.tokens.shape[1] + pending[0].tokens.shape[1] > 2
        if wide or len(pending) == MAX_PENDING_ROUNDS:
            self.tell_drafter()
        self.pending.append(committed)
        if self.cache.fixed_rows:
            self.tell_drafter()

    def tell_drafter(self) -> None:
        """Give the drafter the features that it has not seen: of the last round, or of several that
        committed roots alone, at once."""
        parts = self.pending
        self.pending = []
        if len(parts) > 1:
            context = torch.cat([part.context for part in parts], 1)
            tokens = torch.cat([part.tokens for part in parts], 1)
            count = len(parts)
            parts = [
                Committed(
                    context, tokens, torch.full_like(tokens[:, 0], count), [count] * len(tokens)
                )
            ]
        for part in parts:
            self.drafter.update_context(
                self.target,
                part.context,
                part.tokens,
                part.lengths,
                self.state,
                part.lengths_on_device,
            )

    def keep(self, order: list[int]) -> None:
        """Make row i what row order[i] was, and give up the rows not named."""
        self.tell_drafter()
        self.cache.keep(order)
        if self.state is not None:
            self.state.keep(order)
        self.bonuses[: len(order)] = self.bonuses[
            torch.tensor(order, dtype=torch.long, device=self.bonuses.device)
        ]

    def read(self, row: int, start: int) -> tuple[Part, Part]:
        """Return copies of what target and drafter have of a BLOCK of a used row's positions."""
        drafter = [] if self.state is None else self.state.read(row, start, BLOCK)
        return self.cache.read(row, start, BLOCK), drafter


class Prefill:
    """Prompts that are being computed, in rows that are not in use yet."""

    def __init__(self, memory: Memory, texts: list[Sequence]) -> None:
        self.memory = memory
        self.texts = texts
        self.rows = ExitStack()  # closing it takes the rows into use
        self.cache = self.rows.enter_context(memory.cache.add(len(texts)))
        self.state = (
            None if memory.state is None else self.rows.enter_context(memory.state.add(len(texts)))
        )
        self.last: list[torch.Tensor | None] = [None] * len(
            texts
        )  # (D,) each: final states of the last tokens
        for row, text in enumerate(texts):
            self._restore(row, text)

    def _restore(self, row: int, text: Sequence) -> None:
        """Give a row what is kept of its prompt."""
        blocks = text.kept
        text.kept = []
        if not blocks:
            return
        self.cache.restore(row, [block.target for block in blocks])
        if self.state is not None:
            self.state.restore(row, text.known[: text.reused], [block.drafter for block in blocks])

    def run(self, done: int, width: int) -> int:
        """Run the next `width` positions of the prompts, behind the `done` ones, through target and
        drafter; return how many positions were computed, padding included."""
        memory = self.memory
        texts = self.texts
        begun = [text.reused + done for text in texts]
        parts = [
            text.known[start : start + width] for text, start in zip(texts, begun, strict=True)
        ]
        features = memory.target.extend(parts, self.cache, memory.layers)
        if self.state is not None:
            tokens = pad_ids(parts, features.context.device)
            counts = [len(part) for part in parts]
            memory.drafter.update_context(
                memory.target, features.context, tokens, counts, self.state
            )
        for row, (text, part) in enumerate(zip(texts, parts, strict=True)):
            if part and begun[row] + len(part) == len(text.known):
                self.last[row] = features.last[row, len(part) - 1]
        return len(parts) * max(map(len, parts))

    def finish(self) -> torch.Tensor:
        """Take the rows into use; return the final states of their last tokens, (B, 1, D)."""
        self.memory.tell_drafter()
        self.rows.close()
        return torch.stack(self.last)[:, None]
