"""The key/value cache of target and drafter: one preallocated buffer, rows of their own lengths.

B rows in use, Q new positions, S capacity, H key/value heads, E head size.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class KVCache:
    """Keys and values of all layers, written in place.

    A forward pass writes its Q new positions behind each row's committed length; `commit` then keeps some of
    them, and everything else is dropped by not moving the length. Nothing is concatenated or cropped. Rows come and go
    (`add`, `keep`), the used ones are always the first. Duck-typed as a Hugging Face cache: attention layers call
    `update(keys, values, layer)`.
    """

    def __init__(
        self, layers: int, rows: int, capacity: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.heads, self.head_dim = heads, head_dim
        # keys of layer i at 2i, values at 2i + 1; zeros, since a masked slot must still be finite
        self.buffer = torch.zeros(2 * layers, rows * capacity, heads * head_dim, dtype=dtype, device=device)
        self.lengths: list[int] = []  # committed positions of the used rows, on the host

    @property
    def extent(self) -> int:
        """The longest row's committed length."""
        return max(self.lengths)

    @contextmanager
    def add(self, count: int) -> Iterator["KVCache"]:
        """Takes the next `count` rows into use, and gives them as a cache of their own over the same memory, to be
        filled; what is committed to it counts here too."""
        first = len(self.lengths)
        if first + count > self.rows:
            raise ValueError(f"the cache has {self.rows} rows and {first} are in use: {count} more do not fit")
        part = object.__new__(KVCache)
        part.rows, part.capacity, part.heads, part.head_dim = count, self.capacity, self.heads, self.head_dim
        part.buffer = self.buffer[:, first * self.capacity : (first + count) * self.capacity]
        part.lengths = [0] * count
        yield part
        self.lengths += part.lengths

    def keep(self, order: list[int]) -> None:
        """Row i becomes what row order[i] was; the others are given up. Each moves to its own place or a lower one."""
        for to, index in enumerate(order):
            if to != index:
                length = self.lengths[index]
                target, source = to * self.capacity, index * self.capacity
                self.buffer[:, target : target + length] = self.buffer[:, source : source + length]
        self.lengths = [self.lengths[index] for index in order]

    def slots(self, width: int) -> torch.Tensor:
        """Flat buffer slots of the next `width` positions of every row: (B, width) int64."""
        if self.extent + width > self.capacity:
            raise ValueError(f"the cache holds {self.capacity} positions a row, {self.extent + width} are needed")
        starts = [row * self.capacity + length for row, length in enumerate(self.lengths)]
        first = torch.tensor(starts, device=self.buffer.device)[:, None]
        return first + torch.arange(width, device=self.buffer.device)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
        """Puts keys and values (B, H, Q, E) of one layer into `slots` (B, Q)."""
        flat = slots.flatten()
        self.buffer[2 * layer].index_copy_(0, flat, keys.transpose(1, 2).flatten(2).flatten(0, 1))
        self.buffer[2 * layer + 1].index_copy_(0, flat, values.transpose(1, 2).flatten(2).flatten(0, 1))

    def view(self, layer: int, extent: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer, the first `extent` positions of every row: (B, H, extent, E) each."""
        keys, values = (
            self.buffer[i].view(self.rows, self.capacity, self.heads, self.head_dim) for i in (2 * layer, 2 * layer + 1)
        )
        used = len(self.lengths)
        return keys[:used, :extent].transpose(1, 2), values[:used, :extent].transpose(1, 2)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Hugging Face's call: writes Q new positions (B, H, Q, E), returns all that a query may look at."""
        width = keys.shape[2]
        if layer == 0:  # the same slots serve every layer of a forward pass
            self._slots = self.slots(width)
        self.write(layer, keys, values, self._slots)
        return self.view(layer, self.extent + width)

    def get_seq_length(self, layer: int = 0) -> int:
        return self.extent

    def commit(self, path: torch.Tensor, counts: list[int]) -> None:
        """Keeps the written positions `path` (B, W) (offsets behind each row's length, padded at will) as the next
        ones in this order, of which `counts[b]` count."""
        target = self.slots(path.shape[1])  # (B, W)
        source = target[:, :1] + path
        in_place = self.buffer.device.type == "cpu" and torch.equal(source, target)  # elsewhere asking costs more
        if not in_place:
            self.buffer.index_copy_(1, target.flatten(), self.buffer.index_select(1, source.flatten()))
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
