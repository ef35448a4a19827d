"""Recurrent layers over draft trees: Gated DeltaNet, KDA, Mamba-2 and short convolutions.

Every node of a tree continues the state of its parent, but no state is stored per node. For all
nodes together, the delta rule is one triangular system under the ancestor mask (Bole, 2608.01651;
TreeWY, 2608.20961), and Mamba-2 is a masked matmul (STree, 2505.14969). A chain of consecutive
tokens is a tree without branches. Prompts, packed sequences and baseline decoding therefore use the
same formulas, for one segment of positions after the other.

The model's own modules keep their weights, projections, gates and norms.
`infer.targets.recurrent_modules` replaces only the functions that the modules call for convolution
and recurrence. The replacements are methods of `RecurrentStates`.

Dimension letters in code comments: B batch rows, H heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch.nn import functional as F
from transformers.activations import ACT2FN

from infer.attention.kv_cache import HeadShape, PackedLayerView, RecurrentCacheStub
from infer.targets.predecessors import Predecessors, RecurrenceSegment


@dataclass(frozen=True)
class RecurrenceSegmentResult:
    """The outputs of one recurrent layer for one segment of positions, and the keys, values and
    decays that these positions write to the layer's state. All tensors are float32."""

    outputs: torch.Tensor  # (B, H, length, value_size)
    keys: torch.Tensor  # (B, H, length, key_size)
    values: torch.Tensor  # (B, H, length, value_size), what each position adds to the state
    # (B, H, length, 1 or key_size), sum of the log decays from the segment's start to the position
    total_decay: torch.Tensor

    def state_after(
        self, state: torch.Tensor, last: torch.Tensor, segment: RecurrenceSegment
    ) -> torch.Tensor:
        """Return the recurrent state after the position `last` of every batch row.

        state: (B, num_heads, key_size, value_size), the state before the segment; the result has
            the same shape
        last: (B,) int64, index of a position within the segment
        segment: the segment that this result belongs to
        """
        rows = torch.arange(len(last), device=last.device)
        on_path = segment.ancestors[rows, :, last][..., None]  # (B, 1, length, 1)
        total_decay = self.total_decay[rows, :, last][:, :, None]  # (B, H, 1, 1 or key_size)
        weights = torch.where(on_path, total_decay - self.total_decay, -torch.inf).exp()
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
    """Compute the outputs of a recurrent layer for one segment of `length` positions.

    queries, keys: (B, num_heads, length, key_size)
    values: (B, num_heads, length, value_size)
    decay: (B, num_heads, length, 1 or key_size), log decay of every position, at most 0; the last
        axis is 1 if all entries of a key have the same decay
    beta: (B, num_heads, length, 1), write strength of the delta rule, which subtracts from a value
        what the state returns for its key; None means that values are added without this
        subtraction (Mamba-2)
    state: (B, num_heads, key_size, value_size), the state before the segment
    segment: tells which positions are ancestors of which
    """
    ancestors = segment.ancestors
    # (B, H, length, 1 or key_size), sum of the log decays from the segment's start to the position
    total_decay = ancestors.to(decay.dtype) @ decay
    state_weight = total_decay.exp()
    if segment.continues_state is not None:
        state_weight = state_weight * segment.continues_state

    if decay.shape[-1] == 1:
        log_weights = (total_decay - total_decay.mT).masked_fill(~ancestors, -torch.inf)
        weights = log_weights.exp()  # (B, H, length, length)

        def score_keys(vectors: torch.Tensor) -> torch.Tensor:
            return (vectors @ keys.mT) * weights
    else:
        log_weights = total_decay[..., :, None, :] - total_decay[..., None, :, :]
        log_weights = log_weights.masked_fill(~ancestors[..., None], -torch.inf)
        decayed_keys = log_weights.exp() * keys[..., None, :, :]  # (B, H, length, length, key_size)

        def score_keys(vectors: torch.Tensor) -> torch.Tensor:
            return (decayed_keys @ vectors[..., None])[..., 0]

    if beta is not None:
        targets = beta * (values - (keys * state_weight) @ state)
        values = torch.linalg.solve_triangular(
            beta * score_keys(keys), targets, upper=False, unitriangular=True
        )
    outputs = (queries * state_weight) @ state + score_keys(queries) @ values
    return RecurrenceSegmentResult(outputs, keys, values, total_decay)


def transpose_and_repeat_heads(states: torch.Tensor, heads: int) -> torch.Tensor:
    """Transpose `states` (B, length, num_state_heads, ...) to (B, heads, length, ...), and convert
    it to float32. If num_state_heads is less than `heads`, each head is repeated; `heads` must be a
    multiple of num_state_heads."""
    states = states.transpose(1, 2).float()
    if states.shape[1] == heads:
        return states
    return states.repeat_interleave(heads // states.shape[1], dim=1)


@dataclass(frozen=True)
class CacheShapes:
    """Shapes of the tensors that a target's layers store for one sequence. Keys are layer indices.
    A layer has no entry in `attention` if it uses the keys and values of another layer."""

    # Values are (shape of the keys, shape of the values), each as (number of heads, head size).
    attention: dict[int, tuple[HeadShape, HeadShape]] = field(default_factory=dict)
    # (channels, kernel_size - 1)
    convolution: dict[int, tuple[int, int]] = field(default_factory=dict)
    # (heads, key_size, value_size)
    recurrence: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    @property
    def has_only_uniform_attention(self) -> bool:
        """Return whether every layer stores keys and values, all with the same number of heads and
        the same head size, and no layer stores a recurrent or convolution state."""
        head_shapes = {shape for pair in self.attention.values() for shape in pair}
        has_states = bool(self.convolution or self.recurrence)
        all_layers = list(range(len(self.attention)))
        return len(head_shapes) == 1 and list(self.attention) == all_layers and not has_states


@dataclass
class RecurrentStates:
    """The states of all recurrent layers, with one batch row per sequence. A state covers exactly
    the cached tokens of its sequence.

    Set `predecessors` before a forward pass. A pass over chains of consecutive tokens updates the
    states to the end of the chains. A pass over draft trees leaves the states unchanged, and stores
    what each tree node would write to them; `commit` then applies the nodes of one path. If no
    states are allocated, as for packed sequences, every batch row begins without a state. The pass
    then only records the shapes of the states in `observed_shapes`.
    """

    # Keys are layer indices. Values are the last inputs of the layer's convolution, (batch_size,
    # channels, kernel_size - 1).
    conv_states: dict[int, torch.Tensor] = field(default_factory=dict)
    # Keys are layer indices. Values are the recurrent states, (batch_size, num_heads, key_size,
    # value_size) float32.
    recurrent_states: dict[int, torch.Tensor] = field(default_factory=dict)
    predecessors: Predecessors | None = None
    # Keys are layer indices. Values are the convolution inputs of the tree nodes, (batch_size,
    # channels, num_nodes).
    tree_conv_inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    # Keys are layer indices. Values are the layer's results for the tree nodes.
    tree_results: dict[int, RecurrenceSegmentResult] = field(default_factory=dict)
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

    def clear_and_take_rows_from(self, first_row: int) -> "RecurrentStates":
        """Set the states of all batch rows from `first_row` on to zero. Return the states of only
        these rows, which share memory with this object."""

        def clear_rows(states_by_layer: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            return {layer: states[first_row:].zero_() for layer, states in states_by_layer.items()}

        return RecurrentStates(clear_rows(self.conv_states), clear_rows(self.recurrent_states))

    def move_row(self, source: int, destination: int) -> None:
        """Copy the states of batch row `source` to batch row `destination`."""
        for states_by_layer in (self.conv_states, self.recurrent_states):
            for states in states_by_layer.values():
                states[destination] = states[source]

    def commit(self, path: torch.Tensor, counts: torch.Tensor) -> None:
        """Update the states of every batch row with the nodes of one path through the draft tree
        that was verified last.

        path: (B, max_path_length) int64, indices of the path's nodes, then padding
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
        """Store the last kernel_size - 1 inputs of every batch row as the convolution state of a
        layer.

        line: (B, channels, kernel_size - 1 + num_new), the previous convolution state and then the
            new inputs
        counts: (B,) int64, number of new inputs of every batch row without padding
        """
        state = self.conv_states[layer]
        offsets = torch.arange(state.shape[2], device=counts.device)
        indices = counts[:, None] + offsets  # (B, kernel_size - 1)
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
        """Convolve the hidden state of every position with those of its predecessors. This method
        replaces `causal_conv1d_fn`.

        layer: index of the layer
        hidden_states: (B, channels, length)
        weight: (channels, kernel_size)
        bias: (channels,)
        activation: name of an activation in transformers' ACT2FN

        Returns the outputs (B, channels, length).
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
            assert predecessors.chain_lengths is not None
            self._store_conv_inputs(layer, line, predecessors.chain_lengths)
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
        query, key: (B, length, num_key_heads, key_size), where num_key_heads divides num_heads
        value: (B, length, num_heads, value_size)
        g: log decay, (B, length, num_heads) for Gated DeltaNet, (B, length, num_heads, key_size)
            for KDA
        beta: (B, length, num_heads), write strength

        Returns the outputs (B, length, num_heads, value_size), and the state after the last
        position (B, num_heads, key_size, value_size).
        """
        heads = value.shape[2]
        queries = transpose_and_repeat_heads(query, heads)
        keys = transpose_and_repeat_heads(key, heads)
        values = transpose_and_repeat_heads(value, heads)
        if use_qk_l2norm_in_kernel:
            queries = queries * (queries.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
            keys = keys * (keys.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        queries = queries * queries.shape[-1] ** -0.5
        decay = transpose_and_repeat_heads(g if g.ndim == 4 else g[..., None], heads)
        write_strength = transpose_and_repeat_heads(beta[..., None], heads)
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
        """Compute the recurrence of Mamba-2. The argument names are those of `mamba2_chunk_scan`.

        layer: index of the layer
        hidden_states: (batch_size, length, num_heads, value_size)
        dt: step sizes, (batch_size, length, num_heads)
        A, D: (num_heads,) each
        B, C: (batch_size, length, num_key_heads, key_size) each, where num_key_heads divides
            num_heads

        Returns the float32 outputs (batch_size, length, num_heads, value_size), and the state after
        the last position (batch_size, num_heads, key_size, value_size).
        """
        heads = hidden_states.shape[2]
        if dt_bias is not None:
            dt = dt + dt_bias.to(dt.dtype)
        if dt_softplus:
            dt = F.softplus(dt)
        dt = dt.clamp(*dt_limit).float()
        values = transpose_and_repeat_heads(hidden_states.float() * dt[..., None], heads)
        decay = transpose_and_repeat_heads((A.float() * dt)[..., None], heads)
        queries = transpose_and_repeat_heads(C, heads)
        keys = transpose_and_repeat_heads(B, heads)
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
        """Compute the recurrence of a layer, one segment of positions after the other.

        The tensors are those of `compute_recurrence_segment`, but for all new positions. Returns
        the outputs (B, length, num_heads, value_size), and the state after the last position (B,
        num_heads, key_size, value_size).
        """
        predecessors = self._current_predecessors()
        shape = (queries.shape[1], queries.shape[-1], values.shape[-1])
        if predecessors.valid_mask is not None:  # padding must leave the state unchanged
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


class UncachedPackedView(RecurrentCacheStub):
    """The cache of a forward pass over packed sequences of training documents, used in place of a
    `CacheView`. It stores no keys, values or states, and records only the shapes that they would
    have in a cache."""

    def __init__(self, documents: torch.Tensor, num_layers: int = 0) -> None:
        """Prepare a forward pass over packed sequences.

        documents: (B, length) int64, number of the document that each token belongs to
        num_layers: number of layers that `layer_views` returns a view for
        """
        self.recurrent_states = RecurrentStates(
            predecessors=Predecessors.of_packed_sequences(documents)
        )
        self.num_layers = num_layers
        self.batch_size, self.capacity = documents.shape

    @property
    def shapes(self) -> CacheShapes:
        """Return the shapes of the tensors that a cache would store for the layers that have
        run."""
        observed = self.recurrent_states.observed_shapes
        attention = dict(sorted(observed.attention.items()))
        return CacheShapes(attention, observed.convolution, observed.recurrence)

    def layer_views(self) -> Iterator[PackedLayerView]:
        """Yield a new view for each layer in turn, so that the keys and values of earlier layers
        can be freed."""
        return (PackedLayerView(self.batch_size, self.capacity) for _ in range(self.num_layers))

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record the shapes of a layer's keys and values, and return both unchanged. Their shapes
        are (B, num_heads, length, head_size)."""
        key_shape = (keys.shape[1], keys.shape[3])
        value_shape = (values.shape[1], values.shape[3])
        self.recurrent_states.observed_shapes.attention[layer] = (key_shape, value_shape)
        return keys, values

    def get_seq_length(self, layer: int = 0) -> int:
        return 0
