"""The key/value cache of target and drafter: preallocated buffers, rows of their own lengths.

B rows in use, Q new positions, S capacity, H key/value heads, E head size, T length of packed rows.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap

import torch

Heads = tuple[int, int]  # how many, and their size


@dataclass
class LayerWindow:
    """One layer of a window, as views of the cache's buffer. Not frozen, since that takes longer to
    make."""

    buffer: torch.Tensor  # (2 * layers, rows * S, H * E) of all layers
    index: int
    slots: torch.Tensor  # (N,) int64, where new positions go
    keys: torch.Tensor  # (B, H, extent - first, E) that a query may look at
    values: torch.Tensor
    rows: int  # B
    width: int  # Q
    stops: torch.Tensor | None = None  # see `Window`

    def write(self, new: torch.Tensor) -> None:
        """Write the new positions: keys and values of all heads of L layers, this one and those
        behind it, (B Q, L, 2 H, E)."""
        count, layers = new.shape[:2]
        planes = self.buffer[2 * self.index : 2 * (self.index + layers)]
        planes.index_copy_(1, self.slots, new.view(count, 2 * layers, -1).transpose(0, 1))


class Stateful:
    """The part of a Hugging Face cache that recurrent layers call: they see no state of their own,
    and hand new inputs on as they are to the functions of its `states`
    (`infer.targets.recurrent.States`)."""

    def get_conv_state(self, *_: object, **__: object) -> None:
        return None

    get_recurrent_state = has_previous_state = get_conv_state

    def update_conv_state(self, inputs: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return inputs

    update_recurrent_state = update_conv_state


@dataclass
class Window(Stateful):
    """One forward pass's view of a cache: new positions are written to `slots`, and the places
    `first` to `extent` of every row are visible. Duck-typed as a Hugging Face cache: attention
    layers call `update(keys, values, layer)`.

    `slots` may have more rows than are in use; the extra rows are written and never read. Where
    rows have numbers of positions of their own, these come one row after the other.
    """

    cache: "KVCache"
    slots: torch.Tensor  # (B, Q) int64, flat: row * S + place
    extent: int
    first: int = 0  # no query sees what is before it
    real: torch.Tensor | None = (
        None  # (B, Q) bool, the positions that are there: a row's first; None: all
    )

    @cached_property
    def flat(self) -> torch.Tensor:
        """The slots of the N positions that are there, (N,)."""
        return self.slots.flatten() if self.real is None else self.slots[self.real]

    @cached_property
    def stops(self) -> torch.Tensor | None:
        """Behind which of the N each row ends, (B,) int64; None where all are there."""
        return None if self.real is None else self.real.sum(1).cumsum(0)

    @property
    def capacity(self) -> int:
        """S."""
        return self.cache.capacity

    @property
    def states(self) -> object:
        """The states of recurrent layers."""
        return self.cache.states

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write Q new positions (B, H, Q, E) of one layer; return all visible keys and values, (B,
        H, extent - first, E) each."""
        flat = self.slots.flatten()
        rows = len(self.slots)
        seen = []
        for (buffer, plane), new in zip(self.cache.places[layer], (keys, values), strict=True):
            memory = self.cache.buffers[buffer][plane]
            memory.index_copy_(0, flat, new.transpose(1, 2).flatten(2).flatten(0, 1))
            whole = memory[: rows * self.capacity].view(rows, self.capacity, new.shape[1], -1)
            seen.append(whole[:, self.first : self.extent].transpose(1, 2))
        return seen[0], seen[1]

    def layers(self) -> list[LayerWindow]:
        """Return the window of every layer, of a cache whose layers are alike."""
        rows = len(self.slots)
        buffer = self.cache.buffer
        seen = buffer[:, : rows * self.capacity].unflatten(1, (rows, self.capacity))[
            :, :, self.first : self.extent
        ]
        seen = (
            seen.unflatten(3, (self.cache.heads, -1)).transpose(2, 3).unbind(0)
        )  # (B, H, extent - first, E)
        pairs = enumerate(zip(seen[::2], seen[1::2], strict=True))
        known = (*self.slots.shape, self.stops)
        return [LayerWindow(buffer, i, self.flat, *pair, *known) for i, pair in pairs]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.extent - self.slots.shape[1]


@dataclass
class PackedLayer:
    """Keys and values of packed rows in one layer: nothing is there before them, and nothing
    stays."""

    rows: int  # B
    width: int  # T
    keys: torch.Tensor | None = None  # (B, H, T, E)
    values: torch.Tensor | None = None

    def write(self, new: torch.Tensor) -> None:
        """Take the keys and values of all heads of one layer, (B T, 1, 2 H, E)."""
        heads = new.squeeze(1).unflatten(0, (self.rows, -1)).transpose(1, 2)
        self.keys, self.values = heads.chunk(2, dim=1)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros; on the host in memory that is taken where it is first written to, not before,
    as long as the kernel maps any: an engine that comes back where memory was short takes what
    malloc has."""
    if device.type == "cpu" and 0 not in shape:
        size = torch.Size(shape).numel() * dtype.itemsize
        with suppress(OSError):
            return torch.frombuffer(mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS), dtype=dtype).view(
                shape
            )
    return torch.zeros(shape, dtype=dtype, device=device)


class KVCache:
    """Keys and values of all layers, written in place, in a buffer for every size of them; and the
    states of recurrent layers.

    A forward pass writes its Q new positions behind each row's committed length (`window`);
    `commit` then keeps some of them by moving the length on the device, and the others are
    overwritten later; `note_lengths` tells the host. Nothing is concatenated or cropped. `add`
    takes rows into use and `keep` gives rows up; the used ones are always the first. Inside `fixed`
    no shape depends on lengths or on how many rows are in use, so that a pass can be a CUDA graph.

    Where all layers slide, a row can forget what is beyond their window: what stays moves to its
    beginning, so that a place in the cache is a position less those `forgotten`.
    """

    def __init__(
        self,
        layers: dict[int, tuple[Heads, Heads]],
        rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        states: object | None = None,
        reach: int | None = None,
        widest: int | None = None,
    ) -> None:
        """`layers`: the heads of keys and of values of every layer that keeps any; `states`: those
        of recurrent layers (`infer.targets.recurrent.States`); `reach`: the last positions that a
        query may see, its own included, None: all; `widest`: rows forget where a pass of so many
        positions would not fit behind them, and no pass is wider; None: they forget nothing."""
        self.rows = rows
        self.capacity = capacity
        self.states = states
        self.reach = reach
        self.widest = widest
        widths: list[int] = []  # of every plane
        # by layer: buffer and plane of its keys and its values
        self.places: dict[int, list[tuple[int, int]]] = {}
        sizes = list(
            dict.fromkeys(count * size for pair in layers.values() for count, size in pair)
        )
        for layer, pair in layers.items():
            self.places[layer] = []
            for width in (count * size for count, size in pair):
                self.places[layer].append((sizes.index(width), widths.count(width)))
                widths.append(width)
        # of all keys and values, where they are alike
        self.heads = next(iter(layers.values()), ((0, 0),))[0][0]
        # (planes, rows * S, width): zeros, since a masked slot must still be finite
        self.buffers = [
            zeros((widths.count(width), rows * capacity, width), dtype, device) for width in sizes
        ]
        self.lengths: list[int] = []  # committed positions of the used rows, on the host
        # the same on the device, 0 for unused rows
        self.ends = torch.zeros(rows, dtype=torch.long, device=device)
        self.forgotten = torch.zeros_like(self.ends)
        self.live = torch.zeros_like(self.ends)  # 1 for used rows
        self.origins = torch.arange(rows, device=device) * capacity
        self.steps = torch.arange(capacity, device=device)
        self.fixed_rows = 0  # inside `fixed`: how many rows passes have

    @property
    def buffer(self) -> torch.Tensor:
        """The only buffer where all layers are alike, (2 * layers, rows * S, H * E): keys of layer
        i at 2i, values at 2i + 1."""
        return self.buffers[0]

    @property
    def even(self) -> bool:
        """Whether the host knows all rows to have the same length, so that all of a window was
        written."""
        return not self.fixed_rows and len(set(self.lengths)) == 1

    @contextmanager
    def fixed(self, rows: int) -> Iterator[None]:
        """Inside, passes have `rows` rows, of which the used ones are the first: the others are
        written behind their ends and never read."""
        self.fixed_rows = rows
        try:
            yield
        finally:
            self.fixed_rows = 0

    @contextmanager
    def add(self, count: int) -> Iterator["KVCache"]:
        """Give the last `count` rows as a cache of their own over the same memory, empty, to be
        filled. At the end they come into use as the next rows, and each moves there. Meanwhile the
        rows in use can be read and written, and given up, but no others added."""
        first = self.rows - count
        used = len(self.lengths)
        if used > first:
            raise ValueError(
                f"the cache has {self.rows} rows and {used} are in use: {count} more do not fit"
            )
        part = copy(self)
        part.rows = count
        part.lengths = [0] * count
        part.buffers = [buffer[:, first * self.capacity :] for buffer in self.buffers]
        part.states = None if self.states is None else self.states.from_row(first)
        part.ends, part.origins = self.ends[first:].zero_(), self.origins[:count]
        part.forgotten = self.forgotten[first:].zero_()
        yield part
        for index, length in enumerate(part.lengths):
            self._move(first + index, len(self.lengths), length)
            self.lengths.append(length)
        self.live[: len(self.lengths)] = 1

    def keep(self, order: list[int]) -> None:
        """Make row i what row order[i] was, and give up the rows not named. order[i] must be at
        least i."""
        for to, index in enumerate(order):
            self._move(index, to, self.lengths[index])
        self.ends[len(order) : len(self.lengths)] = 0
        self.live[len(order) :] = 0
        self.lengths = [self.lengths[index] for index in order]

    def _move(self, source: int, to: int, length: int) -> None:
        """Row `source` of so many positions becomes row `to`, and is empty."""
        if source != to:
            start = to * self.capacity
            begin = source * self.capacity
            for buffer in self.buffers:
                buffer[:, start : start + length] = buffer[:, begin : begin + length]
            if self.states is not None:
                self.states.move(source, to)
            for column in (self.ends, self.forgotten):
                column[to] = column[source]
                column[source] = 0

    def window(self, width: int, real: torch.Tensor | None = None) -> Window:
        """Return the window of the next `width` positions of every row, or of those that are
        `real`. Raises ValueError beyond the capacity."""
        if self.fixed_rows:
            rows = self.fixed_rows
            extent = self.capacity
            shortest = 0
        else:
            rows = len(self.lengths)
            extent = max(self.lengths) + width
            shortest = min(self.lengths)
        first = 0 if self.reach is None else max(0, shortest - self.reach + 1)
        if extent > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions a row, {extent} are needed"
            )
        return Window(
            self, self.origins[:rows, None] + self.next_places(rows, width), extent, first, real
        )

    def ends_of(self, rows: int) -> torch.Tensor:
        """Return the lengths of the first `rows` rows on the device, (rows,), 0 of those that are
        not in use."""
        return self.ends[:rows] * self.live[:rows] if self.fixed_rows else self.ends[:rows]

    def next_places(self, rows: int, width: int) -> torch.Tensor:
        """Return where in a row the next `width` tokens of the first `rows` rows go, (rows,
        width)."""
        return self.ends[:rows, None] + self.steps[:width]

    def positions(self, rows: int, width: int) -> torch.Tensor:
        """Return their absolute positions, (rows, width)."""
        places = self.next_places(rows, width)
        return places if self.widest is None else places + self.forgotten[:rows, None]

    def read(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of `count` positions of a used row, (n, count, width) of every buffer."""
        first = row * self.capacity + start
        return [buffer[:, first : first + count].clone() for buffer in self.buffers]

    def restore(self, row: int, parts: list[list[torch.Tensor]]) -> None:
        """Write positions that were read, part by part, behind an empty row's beginning, and commit
        them."""
        first = row * self.capacity
        length = 0
        for part in parts:
            count = part[0].shape[1] if part else 0
            for buffer, kept in zip(self.buffers, part, strict=True):
                buffer[:, first + length : first + length + count] = kept
            length += count
        self.lengths[row] = length
        self.ends[row] = length

    def advance(self, counts: list[int] | None, on_device: torch.Tensor | None = None) -> None:
        """Commit `counts[b]` more positions of row b. `on_device` (B,) is the same on the device,
        where it exists; `counts` is None where the host does not know it yet: `note_lengths` is to
        follow."""
        if on_device is None:
            on_device = torch.tensor(counts, device=self.ends.device)
        if self.fixed_rows:
            on_device = on_device * self.live[: len(on_device)]
        self.ends[: len(on_device)] += on_device
        if counts is not None:
            self.note_lengths(counts)

    def note_lengths(self, counts: list[int]) -> None:
        """Note on the host that `counts[b]` more positions of row b were committed on the
        device."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if self.widest is not None:
            self._forget()

    def _forget(self) -> None:
        """Move the last `reach` positions of a row to its beginning where the next pass might not
        fit."""
        for row, length in enumerate(self.lengths):
            if length + self.widest > self.capacity:
                begin = row * self.capacity
                gone = length - self.reach
                for buffer in self.buffers:
                    kept = buffer[:, begin + gone : begin + length].clone()  # the two may overlap
                    buffer[:, begin : begin + self.reach] = kept
                self.lengths[row] = self.reach
                self.ends[row] -= gone
                self.forgotten[row] += gone

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Move the written positions `path` (B, W), offsets behind each row's length, to the row's
        end in this order, and commit the first `counts[b]` (B,) of them; the rest of `path` is
        padding. `note_lengths` is to follow when the host knows the counts."""
        if self.states is not None:
            self.states.commit(path, counts)
        rows, width = path.shape
        to = self.origins[:rows, None] + self.next_places(rows, width)
        source = to[:, :1] + path
        # a root is where it belongs; to ask whether the others are costs more than the copy where
        # the device is not the host, and a graph cannot ask
        in_place = width == 1 or (
            path.device.type == "cpu" and not self.fixed_rows and torch.equal(source, to)
        )
        if not in_place:
            for buffer in self.buffers:
                buffer.index_copy_(1, to.flatten(), buffer.index_select(1, source.flatten()))
        self.advance(None, counts)
