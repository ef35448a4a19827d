"""Recurrent layers under draft trees: Gated DeltaNet, KDA, Mamba-2 and short convolutions.

Every node of a tree continues the state of its parent, and no state per node is kept: over a tree
the delta rule is one triangular system under the ancestor mask (Bole, 2608.01651; TreeWY,
2608.20961), and Mamba-2 is a masked product (STree, 2505.14969). A chain is a tree without
branches, so that prompts, packed documents and plain decoding go through the same formulas, in
segments. The model's own modules keep their weights, projections, gates and norms: `follow_trees`
puts `States` in the place of the functions that they call for convolution and recurrence, and of
nothing else.

B rows, Q new positions, n of them in a segment, H heads, K size of keys, E size of values, C decays
of a head (1, or K where every entry of a key decays by itself), D channels of a convolution, W taps
of its kernel.
"""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, cached_property, partial, wraps
from types import FunctionType

import torch
from torch import nn
from torch.nn import functional as F
from transformers.activations import ACT2FN

from infer.attention.kv_cache import Heads, PackedLayer, Stateful

SEGMENT = 64  # positions of a chain that are solved together
# what precedes a position that has no predecessor among the new ones: the state, or nothing
ROOT = -1
NOTHING = -2


@dataclass(frozen=True)
class Segment:
    """New positions that are computed together, a predecessor before its successors."""

    places: slice
    ancestors: (
        torch.Tensor
    )  # (B, 1, n, n) bool: [t, j] is true where j is t or comes before it on its path
    carries: (
        torch.Tensor | None
    )  # (B, 1, n, 1) whether a position continues the state before the segment; None: all do


@dataclass(frozen=True)
class Lineage:
    """What each of the Q new positions of every row continues."""

    previous: torch.Tensor  # (B, Q) int64: the new position before it, ROOT or NOTHING
    ancestors: torch.Tensor | None = None  # (B, Q, Q) bool, of trees, parents first
    documents: torch.Tensor | None = None  # (B, Q) int64, of packed rows
    counts: torch.Tensor | None = (
        None  # (B,) of chains padded on the right: how many positions are real
    )
    _taps: dict[int, list[torch.Tensor]] = field(default_factory=dict)  # by W

    @classmethod
    def tree(cls, parents: torch.Tensor, ancestors: torch.Tensor) -> "Lineage":
        """Return the lineage of trees behind the committed states: parents (B, M), ancestors (B, M,
        M)."""
        root = torch.zeros_like(parents)
        root[:, 0] = 1
        return cls(torch.where(root.bool(), ROOT, parents), ancestors)

    @classmethod
    def chain(cls, counts: list[int], width: int, device: torch.device) -> "Lineage":
        """Return the lineage of the next `counts[b]` <= width tokens of every row behind its
        committed state."""
        before = torch.arange(-1, width - 1, device=device)
        return cls(before.expand(len(counts), -1), counts=torch.tensor(counts, device=device))

    @classmethod
    def packed(cls, documents: torch.Tensor) -> "Lineage":
        """Return the lineage of packed rows: nothing comes before a document's first token.
        documents (B, T)."""
        before = torch.arange(-1, documents.shape[1] - 1, device=documents.device).expand_as(
            documents
        )
        first = torch.ones_like(documents, dtype=torch.bool)
        first[:, 1:] = documents[:, 1:] != documents[:, :-1]
        return cls(torch.where(first, NOTHING, before), documents=documents)

    @cached_property
    def segments(self) -> list[Segment]:
        """Return the segments, in order: a tree is one."""
        if self.ancestors is not None:
            return [Segment(slice(None), self.ancestors[:, None], None)]
        (rows, width), segments = self.previous.shape, []
        for start in range(0, width, SEGMENT):
            size = min(SEGMENT, width - start)
            ancestors = torch.ones(size, size, dtype=torch.bool, device=self.previous.device).tril()
            ancestors = ancestors.expand(rows, 1, -1, -1)
            carries = None
            if self.documents is not None:
                own = self.documents[:, start : start + size]
                ancestors = ancestors & (own[:, None, :, None] == own[:, None, None, :])
                same = (
                    self.documents[:, start - 1 : start] == own
                    if start
                    else torch.zeros_like(own, dtype=torch.bool)
                )
                carries = same[:, None, :, None]
            segments.append(Segment(slice(start, start + size), ancestors, carries))
        return segments

    @cached_property
    def real(self) -> torch.Tensor | None:
        """Return which positions are no padding, (B, Q) bool; None: all."""
        if self.counts is None:
            return None
        return (
            torch.arange(self.previous.shape[1], device=self.counts.device) < self.counts[:, None]
        )

    def taps(self, kernel: int) -> list[torch.Tensor]:
        """Return what a kernel of W taps sees of [nothing | W - 1 inputs before | Q new ones], as
        indices (B, 1, Q): the position itself, the one before it, and so on."""
        if kernel not in self._taps:
            rows, width = self.previous.shape
            device = self.previous.device
            before = torch.where(
                self.previous >= 0, self.previous + kernel, self.previous.eq(ROOT) * (kernel - 1)
            )
            old = torch.arange(-1, kernel - 1, device=device).clamp(min=0).expand(rows, -1)
            back = torch.cat([old, before], 1)  # (B, W + Q)
            taps = [torch.arange(kernel, kernel + width, device=device).expand(rows, -1)]
            for _ in range(kernel - 1):
                taps.append(back.gather(1, taps[-1]))
            self._taps[kernel] = [tap[:, None] for tap in taps]
        return self._taps[kernel]


@dataclass(frozen=True)
class Recurred:
    """One segment of one layer: what its positions wrote to the state. Every tensor is float32."""

    outputs: torch.Tensor  # (B, H, n, E)
    keys: torch.Tensor  # (B, H, n, K)
    updates: torch.Tensor  # (B, H, n, E)
    decay: torch.Tensor  # (B, H, n, C) log decay since the state before the segment

    def state_after(
        self, state: torch.Tensor, last: torch.Tensor, segment: Segment
    ) -> torch.Tensor:
        """Return the state (B, H, K, E) after position `last` (B,), from the one before the
        segment."""
        rows = torch.arange(len(last), device=last.device)
        on_path = segment.ancestors[rows, :, last][..., None]  # (B, 1, n, 1)
        end = self.decay[rows, :, last][:, :, None]  # (B, H, 1, C)
        weights = torch.where(on_path, end - self.decay, -torch.inf).exp()
        kept = end.exp().mT * state
        if segment.carries is not None:
            kept = kept * segment.carries[rows, :, last][..., None]
        return kept + (self.keys * weights).mT @ self.updates


def recur(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    segment: Segment,
) -> Recurred:
    """Run one segment. queries and keys (B, H, n, K), values (B, H, n, E), log decay (B, H, n, C),
    at most 0, of every position, state (B, H, K, E) before it. With beta (B, H, n, 1) the values
    are written by the delta rule, what the state says of their keys taken off first; without, they
    are added (Mamba-2)."""
    ancestors = segment.ancestors
    whole = ancestors.to(decay.dtype) @ decay  # (B, H, n, C), since the state
    carried = whole.exp() if segment.carries is None else whole.exp() * segment.carries
    if decay.shape[-1] == 1:
        between = (whole - whole.mT).masked_fill(~ancestors, -torch.inf).exp()  # (B, H, n, n)

        def products(left: torch.Tensor) -> torch.Tensor:
            return (left @ keys.mT) * between
    else:
        between = whole[..., :, None, :] - whole[..., None, :, :]
        between = (
            between.masked_fill(~ancestors[..., None], -torch.inf).exp() * keys[..., None, :, :]
        )

        def products(left: torch.Tensor) -> torch.Tensor:
            return (between @ left[..., None])[..., 0]

    if beta is not None:
        right = beta * (values - (keys * carried) @ state)
        values = torch.linalg.solve_triangular(
            beta * products(keys), right, upper=False, unitriangular=True
        )
    return Recurred((queries * carried) @ state + products(queries) @ values, keys, values, whole)


def heads_first(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return (B, Q, heads, ...) of (B, Q, fewer heads, ...) as (B, H, Q, ...) float32, heads
    repeated."""
    states = states.transpose(1, 2).float()
    return (
        states
        if states.shape[1] == heads
        else states.repeat_interleave(heads // states.shape[1], dim=1)
    )


@dataclass(frozen=True)
class Shapes:
    """What the layers of a target keep, by layer. Layers that share another's keys and values keep
    none."""

    attention: dict[int, tuple[Heads, Heads]] = field(default_factory=dict)  # of keys and values
    inputs: dict[int, tuple[int, int]] = field(default_factory=dict)  # of convolutions: D, W - 1
    memory: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # of recurrences: H, K, E

    @property
    def alike(self) -> bool:
        """Whether all layers keep keys and values of the same heads, and no states."""
        kinds = {heads for pair in self.attention.values() for heads in pair}
        layers = list(range(len(self.attention)))
        return (
            len(kinds) == 1 and list(self.attention) == layers and not (self.inputs or self.memory)
        )


@dataclass
class States:
    """The committed states of all recurrent layers, a row a text, and what the pass in progress
    needs of them.

    A pass is prepared by setting `lineage`. A chain's pass moves the states on to its end. A tree's
    leaves them as they are and keeps what every node wrote, until `commit` follows a path. Without
    shapes every row begins with nothing, and nothing is kept but in `seen` (packed rows).
    """

    inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer, (rows, D, W - 1)
    memory: dict[int, torch.Tensor] = field(
        default_factory=dict
    )  # by layer, (rows, H, K, E) float32
    lineage: Lineage | None = None
    convolved: dict[int, torch.Tensor] = field(default_factory=dict)  # of a tree's pass: (B, D, Q)
    recurred: dict[int, Recurred] = field(default_factory=dict)
    seen: Shapes = field(default_factory=Shapes)

    @classmethod
    def zeros(cls, shapes: Shapes, rows: int, dtype: torch.dtype, device: torch.device) -> "States":
        """Allocate `rows` rows."""
        inputs = {
            i: torch.zeros(rows, *size, dtype=dtype, device=device)
            for i, size in shapes.inputs.items()
        }
        return cls(
            inputs,
            {i: torch.zeros(rows, *size, device=device) for i, size in shapes.memory.items()},
        )

    def from_row(self, first: int) -> "States":
        """Return the rows from `first` on over the same memory, set to zero."""
        part = (
            {layer: kept[first:].zero_() for layer, kept in kind.items()}
            for kind in (self.inputs, self.memory)
        )
        return States(*part)

    def move(self, source: int, to: int) -> None:
        """Copy a row's states to another row."""
        for kind in (self.inputs, self.memory):
            for kept in kind.values():
                kept[to] = kept[source]

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Move every row's states along the first `counts[b]` nodes of `path` (B, W) of the tree
        that was verified."""
        rows = len(path)
        last = path.gather(1, counts[:, None] - 1)[:, 0]
        for layer, new in self.convolved.items():
            kept = self.inputs[layer][:rows]
            along = new[:rows].gather(2, path[:, None].expand(-1, new.shape[1], -1))
            self._keep_inputs(layer, torch.cat([kept, along], 2), counts)
        for layer, new in self.recurred.items():
            kept = self.memory[layer][:rows]
            kept.copy_(new.state_after(kept, last, self.lineage.segments[0]))

    def _keep_inputs(self, layer: int, line: torch.Tensor, counts: torch.Tensor) -> None:
        """Keep the last inputs of a line (B, D, W - 1 + Q) of which `counts[b]` new ones are
        real."""
        kept = self.inputs[layer]
        places = counts[:, None] + torch.arange(kept.shape[2], device=counts.device)  # (B, W - 1)
        kept[: len(line)] = line.gather(2, places[:, None].expand(-1, line.shape[1], -1))

    def convolve(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Convolve hidden_states (B, D, Q) with weight (D, W) along every position's own path."""
        rows, channels, _ = hidden_states.shape
        before = self.inputs.get(layer)
        if before is None:
            self.seen.inputs[layer] = (channels, weight.shape[1] - 1)
            before = hidden_states.new_zeros(rows, channels, weight.shape[1] - 1)
        line = torch.cat([before[:rows], hidden_states], 2)
        source = torch.cat([torch.zeros_like(line[:, :, :1]), line], 2).float()
        result = torch.zeros_like(hidden_states, dtype=torch.float32)
        for tap, factor in zip(
            self.lineage.taps(weight.shape[1]), weight.float().unbind(1)[::-1], strict=True
        ):
            result += source.gather(2, tap.expand(-1, channels, -1)) * factor[:, None]
        if bias is not None:
            result += bias.float()[:, None]
        if self.lineage.ancestors is not None:
            self.convolved[layer] = hidden_states
        elif layer in self.inputs:
            self._keep_inputs(layer, line, self.lineage.counts)
        return (result if activation is None else ACT2FN[activation](result)).to(
            hidden_states.dtype
        )

    def delta_rule(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Gated DeltaNet and KDA: query and key (B, Q, <= H, K), value (B, Q, H, E), beta (B, Q,
        H), log decay g (B, Q, H), or (B, Q, H, K) for KDA. Returns (B, Q, H, E) and the last
        state."""
        heads = value.shape[2]
        queries, keys, values = (heads_first(states, heads) for states in (query, key, value))
        if use_qk_l2norm_in_kernel:
            queries, keys = (
                x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (queries, keys)
            )
        decay = heads_first(g if g.ndim == 4 else g[..., None], heads)
        beta = heads_first(beta[..., None], heads)
        result = self._recur(layer, queries * queries.shape[-1] ** -0.5, keys, values, decay, beta)
        return result[0].to(query.dtype), result[1]

    def scan(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        dt: torch.Tensor,
        A: torch.Tensor,
        B: torch.Tensor,
        C: torch.Tensor,
        D: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        dt_softplus: bool = False,
        dt_limit: tuple[float, float] = (0.0, float("inf")),
        **_: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Mamba-2: hidden_states (B, Q, H, E), step sizes dt (B, Q, H), A and D (H,), B and C (B,
        Q, <= H, K). Returns (B, Q, H, E) float32 and the last state."""
        heads = hidden_states.shape[2]
        dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
        dt = (F.softplus(dt) if dt_softplus else dt).clamp(*dt_limit).float()
        values = heads_first(hidden_states.float() * dt[..., None], heads)
        decay = heads_first((A.float() * dt)[..., None], heads)
        queries = heads_first(C, heads)
        keys = heads_first(B, heads)
        result, state = self._recur(layer, queries, keys, values, decay, None)
        return (result if D is None else result + D[:, None] * hidden_states.float()), state

    def _recur(
        self, layer, queries, keys, values, decay, beta
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Run a layer's recurrence, tensors (B, H, Q, ...), by segments; return (B, Q, H, E) and
        the last state."""
        shape = (queries.shape[1], queries.shape[-1], values.shape[-1])
        if self.lineage.real is not None:  # padding neither fades the state nor writes to it
            padding = ~self.lineage.real[:, None, :, None]
            decay = decay.masked_fill(padding, 0)
            values = values.masked_fill(padding, 0)
            beta = None if beta is None else beta.masked_fill(padding, 0)
        kept = self.memory.get(layer)
        if kept is None:
            self.seen.memory[layer] = shape
            kept = queries.new_zeros(len(queries), *shape)
        kept = state = kept[: len(queries)]
        results = []
        for segment in self.lineage.segments:
            take = (
                x if x is None else x[:, :, segment.places]
                for x in (queries, keys, values, decay, beta)
            )
            done = recur(*take, state, segment)
            results.append(done.outputs)
            if self.lineage.ancestors is not None:
                self.recurred[layer] = done
            else:
                last = torch.full((len(queries),), done.keys.shape[2] - 1, device=queries.device)
                state = done.state_after(state, last, segment)
        if layer in self.memory and state is not kept:
            kept.copy_(state)
        return torch.cat(results, 2).transpose(1, 2).contiguous(), state


# what transformers' layers call for their recurrence -> what takes its place
REPLACED = {
    "causal_conv1d_fn": States.convolve,
    "torch_chunk_gated_delta_rule": States.delta_rule,
    "chunk_kimi_delta_attention": States.delta_rule,
    "mamba2_chunk_scan": States.scan,
}


def recurrent_parts(body: nn.Module) -> list[nn.Module]:
    """Return the modules of a decoder that ask a cache for a state."""
    return [module for module in body.modules() if "get_conv_state" in called_names(type(module))]


@cache
def called_names(kind: type[nn.Module]) -> frozenset[str]:
    """Return the names that a module's forward refers to."""
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return frozenset(code.co_names if code else ())


def unknown_recurrence(body: nn.Module) -> str | None:
    """Return the class of the first module with a state that is not replaced here; None: there is
    none."""
    for module in recurrent_parts(body):
        names = called_names(type(module))
        keeps_state = "update_recurrent_state" in names
        if "causal_conv1d_fn" not in names or (keeps_state and len(names & REPLACED.keys()) < 2):
            return type(module).__name__
    return None


def follow_trees(body: nn.Module) -> bool:
    """Make the recurrent layers of a decoder compute through the `States` of our caches; with any
    other cache they do what they did. Returns whether there are any."""
    parts = recurrent_parts(body)
    for module in parts:
        module.__class__ = following(type(module))
    return bool(parts)


class PackedWindow(Stateful):
    """A pass over packed rows, documents (B, T), in the place of a cache's window: keeps nothing of
    them, and notes what a cache would have to keep."""

    def __init__(self, documents: torch.Tensor, layers: int = 0) -> None:
        """`layers`: how many the lean pass has."""
        self.states = States(lineage=Lineage.packed(documents))
        self.count = layers
        self.rows, self.capacity = documents.shape

    @property
    def shapes(self) -> Shapes:
        """What the layers of the pass would have kept."""
        seen = self.states.seen
        return Shapes(dict(sorted(seen.attention.items())), seen.inputs, seen.memory)

    def layers(self) -> Iterator[PackedLayer]:
        """Yield the memory of one layer after the other; only the last is kept."""
        return (PackedLayer(self.rows, self.capacity) for _ in range(self.count))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys and values (B, H, Q, E) as they are."""
        self.states.seen.attention[layer] = tuple(
            (new.shape[1], new.shape[3]) for new in (keys, values)
        )
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0


class FollowsTrees:
    """Marks the classes of `following`."""


@cache
def following(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of layers whose forward calls `States` where it is given one of our caches."""
    if issubclass(kind, FollowsTrees):
        return kind
    code: Callable = inspect.unwrap(kind.forward)
    names = REPLACED.keys() & called_names(kind)

    @wraps(kind.forward)  # for `called_names`
    def forward(self, *args: object, **kwargs: object) -> torch.Tensor:
        states = next(
            (value.states for value in (*args, *kwargs.values()) if isinstance(value, Stateful)),
            None,
        )
        if states is None:
            return kind.forward(self, *args, **kwargs)
        ours = {name: partial(REPLACED[name], states, self.layer_idx) for name in names}
        own = FunctionType(
            code.__code__,
            code.__globals__ | ours,
            code.__name__,
            code.__defaults__,
            code.__closure__,
        )
        own.__kwdefaults__ = code.__kwdefaults__
        return own(self, *args, **kwargs)

    return type(
        kind.__name__, (FollowsTrees, kind), {"forward": forward, "__module__": kind.__module__}
    )
