"""The KV cache of target and drafter. Its buffers are allocated once, and every batch row has its
own length.

In shapes, B is the number of batch rows in use, and num_heads the number of key/value heads of a
layer.

A buffer has the shape (planes, slots, num_heads * head_size). A plane contains the keys or the
values of one layer. A slot is one position of one batch row: slot = row * capacity + index within
the row.
"""

from collections.abc import Generator
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Protocol

import torch

HeadShape = tuple[int, int]  # (number of key or value heads, head size)


class RecurrentStateStore(Protocol):
    """The methods that a KV cache calls on the states of recurrent layers.
    `infer.targets.recurrent.RecurrentStates` implements them."""

    def clear_and_take_rows_from(self, first_row: int) -> "RecurrentStateStore": ...

    def move_row(self, source: int, destination: int) -> None: ...

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None: ...


@dataclass
class LayerCacheView:
    """One layer of a `CacheView`: what a forward pass reads and writes in this layer. Its tensors
    are views of the cache's buffer. The dataclass is not frozen, because creating instances of
    frozen dataclasses is slower."""

    # (2 * num_layers, num_rows * capacity, num_heads * head_size): keys and values of all layers
    buffer: torch.Tensor
    layer_index: int
    # (num_new_positions,) int64: where the new positions are written, as indices on the second axis
    # of `buffer`
    slot_mapping: torch.Tensor
    # (B, num_heads, visible_end - visible_start, head_size): keys that queries may attend to
    keys: torch.Tensor
    values: torch.Tensor  # values, same shape as `keys`
    batch_size: int  # number of batch rows
    query_length: int  # number of new positions per batch row
    # where each batch row ends, see `CacheView.cu_seqlens`
    cu_seqlens: torch.Tensor | None = None

    def write(self, heads: torch.Tensor) -> None:
        """Write the keys and values of the new positions to the cache, for num_layers consecutive
        layers, of which this layer is the first.

        heads: (num_new_positions, num_layers, 2 * num_heads, head_size); index 0 of the second axis
            is this layer; key heads come before value heads
        """
        count, layers = heads.shape[:2]
        planes = self.buffer[2 * self.layer_index : 2 * (self.layer_index + layers)]
        planes.index_copy_(1, self.slot_mapping, heads.view(count, 2 * layers, -1).transpose(0, 1))


class RecurrentCacheStub:
    """The cache methods that Hugging Face's recurrent layers call.

    The methods do nothing: they report that there is no earlier state, and return their inputs
    unchanged. `infer.targets.recurrent.RecurrentStates` stores the states instead.
    """

    def get_conv_state(self, *_: object, **__: object) -> None:
        return None

    get_recurrent_state = has_previous_state = get_conv_state

    def update_conv_state(self, inputs: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return inputs

    update_recurrent_state = update_conv_state


@dataclass
class CacheView(RecurrentCacheStub):
    """The part of a KV cache that one forward pass reads and writes.

    The keys and values of new positions are written at `slot_mapping`. Queries can attend to the
    positions from `visible_start` to `visible_end` of every batch row. Hugging Face's attention
    layers use the view in place of their own cache: they call `update(keys, values, layer)`.

    `slot_mapping` may have more batch rows than are in use; what is written to unused rows is never
    read.
    """

    cache: "KVCache"
    # (B, query_length) int64: the slot of each new position, which is row * capacity + index within
    # the row
    slot_mapping: torch.Tensor
    visible_end: int
    visible_start: int = 0
    # (B, query_length) bool: false on padding, which comes last in every row. None if there is no
    # padding.
    valid_mask: torch.Tensor | None = None

    @cached_property
    def flat_slot_mapping(self) -> torch.Tensor:
        """Return the slots at which the new positions are written, (num_new_positions,) int64. The
        batch rows follow each other, without padding."""
        if self.valid_mask is None:
            return self.slot_mapping.flatten()
        return self.slot_mapping[self.valid_mask]

    @cached_property
    def cu_seqlens(self) -> torch.Tensor | None:
        """Return where each batch row ends if the new positions of all rows are concatenated
        without padding, (B,) int64. Unlike in FlashAttention, there is no leading 0. Return None if
        there is no padding."""
        if self.valid_mask is None:
            return None
        return self.valid_mask.sum(1).cumsum(0)

    @property
    def capacity(self) -> int:
        """Return the number of positions per batch row."""
        return self.cache.capacity

    @property
    def recurrent_states(self) -> RecurrentStateStore | None:
        """Return the states of recurrent layers; None if the model has no recurrent layers."""
        return self.cache.recurrent_states

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of the new positions in one layer. Return the keys and the
        values of all visible positions.

        keys, values: (B, num_heads, query_length, head_size) each

        The results are (B, num_heads, visible_end - visible_start, head_size) each.
        """
        slots = self.slot_mapping.flatten()
        rows = len(self.slot_mapping)
        visible = []
        planes = self.cache.layer_planes[layer]
        for (buffer_index, plane_index), new in zip(planes, (keys, values), strict=True):
            plane = self.cache.buffers[buffer_index][plane_index]
            plane.index_copy_(0, slots, new.transpose(1, 2).flatten(2).flatten(0, 1))
            used_slots = plane[: rows * self.capacity]
            row_states = used_slots.view(rows, self.capacity, new.shape[1], -1)
            visible.append(row_states[:, self.visible_start : self.visible_end].transpose(1, 2))
        return visible[0], visible[1]

    def layer_views(self) -> list[LayerCacheView]:
        """Return one `LayerCacheView` per layer. All layers must have the same number of heads and
        the same head size."""
        batch_size, query_length = self.slot_mapping.shape
        buffer = self.cache.buffer
        used_slots = buffer[:, : batch_size * self.capacity]
        row_states = used_slots.unflatten(1, (batch_size, self.capacity))
        visible = row_states[:, :, self.visible_start : self.visible_end]
        heads = visible.unflatten(3, (self.cache.num_key_heads, -1)).transpose(2, 3)
        planes = heads.unbind(0)  # each (B, num_heads, visible_end - visible_start, head_size)
        slots = self.flat_slot_mapping
        cu_seqlens = self.cu_seqlens
        return [
            LayerCacheView(buffer, layer, slots, keys, values, batch_size, query_length, cu_seqlens)
            for layer, (keys, values) in enumerate(zip(planes[::2], planes[1::2], strict=True))
        ]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.visible_end - self.slot_mapping.shape[1]


@dataclass
class PackedLayerView:
    """The keys and values of packed sequences (training rows that contain several documents) in one
    layer. It stands in for a `LayerCacheView` if there are no cached positions, and is dropped
    after the forward pass."""

    batch_size: int  # number of packed sequences
    query_length: int  # number of positions of each packed sequence
    keys: torch.Tensor | None = None  # (B, num_heads, query_length, head_size)
    values: torch.Tensor | None = None

    def write(self, heads: torch.Tensor) -> None:
        """Store the keys and values of one layer.

        heads: (B * query_length, 1, 2 * num_heads, head_size); key heads come before value heads
        """
        row_heads = heads.squeeze(1).unflatten(0, (self.batch_size, -1)).transpose(1, 2)
        self.keys, self.values = row_heads.chunk(2, dim=1)


def allocate_zeros(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """Return a tensor of zeros.

    On the CPU, its memory is an anonymous memory map, so that physical memory is taken only for
    pages that are written to. If the operating system refuses the map, PyTorch allocates the
    tensor.
    """
    if device.type == "cpu" and 0 not in shape:
        size = torch.Size(shape).numel() * dtype.itemsize
        with suppress(OSError):
            memory_map = mmap(-1, size, MAP_PRIVATE | MAP_ANONYMOUS)
            return torch.frombuffer(memory_map, dtype=dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)


class KVCache:
    """The keys and values of all layers, written in place, and the states of recurrent layers.
    Keys and values with the same product num_heads * head_size are stored in the same buffer, even
    if they belong to different layers.

    A forward pass writes its new positions after the committed positions of each batch row
    (`make_view`). `commit` then keeps some of the new positions: it moves them directly after the
    committed positions, and increases the row's length on the device. Later passes overwrite the
    new positions that are not kept. `update_host_lengths` increases the lengths on the host by the
    same numbers.

    `add_rows` takes batch rows into use and `keep_rows` releases batch rows. The used rows are
    always the first ones. Inside `fix_batch_size`, no tensor shape depends on the lengths or on the
    number of used rows, so that a forward pass can be recorded as a CUDA graph.

    If all layers have a sliding window, positions before the window can be evicted. The remaining
    positions of the row then move to its beginning, so the absolute position of a token is its
    index in the row plus the row's entry of `evicted_counts`.
    """

    def __init__(
        self,
        layer_heads: dict[int, tuple[HeadShape, HeadShape]],
        num_rows: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device,
        recurrent_states: RecurrentStateStore | None = None,
        sliding_window: int | None = None,
        max_query_length: int | None = None,
    ) -> None:
        """Allocate a cache for `num_rows` batch rows of `capacity` positions each.

        layer_heads: keys are layer indices, values are (number of heads, head size) of the layer's
            keys and of its values. A layer without an entry stores neither.
        recurrent_states: the states of recurrent layers, if there are any
        sliding_window: number of positions that a query can attend to, its own included; None means
            all positions
        max_query_length: largest number of positions of one forward pass. Old positions of a row
            are evicted as soon as this many new positions would not fit. None: no eviction.
        """
        self.num_rows = num_rows
        self.capacity = capacity
        self.recurrent_states = recurrent_states
        self.sliding_window = sliding_window
        self.max_query_length = max_query_length

        # For each layer index: where the layer's keys are stored and where its values are stored,
        # each as (index in `buffers`, index in the buffer's first axis).
        self.layer_planes: dict[int, list[tuple[int, int]]] = {}
        plane_widths: list[int] = []
        all_widths = [count * size for pair in layer_heads.values() for count, size in pair]
        buffer_widths = list(dict.fromkeys(all_widths))
        for layer, pair in layer_heads.items():
            self.layer_planes[layer] = []
            for count, size in pair:
                width = count * size
                plane = (buffer_widths.index(width), plane_widths.count(width))
                self.layer_planes[layer].append(plane)
                plane_widths.append(width)
        # number of key heads of the first layer; used only if it is the same in all layers
        self.num_key_heads = next(iter(layer_heads.values()), ((0, 0),))[0][0]
        # Each buffer has the shape (planes, num_rows * capacity, num_heads * head_size). Buffers
        # start as zeros, because masked keys must be finite.
        self.buffers = [
            allocate_zeros((plane_widths.count(width), num_rows * capacity, width), dtype, device)
            for width in buffer_widths
        ]

        self.lengths: list[int] = []  # on the host: number of committed positions of each used row
        # `lengths` on the device, 0 for unused rows
        self.device_lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.evicted_counts = torch.zeros_like(self.device_lengths)
        # on the device: 1 for used rows, 0 for unused rows
        self.used_row_mask = torch.zeros_like(self.device_lengths)
        # for every batch row, the index of its first position on the second axis of a buffer
        self.first_slots = torch.arange(num_rows, device=device) * capacity
        self.position_offsets = torch.arange(capacity, device=device)
        # inside `fix_batch_size`, the number of batch rows of every forward pass; otherwise 0
        self.padded_batch_size = 0

    @property
    def buffer(self) -> torch.Tensor:
        """Return the only buffer of a cache in which the keys and values of all layers have the
        same number of heads and the same head size.

        Its shape is (2 * num_layers, num_rows * capacity, num_heads * head_size). The keys of layer
        i are at index 2 * i, and its values at index 2 * i + 1.
        """
        return self.buffers[0]

    @property
    def has_uniform_lengths(self) -> bool:
        """Return whether the host knows that all used rows have the same length. If so, a
        `CacheView` contains only positions that have been written."""
        return not self.padded_batch_size and len(set(self.lengths)) == 1

    @contextmanager
    def fix_batch_size(self, batch_size: int) -> Generator[None]:
        """Give every forward pass inside this context the tensor shapes for exactly `batch_size`
        batch rows, regardless of how many are in use. A pass then also writes to unused rows, but
        what it writes there is never read."""
        self.padded_batch_size = batch_size
        try:
            yield
        finally:
            self.padded_batch_size = 0

    @contextmanager
    def add_rows(self, count: int) -> Generator["KVCache"]:
        """Yield the last `count` batch rows as an empty cache over the same memory, to be filled
        inside this context.

        When the context ends, the new rows are moved behind the used rows and become used rows
        themselves. Inside the context, the used rows of this cache can be read, written and
        released, but no further rows can be added. Raises ValueError if fewer than `count` rows are
        unused.
        """
        first_row = self.num_rows - count
        used = len(self.lengths)
        if used > first_row:
            raise ValueError(
                f"the cache has {self.num_rows} rows and {used} are in use, so {count} more do "
                "not fit; release rows first (keep_rows)"
            )
        new_rows = copy(self)
        new_rows.num_rows = count
        new_rows.lengths = [0] * count
        new_rows.buffers = [buffer[:, first_row * self.capacity :] for buffer in self.buffers]
        if self.recurrent_states is not None:
            new_rows.recurrent_states = self.recurrent_states.clear_and_take_rows_from(first_row)
        new_rows.device_lengths = self.device_lengths[first_row:].zero_()
        new_rows.first_slots = self.first_slots[:count]
        new_rows.evicted_counts = self.evicted_counts[first_row:].zero_()
        yield new_rows

        for index, length in enumerate(new_rows.lengths):
            self._move_row(first_row + index, len(self.lengths), length)
            self.lengths.append(length)
        self.used_row_mask[: len(self.lengths)] = 1

    def keep_rows(self, order: list[int]) -> None:
        """Move batch row order[i] to row i for every i, and release the rows that are not in
        `order`. Each order[i] must be at least i."""
        for destination, source in enumerate(order):
            self._move_row(source, destination, self.lengths[source])
        self.device_lengths[len(order) : len(self.lengths)] = 0
        self.used_row_mask[len(order) :] = 0
        self.lengths = [self.lengths[source] for source in order]

    def _move_row(self, source: int, destination: int, length: int) -> None:
        """Move the first `length` positions of row `source` to row `destination`, and set the
        length of row `source` to 0."""
        if source == destination:
            return
        source_start = source * self.capacity
        destination_start = destination * self.capacity
        for buffer in self.buffers:
            moved_states = buffer[:, source_start : source_start + length]
            buffer[:, destination_start : destination_start + length] = moved_states
        if self.recurrent_states is not None:
            self.recurrent_states.move_row(source, destination)
        for column in (self.device_lengths, self.evicted_counts):
            column[destination] = column[source]
            column[source] = 0

    def make_view(self, query_length: int, valid_mask: torch.Tensor | None = None) -> CacheView:
        """Return the view of the cache for a forward pass over the next `query_length` positions of
        every batch row. Raises ValueError if the positions do not fit into the cache.

        valid_mask: (B, query_length) bool, false on padding; None means that there is no padding
        """
        if self.padded_batch_size:
            batch_size = self.padded_batch_size
            visible_end = self.capacity
            min_length = 0
        else:
            batch_size = len(self.lengths)
            visible_end = max(self.lengths) + query_length
            min_length = min(self.lengths)
        visible_start = 0
        if self.sliding_window is not None:
            visible_start = max(0, min_length - self.sliding_window + 1)
        if visible_end > self.capacity:
            raise ValueError(
                f"the cache holds {self.capacity} positions per row, but {visible_end} are needed; "
                "allocate a larger cache"
            )
        row_indices = self.next_indices(batch_size, query_length)
        slot_mapping = self.first_slots[:batch_size, None] + row_indices
        return CacheView(self, slot_mapping, visible_end, visible_start, valid_mask)

    def get_device_lengths(self, num_rows: int) -> torch.Tensor:
        """Return the lengths of the first `num_rows` batch rows as a tensor (num_rows,) int64 on
        the device, with 0 for unused rows."""
        lengths = self.device_lengths[:num_rows]
        if self.padded_batch_size:
            return lengths * self.used_row_mask[:num_rows]
        return lengths

    def next_indices(self, num_rows: int, query_length: int) -> torch.Tensor:
        """Return the indices, within their row, of the next `query_length` tokens of each of the
        first `num_rows` batch rows, (num_rows, query_length) int64."""
        return self.device_lengths[:num_rows, None] + self.position_offsets[:query_length]

    def next_positions(self, num_rows: int, query_length: int) -> torch.Tensor:
        """Return the absolute positions of the next `query_length` tokens of each of the first
        `num_rows` batch rows, (num_rows, query_length) int64. Evicted positions are counted."""
        indices = self.next_indices(num_rows, query_length)
        if self.max_query_length is None:
            return indices
        return indices + self.evicted_counts[:num_rows, None]

    def copy_keys_values(self, row: int, start: int, count: int) -> list[torch.Tensor]:
        """Return copies of the keys and values at `count` positions of a used row, beginning at
        index `start`.

        The list has one tensor (planes, count, number of heads * head size) for each buffer. A
        plane is the keys or the values of one layer.
        """
        first_slot = row * self.capacity + start
        return [buffer[:, first_slot : first_slot + count].clone() for buffer in self.buffers]

    def restore_keys_values(self, row: int, blocks: list[list[torch.Tensor]]) -> None:
        """Write keys and values to the beginning of an empty row, and commit these positions.
        `blocks` are results of `copy_keys_values` for consecutive positions."""
        first_slot = row * self.capacity
        length = 0
        for segment in blocks:
            count = segment[0].shape[1] if segment else 0
            start = first_slot + length
            for buffer, states in zip(self.buffers, segment, strict=True):
                buffer[:, start : start + count] = states
            length += count
        self.lengths[row] = length
        self.device_lengths[row] = length

    def advance_lengths(
        self, counts: list[int] | None, device_counts: torch.Tensor | None = None
    ) -> None:
        """Commit counts[b] more positions of every batch row b.

        counts: numbers of positions on the host. None means that the host does not know them yet;
            the caller must then call `update_host_lengths` later.
        device_counts: (B,) int64, the same numbers on the device; None means that they are copied
            from `counts`
        """
        if device_counts is None:
            device_counts = torch.tensor(counts, device=self.device_lengths.device)
        if self.padded_batch_size:
            device_counts = device_counts * self.used_row_mask[: len(device_counts)]
        self.device_lengths[: len(device_counts)] += device_counts
        if counts is not None:
            self.update_host_lengths(counts)

    def update_host_lengths(self, counts: list[int]) -> None:
        """Increase the length of every batch row b on the host by counts[b]. On the device,
        `commit` has already increased it by this number."""
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        if self.max_query_length is not None:
            self._evict_old_positions(self.max_query_length)

    def _evict_old_positions(self, max_query_length: int) -> None:
        """Keep only the last `sliding_window` positions of every row in which `max_query_length`
        more positions would not fit, and move them to the beginning of the row."""
        window = self.sliding_window
        assert window is not None
        for row, length in enumerate(self.lengths):
            if length + max_query_length <= self.capacity:
                continue
            start = row * self.capacity
            evicted = length - window
            for buffer in self.buffers:
                # Copy first, because source and destination may overlap.
                recent_states = buffer[:, start + evicted : start + length].clone()
                buffer[:, start : start + window] = recent_states
            self.lengths[row] = window
            self.device_lengths[row] -= evicted
            self.evicted_counts[row] += evicted

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the accepted nodes of a verified draft tree: move their keys and values directly
        after the committed positions of their batch row, and increase the row's length on the
        device. The caller must call `update_host_lengths` when the host knows the counts.

        path: (B, path_length) int64, indices of the accepted nodes from the root down, then
            padding. The keys and values of node i are i positions after the first position that is
            not committed.
        counts: (B,) int64, number of accepted nodes of each row
        """
        if self.recurrent_states is not None:
            self.recurrent_states.commit(path, counts)
        rows, width = path.shape
        destination = self.first_slots[:rows, None] + self.next_indices(rows, width)
        source = destination[:, :1] + path
        # The keys and values of the root are already at the right position. On the CPU, nothing is
        # copied if those of all other nodes are at the right positions too. On a GPU this test
        # costs more than the copy, and a CUDA graph cannot branch.
        in_place = width == 1
        if not in_place and path.device.type == "cpu" and not self.padded_batch_size:
            in_place = torch.equal(source, destination)
        if not in_place:
            for buffer in self.buffers:
                accepted_states = buffer.index_select(1, source.flatten())
                buffer.index_copy_(1, destination.flatten(), accepted_states)
        self.advance_lengths(None, counts)
