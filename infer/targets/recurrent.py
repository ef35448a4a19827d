"""Recurrent layers over draft trees: Gated DeltaNet, KDA, Mamba-2 and short convolutions.

Every node of a tree continues the state of its parent, but no state is stored per node. Over a
tree, the delta rule is one triangular system under the ancestor mask (Bole, 2608.01651; TreeWY,
2608.20961), and Mamba-2 is a masked matmul (STree, 2505.14969). A chain of consecutive tokens is a
tree without branches. Prompts, packed documents and baseline decoding therefore use the same
formulas, one segment of positions after the other.

The model's own modules keep their weights, projections, gates and norms.
`infer.targets.recurrent_modules` replaces only the functions that the modules call for convolution
and recurrence by methods of `RecurrentStates`.

Dimension letters in this module: B batch rows, Q new positions, n new positions of one segment, T
length of a packed sequence, H heads, K key size, E value size, C decays per head (1, or K if every
entry of a key has its own decay), D channels of a convolution, W kernel size of a convolution.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from infer.attention.kv_cache import HeadShape, PackedLayerView, RecurrentCacheAdapter
from infer.targets.predecessors import Predecessors, RecurrenceSegment


@dataclass(frozen=True)
class RecurrenceSegmentResult:
    """The outputs of one layer for one segment, and what the segment's positions write to the
    layer's state. All tensors are float32."""

    outputs: torch.Tensor  # (B, H, n, E)
    keys: torch.Tensor  # (B, H, n, K)
    values: torch.Tensor  # (B, H, n, E), the values that are written to the state
    # (B, H, n, C), sum of the log decays from the state before the segment to the position
    decay: torch.Tensor

    def state_after(
        self, state: torch.Tensor, last: torch.Tensor, segment: RecurrenceSegment
    ) -> torch.Tensor:
        """Return the state (B, H, K, E) after the position `last` of every batch row.

        state: (B, H, K, E), the state before the segment
        last: (B,) int64, indices of positions within the segment
        segment: the segment that this result belongs to
        """
        rows = torch.arange(len(last), device=last.device)
        on_path = segment.ancestors[rows, :, last][..., None]  # (B, 1, n, 1)
        total_decay = self.decay[rows, :, last][:, :, None]  # (B, H, 1, C)
        weights = torch.where(on_path, total_decay - self.decay, -torch.inf).exp()
        decayed_state = total_decay.exp().mT * state
        if segment.continues_state is not None:
            continues = segment.continues_state[rows, :, last][..., None]
            decayed_state = decayed_state * continues
        return decayed_state + (self.keys * weights).mT @ self.values


def compute_recurrence_segment(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor | None,
    state: torch.Tensor,
    segment: RecurrenceSegment,
) -> RecurrenceSegmentResult:
    """Compute the outputs of a recurrence over one segment.

    queries, keys: (B, H, n, K)
    values: (B, H, n, E)
    decay: (B, H, n, C), log decay of every position, at most 0
    beta: (B, H, n, 1), write strength of the delta rule, which subtracts from a value what the
        state returns for the value's key. None means that values are added without this subtraction
        (Mamba-2).
    state: (B, H, K, E), the state before the segment
    """
    ancestors = segment.ancestors
    # (B, H, n, C), sum of the log decays from the state before the segment to the position
    total_decay = ancestors.to(decay.dtype) @ decay
    state_weight = total_decay.exp()
    if segment.continues_state is not None:
        state_weight = state_weight * segment.continues_state

    if decay.shape[-1] == 1:
        log_weights = (total_decay - total_decay.mT).masked_fill(~ancestors, -torch.inf)
        weights = log_weights.exp()  # (B, H, n, n)

        def score_keys(vectors: torch.Tensor) -> torch.Tensor:
            return (vectors @ keys.mT) * weights
    else:
        log_weights = total_decay[..., :, None, :] - total_decay[..., None, :, :]
        log_weights = log_weights.masked_fill(~ancestors[..., None], -torch.inf)
        decayed_keys = log_weights.exp() * keys[..., None, :, :]  # (B, H, n, n, K)

        def score_keys(vectors: torch.Tensor) -> torch.Tensor:
            return (decayed_keys @ vectors[..., None])[..., 0]

    if beta is not None:
        targets = beta * (values - (keys * state_weight) @ state)
        values = torch.linalg.solve_triangular(
            beta * score_keys(keys), targets, upper=False, unitriangular=True
        )
    outputs = (queries * state_weight) @ state + score_keys(queries) @ values
    return RecurrenceSegmentResult(outputs, keys, values, total_decay)


def transpose_to_heads_first(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Return `states` (B, Q, number of heads, ...) as (B, `heads`, Q, ...) float32. If `states` has
    fewer heads, whose number must divide `heads`, each head is repeated."""
    states = states.transpose(1, 2).float()
    if states.shape[1] == heads:
        return states
    return states.repeat_interleave(heads // states.shape[1], dim=1)


@dataclass(frozen=True)
class CacheShapes:
    """Shapes of what the layers of a target store for one sequence, by layer index. A layer that
    uses the keys and values of another layer stores none."""

    # (number of heads, head size) of the keys, and the same of the values
    attention: dict[int, tuple[HeadShape, HeadShape]] = field(default_factory=dict)
    convolution: dict[int, tuple[int, int]] = field(default_factory=dict)  # (D, W - 1)
    recurrence: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # (H, K, E)

    @property
    def is_uniform_attention(self) -> bool:
        """Return whether all layers store keys and values with the same number of heads and the
        same head size, and no layer stores a recurrent or convolution state."""
        head_shapes = {shape for pair in self.attention.values() for shape in pair}
        has_states = bool(self.convolution or self.recurrence)
        all_layers = list(range(len(self.attention)))
        return len(head_shapes) == 1 and list(self.attention) == all_layers and not has_states


@dataclass
class RecurrentStates:
    """The committed states of all recurrent layers, which are the states after the cached tokens of
    each sequence, and the data that a forward pass needs to use and update them. Each sequence has
    one batch row.

    Set `predecessors` before a forward pass. A pass over chains updates the states to the end of
    the chains. A pass over draft trees leaves the states unchanged. It stores what the tree nodes
    would write to the states, until `commit` selects a path. If no states are allocated, as for
    packed sequences, every batch row begins without a state, and the pass only records the shapes
    of the states in `observed_shapes`.
    """

    # by layer: the last W - 1 inputs of the layer's convolution, (rows, D, W - 1)
    conv_states: dict[int, torch.Tensor] = field(default_factory=dict)
    # by layer: the state of the layer's recurrence, (rows, H, K, E) float32
    recurrent_states: dict[int, torch.Tensor] = field(default_factory=dict)
    predecessors: Predecessors | None = None
    tree_conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)  # by layer: (B, D, Q)
    tree_results: dict[int, RecurrenceSegmentResult] = field(default_factory=dict)  # by layer index
    observed_shapes: CacheShapes = field(default_factory=CacheShapes)

    @classmethod
    def allocate(
        cls, shapes: CacheShapes, rows: int, dtype: torch.dtype, device: torch.device
    ) -> "RecurrentStates":
        """Allocate states for `rows` sequences, filled with zeros."""
        conv_states = {
            layer: torch.zeros(rows, *shape, dtype=dtype, device=device)
            for layer, shape in shapes.convolution.items()
        }
        recurrent_states = {
            layer: torch.zeros(rows, *shape, device=device)
            for layer, shape in shapes.recurrence.items()
        }
        return cls(conv_states, recurrent_states)

    def reset_rows_from(self, first_row: int) -> "RecurrentStates":
        """Set the batch rows from `first_row` on to zero, and return them as states over the same
        memory."""

        def clear_rows(states_by_layer: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            return {layer: states[first_row:].zero_() for layer, states in states_by_layer.items()}

        return RecurrentStates(clear_rows(self.conv_states), clear_rows(self.recurrent_states))

    def move_row(self, source: int, destination: int) -> None:
        """Copy the states of batch row `source` to batch row `destination`."""
        for states_by_layer in (self.conv_states, self.recurrent_states):
            for states in states_by_layer.values():
                states[destination] = states[source]

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Update the states of every batch row by a path through the draft tree that was verified
        last.

        path: (B, nodes) int64, indices of the path's nodes, then padding
        counts: (B,) int64, number of nodes of each path
        """
        rows = len(path)
        last = path.gather(1, counts[:, None] - 1)[:, 0]
        for layer, new_inputs in self.tree_conv_inputs.items():
            state = self.conv_states[layer][:rows]
            indices = path[:, None].expand(-1, new_inputs.shape[1], -1)
            path_inputs = new_inputs[:rows].gather(2, indices)
            self._store_conv_inputs(layer, torch.cat([state, path_inputs], 2), counts)
        for layer, result in self.tree_results.items():
            state = self.recurrent_states[layer][:rows]
            segment = self._current_predecessors().segments[0]
            state.copy_(result.state_after(state, last, segment))

    def _current_predecessors(self) -> Predecessors:
        assert self.predecessors is not None, "set `predecessors` before a pass"
        return self.predecessors

    def _store_conv_inputs(self, layer: int, line: torch.Tensor, counts: torch.Tensor) -> None:
        """Store the last W - 1 inputs of every batch row as the convolution state of a layer.

        line: (B, D, W - 1 + Q), the previous convolution state and then Q new inputs
        counts: (B,) int64, number of new inputs of every row without padding
        """
        state = self.conv_states[layer]
        offsets = torch.arange(state.shape[2], device=counts.device)
        indices = counts[:, None] + offsets  # (B, W - 1)
        state[: len(line)] = line.gather(2, indices[:, None].expand(-1, line.shape[1], -1))

    def convolve(
        self,
        layer: int,
        hidden_states: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        activation: str | None = None,
        **_: object,
    ) -> torch.Tensor:
        """Convolve hidden states along the path of every position, in place of `causal_conv1d_fn`.

        layer: index of the layer
        hidden_states: (B, D, Q)
        weight: (D, W)
        bias: (D,)
        activation: name of an activation in transformers' ACT2FN

        Returns the outputs (B, D, Q).
        """
        predecessors = self._current_predecessors()
        rows = hidden_states.shape[0]
        channels = hidden_states.shape[1]
        kernel_size = weight.shape[1]
        state = self.conv_states.get(layer)
        if state is None:
            self.observed_shapes.convolution[layer] = (channels, kernel_size - 1)
            state = hidden_states.new_zeros(rows, channels, kernel_size - 1)
        line = torch.cat([state[:rows], hidden_states], 2)
        padded_line = torch.cat([torch.zeros_like(line[:, :, :1]), line], 2).float()

        result = torch.zeros_like(hidden_states, dtype=torch.float32)
        input_indices = predecessors.conv_input_indices(kernel_size)
        factors = weight.float().unbind(1)[::-1]
        for indices, factor in zip(input_indices, factors, strict=True):
            inputs = padded_line.gather(2, indices.expand(-1, channels, -1))
            result += inputs * factor[:, None]
        if bias is not None:
            result += bias.float()[:, None]

        if predecessors.ancestors is not None:
            self.tree_conv_inputs[layer] = hidden_states
        elif layer in self.conv_states:
            assert predecessors.counts is not None
            self._store_conv_inputs(layer, line, predecessors.counts)
        if activation is not None:
            result = ACT2FN[activation](result)
        return result.to(hidden_states.dtype)

    def gated_delta_rule(
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
        """Compute the recurrence of Gated DeltaNet or KDA.

        layer: index of the layer
        query, key: (B, Q, number of heads, K), where the number of heads is H or a divisor of H
        value: (B, Q, H, E)
        g: log decay, (B, Q, H) for Gated DeltaNet, (B, Q, H, K) for KDA
        beta: (B, Q, H), write strength

        Returns the outputs (B, Q, H, E) and the last state (B, H, K, E).
        """
        heads = value.shape[2]
        queries = transpose_to_heads_first(query, heads)
        keys = transpose_to_heads_first(key, heads)
        values = transpose_to_heads_first(value, heads)
        if use_qk_l2norm_in_kernel:
            queries = queries * (queries.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            keys = keys * (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        queries = queries * queries.shape[-1] ** -0.5
        decay = transpose_to_heads_first(g if g.ndim == 4 else g[..., None], heads)
        write_strength = transpose_to_heads_first(beta[..., None], heads)
        outputs, state = self._run_recurrence(layer, queries, keys, values, decay, write_strength)
        return outputs.to(query.dtype), state

    def mamba2_scan(
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
        """Compute the recurrence of Mamba-2. The argument names are those of `mamba2_chunk_scan`;
        the arguments B, C and D are not the dimensions of the same letters.

        layer: index of the layer
        hidden_states: (batch rows, Q, H, E)
        dt: step sizes, (batch rows, Q, H)
        A, D: (H,) each B, C: (batch rows, Q, number of heads, K) each, where the number of heads is
        H or a divisor of H

        Returns the outputs (batch rows, Q, H, E) float32 and the last state (batch rows, H, K, E).
        """
        heads = hidden_states.shape[2]
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*dt_limit).float()
        values = transpose_to_heads_first(hidden_states.float() * dt[..., None], heads)
        decay = transpose_to_heads_first((A.float() * dt)[..., None], heads)
        queries = transpose_to_heads_first(C, heads)
        keys = transpose_to_heads_first(B, heads)
        outputs, state = self._run_recurrence(layer, queries, keys, values, decay, None)
        if D is not None:
            outputs = outputs + D[:, None] * hidden_states.float()
        return outputs, state

    def _run_recurrence(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        decay: torch.Tensor,
        beta: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the recurrence of a layer, segment by segment.

        The arguments are those of `compute_recurrence_segment` for all Q positions, such as
        `queries` (B, H, Q, K). Returns the outputs (B, Q, H, E) and the last state (B, H, K, E).
        """
        predecessors = self._current_predecessors()
        shape = (queries.shape[1], queries.shape[-1], values.shape[-1])
        if predecessors.valid_mask is not None:  # padding must neither decay nor change the state
            padding = ~predecessors.valid_mask[:, None, :, None]
            decay = decay.masked_fill(padding, 0)
            values = values.masked_fill(padding, 0)
            if beta is not None:
                beta = beta.masked_fill(padding, 0)
        committed_state = self.recurrent_states.get(layer)
        if committed_state is None:
            self.observed_shapes.recurrence[layer] = shape
            committed_state = queries.new_zeros(len(queries), *shape)
        committed_state = committed_state[: len(queries)]
        state = committed_state

        outputs = []
        for segment in predecessors.segments:
            positions = segment.positions
            result = compute_recurrence_segment(
                queries[:, :, positions],
                keys[:, :, positions],
                values[:, :, positions],
                decay[:, :, positions],
                None if beta is None else beta[:, :, positions],
                state,
                segment,
            )
            outputs.append(result.outputs)
            if predecessors.ancestors is not None:
                self.tree_results[layer] = result
            else:
                last_position = result.keys.shape[2] - 1
                last = torch.full((len(queries),), last_position, device=queries.device)
                state = result.state_after(state, last, segment)
        if layer in self.recurrent_states and state is not committed_state:
            committed_state.copy_(state)
        return torch.cat(outputs, 2).transpose(1, 2).contiguous(), state


class PackedCacheView(RecurrentCacheAdapter):
    """The cache of a forward pass over packed sequences, used in place of a `CacheView`. It stores
    nothing, and records the shapes of what a real cache would store."""

    def __init__(self, documents: torch.Tensor, num_layers: int = 0) -> None:
        """Prepare a forward pass over packed sequences.

        documents: (B, T) int64, document numbers
        num_layers: number of layers that `layer_views` returns a view for
        """
        self.recurrent_states = RecurrentStates(predecessors=Predecessors.of_packed_rows(documents))
        self.num_layers = num_layers
        self.batch_size, self.capacity = documents.shape

    @property
    def shapes(self) -> CacheShapes:
        """Return the shapes of what the layers that have run would have stored in a cache."""
        observed = self.recurrent_states.observed_shapes
        attention = dict(sorted(observed.attention.items()))
        return CacheShapes(attention, observed.convolution, observed.recurrence)

    def layer_views(self) -> Iterator[PackedLayerView]:
        """Yield a new view for each layer in turn. The keys and values of earlier layers can then
        be freed."""
        return (PackedLayerView(self.batch_size, self.capacity) for _ in range(self.num_layers))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the head shapes of keys and values (B, H, Q, E), and return both unchanged."""
        key_shape = (keys.shape[1], keys.shape[3])
        value_shape = (values.shape[1], values.shape[3])
        self.recurrent_states.observed_shapes.attention[layer] = (key_shape, value_shape)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0
