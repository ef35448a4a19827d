"""A lean pass over int8 layers as a list of calls, which compiled code makes one
after the other: what a CUDA graph is on a GPU. For few positions Python between ten
calls a layer took as long as all that they compute. A tape is made once for its
numbers of rows and positions; every pass puts the addresses of its cache, masks and
angles into it. The addresses of weights and of its own memory stay in it: it holds all
these tensors, and is made anew once one of them has moved (`Tape.moved`).

N positions of B rows, Q each, D hidden size, H query heads, K key heads, E head size.
"""

import math
import weakref
from dataclasses import dataclass, field

import numpy as np
import torch

from infer.attention.kv_cache import Window
from infer.targets import loops
from infer.targets.int8 import Int8Product, by_loops, delete_handles, matrix_handle, product_entry, turned_rows
from infer.targets.lean import Layer, LeanDecoder, Masks, Norm, Rotations

MAX_TAPES = 32  # of a decoder that are kept
MAX_TAPE_BYTES = 2**25  # of the memory that all of them work in
MAX_TAPE_POSITIONS = 128  # of a tape that is kept
ALIGNMENT_BYTES = 64  # of a buffer: a cache line, and the widest register
WORDS = 20  # of a loop, most of all: its counter and arguments


class Tape:
    """The calls of a pass over N positions of B rows, and the memory that they work in."""

    def __init__(
        self,
        layers: list[Layer],
        norm: Norm,
        rows: int,
        count: int,
        size: int,
        tapped: tuple[int, ...],
        memory: torch.Tensor | None = None,
    ) -> None:
        """`norm`: the last one; `size`: E; `tapped`: layers whose outputs are kept; `memory`: bytes (uint8)
        to work in if they are enough, of a tape that is not there any more."""
        self.held: dict[int, torch.Tensor] = {}  # one of every storage whose addresses are in the words
        self.handles: list[int] = []
        weakref.finalize(self, delete_handles, self.handles)
        products = [product for layer in layers for product in layer.products]
        self.layers, self.rows, self.size, self.count = layers, rows, size, count
        sizes = [(*p.codes.shape, p.digits * self.count) for p in products]
        sizes = [(outputs, inputs, turned_rows(rows, outputs) or rows) for outputs, inputs, rows in sizes]
        most_sums = max(outputs * rows for outputs, _, rows in sizes)
        kept_layers = (*tapped, len(layers))
        hidden = (self.count, len(norm.wide))
        heads = (self.count, layers[0].heads * size)
        shapes = [
            ((max(inputs * rows for _, inputs, rows in sizes),), torch.int8),
            ((most_sums,), torch.int32),
            ((most_sums,), torch.int32),
            ((self.count,), torch.float32),
            (heads, torch.float32),
            (heads, torch.float32),
            *[(hidden, torch.float32)] * (1 + len(kept_layers)),
        ]
        self.memory, buffers = place_buffers(shapes, memory)
        self.codes, self.sums, self.turned, self.steps, self.queries, self.mixed, self.states, *outs = buffers
        self.outs = dict(zip(kept_layers, outs, strict=True))
        self.words, self.calls = np.zeros((10 * len(layers) + 1, WORDS), np.int64), []
        self.used, self.placing, self.attending = 0, [], []  # rows of words: all, of the loops that use a cache
        self.encode(self.states, products[0], layers[0].before[0])
        stream = self.states
        for index, layer in enumerate(layers):
            following, before = layers[index + 1 : index + 2], stream
            stream = self.outs.get(index, self.states)  # a tapped layer's stream goes on from its own memory
            then = (following[0].products[0], following[0].before[0]) if following else (None, norm)
            self.add(layer, before, stream, *then)
        self.list = np.array(self.calls, np.int64)
        self.held_addresses = list(map(torch.Tensor.data_ptr, self.held.values()))

    def address(self, tensor: torch.Tensor | None) -> int:
        """Return the address of a tensor, 0 for None, and hold the tensor as long as the tape is there."""
        if tensor is None:
            return 0
        alias = tensor.detach()  # a parameter's own memory may be replaced through `.data`
        self.held.setdefault(alias.untyped_storage()._cdata, alias)
        return alias.data_ptr()

    def handle(self, matrix: torch.Tensor) -> int:
        """Return a handle (`matrix_handle`) of a matrix, and hold both as long as the tape is there."""
        self.address(matrix)
        self.handles.append(matrix_handle(matrix))
        return self.handles[-1]

    def moved(self) -> bool:
        """Return whether a tensor has moved since its address was noted: `share_memory` moves a storage
        under all of its tensors."""
        return list(map(torch.Tensor.data_ptr, self.held.values())) != self.held_addresses

    def norm_words(self, norm: Norm | None) -> tuple[int, int]:
        """Return the words of a norm (`loops.scale_words`), whose weight is held."""
        self.address(None if norm is None else norm.wide)
        return loops.scale_words(norm)

    def add(self, layer: Layer, before: torch.Tensor, after: torch.Tensor, then: Int8Product | None, norm: Norm):
        """Append a layer from codes for its first product on, with the residual stream (N, D) before and
        after it; behind it come a norm and codes for the product that is next."""
        (qkv, out, both, down), heads, shared = layer.products, layer.heads, layer.key_heads
        qk_norm, residual = self.norm_words(layer.qk_norm), loops.bits(layer.residual)
        first, third = map(loops.bits, layer.mlp.bend)
        self.multiply(qkv)
        self.placing.append(self.used)
        self.loop(
            loops._place_heads, self.count, self.count * len(qkv.scales), self.address(self.sums),
            *self.summed(qkv).values(), *qk_norm, self.address(self.queries), self.count, heads, shared, self.size,
        )  # fmt: skip
        self.attending.append(self.used)
        parts = self.rows * shared * -(-self.count // (self.rows * loops.QUERIES))
        self.loop(
            loops._attend, parts, loops.WORTH + 1, self.address(self.queries), loops.bits(layer.scale),
            self.address(self.mixed), self.rows, shared, heads // shared, self.size,
        )  # fmt: skip
        self.encode(self.mixed, out)
        self.multiply(out)
        added = {"before": self.address(before), "kept": self.address(self.states), "factor": residual}
        self.encode(self.sums, both, layer.before[1], **self.summed(out), **added)
        self.multiply(both)
        self.encode(self.sums, down, **self.summed(both), first=first, third=third)
        self.multiply(down)
        added = {"before": self.address(self.states), "kept": self.address(after), "factor": residual}
        self.encode(self.sums, then, norm, **self.summed(down), **added)

    def loop(self, loop: object, parts: int, work: int, *arguments: int) -> None:
        """Append a loop."""
        words = self.words[self.used]
        words[1 : len(arguments) + 1] = arguments
        self.calls.append(loops.call(loop, words.ctypes.data, parts, work))
        self.used += 1

    def multiply(self, product: Int8Product) -> None:
        """Append a product of what is in `codes`, to `sums`."""
        (outputs, inputs), rows = product.codes.shape, product.digits * self.count
        if by_loops(inputs):
            whole = self.codes[: rows * inputs].view(rows, inputs)
            self.address(whole)
            self.address(product.codes)
            return loops.multiply(whole, product.codes, self.sums, self.loop)
        wide = turned_rows(rows, outputs)
        codes = self.codes[: (wide or rows) * inputs].view(-1, inputs)
        left, right = (product.codes, codes) if wide else (codes, product.codes)
        made = (self.turned if wide > 1 else self.sums)[: len(codes) * outputs]
        matrices = made.view(len(left), -1), left, right.t()
        self.calls.append((product_entry(), *map(self.handle, matrices), 0))
        if wide > 1:
            parts, to = -(-outputs // loops.SOME), self.address(self.sums)
            self.loop(loops._turn_back, parts, len(made), self.address(made), outputs, wide, to)

    def summed(self, product: Int8Product) -> dict[str, int]:
        """Return what sums of a product are, and stand for."""
        return {
            "width": len(product.scales),
            "scales": self.address(self.steps),
            "each": self.address(product.scales),
            "bias": self.address(product.bias),
            "digits": product.digits,
        }

    def encode(self, source: torch.Tensor, product: Int8Product | None, norm: Norm | None = None, **stages: int):
        """Append stages of rows that end in codes for a product, or, without one, in the last states."""
        weight, eps = self.norm_words(norm)
        if product is None:
            made = {"out": self.address(self.outs[len(self.layers)])}
        else:
            made = {"smooth": self.address(product.smooth), "codes": self.address(self.codes)}
            made |= {"steps": self.address(self.steps), "finer": product.digits}
        stages = {"width": source.shape[-1], "weight": weight, "eps": eps, **stages, **made}
        rows = loops.Stages(self.address(source), self.count, **stages)
        self.loop(loops._rows, self.count, self.count * rows.width, *rows)

    def run(self, states: torch.Tensor, rotations: Rotations, masks: Masks, window: Window):
        """Run the pass over states (N, D), and return the outputs of tapped layers and, behind the last
        one, the last states, (N, D) each, which lie in the tape's memory."""
        self.states.copy_(states)
        self.words[:, 0] = 0
        buffer, seen, slots = window.cache.buffer, window.extent - window.first, window.flat
        width, stops = window.slots.shape[1], 0 if window.stops is None else window.stops.data_ptr()
        plane, first = 4 * buffer.stride(0), 4 * window.first * buffer.shape[2]
        turned = {kind: (cos.shape[-1], cos.data_ptr(), sin.data_ptr()) for kind, (cos, sin) in rotations.items()}
        hidden = {kind: mask.for_packed(1, states.dtype) for kind, mask in masks.items()}
        hides = {kind: 0 if mask is None else mask.data_ptr() for kind, mask in hidden.items()}
        for index, layer in enumerate(self.layers):
            keys = buffer.data_ptr() + 2 * index * plane
            angles = turned[layer.kind] if layer.rotates else (0, 0, 0)
            self.words[self.placing[index], 14:20] = (*angles, slots.data_ptr(), keys, keys + plane)
            cached = keys + first, keys + plane + first, hides[layer.kind], window.capacity, seen
            self.words[self.attending[index], 8:15] = *cached, width, stops
        loops.run(loops._play, 1, 0, self.list.ctypes.data, len(self.list))
        return self.outs


def place_buffers(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], memory: torch.Tensor | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return memory (uint8) and tensors of these shapes and dtypes in it, one behind the other. It is the
    given memory if that is large enough."""
    counts = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes]
    aligned = [-(-count // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for count in counts]
    if memory is None or len(memory) < sum(aligned):
        memory = torch.empty(sum(aligned), dtype=torch.uint8)
    buffers = []
    parts = memory[: sum(aligned)].split(aligned)
    for part, count, (shape, dtype) in zip(parts, counts, shapes, strict=True):
        buffers.append(part[:count].view(dtype).view(shape))
    return memory, buffers


@dataclass(frozen=True)
class TapedDecoder(LeanDecoder):
    """A lean pass all of whose layers can be on a tape (`Layer.products`)."""

    tapes: dict[tuple, Tape] = field(default_factory=dict)
    # of the last tape that was not kept: passes over prompts, of many lengths, work in the same memory
    spare_memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def run(self, states, rotations, masks, window, tapped) -> dict[int, torch.Tensor]:
        if type(window) is not Window or window.flat.numel() != len(states) or not loops.serve(states):
            return super().run(states, rotations, masks, window, tapped)
        key = (len(window.slots), len(states), tapped, torch.get_num_threads())
        tape = self.tapes.pop(key, None)  # meanwhile it is no other thread's
        if tape is None or tape.moved():
            size = window.cache.buffer.shape[2] // self.layers[0].key_heads
            # meanwhile it is no other thread's
            memory = None if len(states) <= MAX_TAPE_POSITIONS else self.spare_memory.pop("prompts", None)
            with torch.inference_mode(False):  # whose tensors could not be written to outside of it
                tape = Tape(self.layers, self.norm, *key[:2], size, tapped, memory)
        outputs = {index: out.clone() for index, out in tape.run(states, rotations, masks, window).items()}
        if len(states) <= MAX_TAPE_POSITIONS:
            self.tapes[key] = tape
            self.drop_old_tapes()
        else:
            self.spare_memory["prompts"] = tape.memory
        return outputs

    def drop_old_tapes(self) -> None:
        """Keep the tapes used last, within the bounds of their number and memory. Other threads may take
        tapes meanwhile."""
        kept_bytes = 0
        for number, (key, tape) in enumerate(reversed(list(self.tapes.items()))):
            kept_bytes += len(tape.memory)
            if number >= MAX_TAPES or kept_bytes > MAX_TAPE_BYTES:
                self.tapes.pop(key, None)
