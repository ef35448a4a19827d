"""The cache of targets whose layers differ: keys and values of several sizes, and states of recurrent layers.

B rows in use, Q new positions, S capacity.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from infer.attention.kv_cache import KVCache
from infer.targets.recurrent import Lineage, Stateful, States, StateShape

Heads = tuple[int, int]  # how many, and their size


@dataclass(frozen=True)
class Shapes:
    """What the layers of a target keep, by layer. Layers that share another's keys and values keep none."""

    attention: dict[int, tuple[Heads, Heads]]  # of keys and values
    states: dict[int, StateShape]

    @property
    def alike(self) -> Heads | None:
        """Return the heads of keys and values where all layers have the same, and no states; else None."""
        kinds = {heads for pair in self.attention.values() for heads in pair}
        layers = list(self.attention) == list(range(len(self.attention)))
        return kinds.pop() if len(kinds) == 1 and layers and not self.states else None


@dataclass
class PackedWindow(Stateful):
    """A pass over packed rows that keeps nothing, as a Hugging Face cache; notes what a cache would have to keep."""

    states: States
    attention: dict[int, tuple[Heads, Heads]] = field(default_factory=dict)

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (B, H, Q, E) as they are."""
        self.attention[layer] = tuple((new.shape[1], new.shape[3]) for new in (keys, values))
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


@torch.no_grad()
def find_shapes(run: Callable[[torch.Tensor, PackedWindow], object], device: torch.device) -> Shapes:
    """Return what a target's layers keep, from a pass `run(ids (1, 1), window)`."""
    first = torch.zeros(1, 1, dtype=torch.long, device=device)
    window = PackedWindow(States(lineage=Lineage.packed(first)))
    run(first, window)
    return Shapes(dict(sorted(window.attention.items())), window.states.seen)


@dataclass
class MixedWindow(Stateful):
    """One forward pass's view of a mixed cache: see `infer.attention.kv_cache.Window`."""

    cache: "MixedCache"
    slots: torch.Tensor  # (B, Q) int64, flat: row * S + position
    extent: int

    @property
    def states(self) -> States:
        return self.cache.states

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    def update(self, keys: torch.Tensor, values: torch.Tensor, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Write Q new positions (B, H, Q, E) of one layer; return all visible keys and values, (B, H, extent, E)
        each."""
        flat, rows, seen = self.slots.flatten(), len(self.slots), []
        for (width, index), new in zip(self.cache.places[layer], (keys, values), strict=True):
            memory = self.cache.memories[width][index]
            memory.index_copy_(0, flat, new.transpose(1, 2).flatten(2).flatten(0, 1))
            whole = memory[: rows * self.capacity].view(rows, self.capacity, new.shape[1], -1)
            seen.append(whole[:, : self.extent].transpose(1, 2))
        return seen[0], seen[1]

    def get_seq_length(self, layer: int = 0) -> int:
        return self.extent - self.slots.shape[1]


class MixedCache(KVCache):
    """A `KVCache` with a buffer for every size of keys and values, and the states of recurrent layers. It is never
    static: its passes are not compiled."""

    def __init__(self, shapes: Shapes, rows: int, capacity: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(0, rows, capacity, 0, 0, dtype, device)
        counts: dict[int, int] = {}
        self.places: dict[int, list[tuple[int, int]]] = {}  # by layer: width and index of its keys and its values
        for layer, pair in shapes.attention.items():
            self.places[layer] = []
            for heads, size in pair:
                index = counts.setdefault(heads * size, 0)
                counts[heads * size] += 1
                self.places[layer].append((heads * size, index))
        self.memories = {
            width: torch.zeros(count, rows * capacity, width, dtype=dtype, device=device)
            for width, count in counts.items()
        }
        self.states = States.zeros(shapes.states, rows, dtype, device)

    def _from_row(self, first: int) -> "MixedCache":
        part = super()._from_row(first)
        part.memories = {width: memory[:, first * self.capacity :] for width, memory in self.memories.items()}
        part.states = self.states.from_row(first)
        return part

    def _move(self, source: int, to: int, length: int) -> None:
        super()._move(source, to, length)
        if source != to:
            self.states.move(source, to)

    def _buffers(self) -> list[torch.Tensor]:
        return list(self.memories.values())

    def window(self, width: int) -> MixedWindow:
        plain = super().window(width)
        return MixedWindow(self, plain.slots, plain.extent)

    def commit(self, path: torch.Tensor, counts: list[int], on_device: torch.Tensor | None = None) -> None:
        on_device = torch.tensor(counts, device=path.device) if on_device is None else on_device
        self.states.commit(path, on_device)
        super().commit(path, counts, on_device)
