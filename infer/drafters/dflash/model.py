"""The DFlash drafter: proposes a whole block of tokens in one pass over the target's hidden states.

B rows, C new context positions, T context length, N anchors, K block size (bonus token and L
drafted positions), D hidden size, H heads, E head size, V vocabulary.

The architecture is that of the public DFlash checkpoints: a few Qwen3 layers whose queries are the
block `[bonus, mask x L]` and whose keys and values come from the normalised, projected context
features (the same for every layer) and from the block itself, at absolute positions. Embedding and
head are the target's. DFlare's (`layer_fusion`; arXiv 2606.02091 and AngelSlim's class) do without
the projection: each layer reads its own learnt mix of the tapped layers, by projections that only
the context has. Training runs `forward`: many blocks of a packed row under one mask, by
`DFlashLayer`. Decoding runs `draft_block`: one block of every row against a cache, by
`infer.targets.lean`, which computes the same from the layers' weights; layers with convolutions run
`DFlashLayer` there too. DDTree section 3 has the marginals that a block yields.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers import PretrainedConfig, Qwen3Config

from infer.attention.kv_cache import KVCache
from infer.attention.masks import Mask
from infer.config import DrafterConfig
from infer.drafters.base import (
    Drafter,
    DrafterLayer,
    DraftState,
    Place,
    attend_cached,
    block_sight,
    default_mask_token,
    masked_attention_behind,
    read_one_tap,
    taps,
)
from infer.drafters.dflash import layouts, writers
from infer.drafters.families import FAMILIES
from infer.kernels.operands import Norm
from infer.targets.layers import decoder_of, join_copies, read_layer
from infer.targets.lean import LeanDecoder
from infer.targets.support import attention_layers
from infer.targets.target import Target


def layer_patterns(config: Qwen3Config) -> list[tuple[bool, int | None]]:
    """Return every layer's pattern: whether it is causal within the block, and its sliding window.
    As serving engines read it, a sliding layer is causal and a full one is not, unless the config
    says `causal` for all."""
    causal = config.dflash_config.get("causal")
    sliding = [kind == "sliding_attention" for kind in config.layer_types]
    return [
        (slides if causal is None else causal, config.sliding_window if slides else None)
        for slides in sliding
    ]


class Convolution(nn.Module):
    """DFlash 2's two convolutions around a sublayer, attention or feed-forward: every slot of a
    block sees a little of the slots before it. A fresh one changes nothing.

    Conv(x)_t = sum_o (base[o] + delta_t[o, group]) x_{t-o}, zero across the block's edge; one
    before the sublayer and one behind it, both with kernels made from what the sublayer is given.

    Q queries of all blocks, W queries of a block, O taps, C channels that share a kernel.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        own = config.dflash_config
        size = config.hidden_size
        self.width = config.block_size
        self.taps = own["conv_kernel_size"]
        self.channels = own["conv_group_size"]
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, size))
        self.kernel_projection = nn.Linear(size, 2 * self.taps * size // self.channels, bias=False)

    def init_weights(self) -> None:
        """Begin as the identity."""
        nn.init.zeros_(self.kernel_projection.weight)
        nn.init.zeros_(self.base_kernel)
        nn.init.ones_(self.base_kernel[:, 0])

    def kernels(self, states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the kernels before and behind the sublayer, (B, Q, O, D) each, from what it is
        given, (B, Q, D)."""
        delta = self.kernel_projection(states).unflatten(
            -1, (2, self.taps, -1)
        )  # (B, Q, 2, O, D / C)
        before, behind = (self.base_kernel + delta.repeat_interleave(self.channels, -1)).unbind(2)
        return before, behind

    def convolve(self, states: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Return states (B, Q, D) under a kernel (B, Q, O, D)."""
        blocks = states.unflatten(1, (-1, self.width))  # (B, N, W, D)
        shifted = [
            F.pad(blocks, (0, 0, tap, 0))[:, :, : self.width].flatten(1, 2)
            for tap in range(self.taps)
        ]
        return (torch.stack(shifted, 2) * kernel).sum(2)


class DFlashLayer(DrafterLayer):
    """Its attention and its MLP stand between two convolutions each, if the config says so."""

    own_weights = (
        "attention_conv.",
        "mlp_conv.",
        "self_attn.k_proj_target.",
        "self_attn.v_proj_target.",
    )

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, config.hidden_size)
        if config.dflash_config.get("layer_fusion"):
            self.self_attn.k_proj_target = deepcopy(self.self_attn.k_proj)
            self.self_attn.v_proj_target = deepcopy(self.self_attn.v_proj)
        self.convolves = bool(config.dflash_config.get("conv_kernel_size"))
        if self.convolves:
            self.attention_conv = Convolution(config)
            self.mlp_conv = Convolution(config)

    def around(self, name: str, states: torch.Tensor, sublayer: Callable) -> torch.Tensor:
        if not self.convolves:
            return sublayer(states)
        convolution = self.get_submodule(f"{name}_conv")
        before, behind = convolution.kernels(states)
        return convolution.convolve(sublayer(convolution.convolve(states, before)), behind)


@dataclass
class DFlashState(DraftState):
    """Keys and values of the context features, and the weights as decoding takes them: a copy where
    training goes on with its own."""

    decoder: LeanDecoder | None  # None where layers convolve, which it does not express
    # features (N, F) to all keys and values (N, layers * 2 * H * E)
    project: Callable[[torch.Tensor], torch.Tensor]
    key_norm: Norm  # weight (layers, H, E)


class DFlash(Drafter):
    """The drafter. Parameters carry the names of the public checkpoint layout. Where the config
    says `sample_from_anchor`, the bonus token's slot drafts too: K slots then draft K tokens."""

    family = FAMILIES["dflash"]
    writers = {
        "dflash": writers.write_public,
        "dflash2": writers.write_dflash2,
        "dspark": writers.write_dspark,
        "specforge": writers.write_specforge,
        "speculators": writers.write_speculators,
        "transformers": writers.write_transformers,
    }
    read = staticmethod(layouts.read)

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.mask_token_id: int = self.own["mask_token_id"]
        self.first_draft_slot = 0 if self.own.get("sample_from_anchor") else 1
        self.num_queries = config.block_size
        self.block_size = self.num_queries + 1 - self.first_draft_slot
        of_layers = layer_patterns(config)
        self.attention_patterns = list(dict.fromkeys(of_layers))
        self.pattern_of_layer = [self.attention_patterns.index(pattern) for pattern in of_layers]
        self.fusion, taps = bool(self.own.get("layer_fusion")), len(self.layer_ids)
        self.context_projections = "_target" if self.fusion else ""
        if self.fusion:  # logits of each layer's mix
            self.layer_fusion_weights = nn.Parameter(torch.empty(config.num_hidden_layers, taps))
        else:
            self.fc = nn.Linear(taps * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.add_ends(config.has_embed_tokens, config.has_lm_head)
        self.add_conditional_head()

    @staticmethod
    def default_layer_ids(target_layers: int, layers: int) -> list[int]:
        """Return the layers that the public drafters tap, as many as they have layers: from layer 1
        to N - 3, evenly. Smaller drafters than there are public ones tap three of a deep target, as
        fewer tell them too little (LOG.md), and one layer the middle of a shallow one."""
        if layers < 3 and target_layers >= 12:
            first = target_layers // 4 - 1
            last = target_layers - 3
            return [first, (first + last) // 2, last]
        if layers == 1:
            return [target_layers // 2]
        return [round(1 + i * (target_layers - 4) / (layers - 1)) for i in range(layers)]

    @staticmethod
    def warm_layers(layer_ids: tuple[int, ...], layers: int, theirs: PretrainedConfig) -> list[int]:
        """Return the target's layers behind the first tapped one, those that attend; none where
        they are too few."""
        attending = attention_layers(theirs)
        behind = [i for i in attending if i > layer_ids[0]]
        chosen = behind[:layers] if len(behind) >= layers else attending[-layers:]
        return chosen if len(chosen) == layers else []

    @staticmethod
    def own_config(options: DrafterConfig, theirs: PretrainedConfig, target: Target | None) -> dict:
        """Return `dflash_config`. Raises ValueError for a mask token outside the target's
        vocabulary."""
        mask = options.mask_token_id
        vocabulary = theirs.vocab_size
        if mask is None:
            mask = default_mask_token(target.tokenizer, vocabulary, target.end_ids) if target else 0
        if not 0 <= mask < vocabulary:
            raise ValueError(
                f"drafter.mask_token_id={mask}: the target's vocabulary has ids 0 to {vocabulary - 1}"
            )
        queries = options.block_size - bool(options.sample_from_anchor)
        own = {"block_size": queries, "mask_token_id": mask} | taps(options, theirs)
        if options.conv_kernel_size:
            own |= {
                "conv_kernel_size": options.conv_kernel_size,
                "conv_group_size": math.gcd(theirs.hidden_size, 16),
            }
        flags = {
            name: vars(options)[name] for name in ("sample_from_anchor", "causal", "layer_fusion")
        }
        own |= (
            {"causal": False} if options.sliding_window else {}
        )  # readers take sliding layers for causal ones
        return own | {key: True for key, value in flags.items() if value}

    def init_weights(self, generator: torch.Generator) -> None:
        super().init_weights(generator)
        if self.fusion:  # as AngelSlim's: the deeper a layer, the deeper the layer that it prefers
            nn.init.zeros_(self.layer_fusion_weights)
            for i, logits in enumerate(self.layer_fusion_weights):
                logits.data[i * len(logits) // len(self.layers)] = 2.0
        for layer in self.layers:
            if layer.convolves:
                layer.attention_conv.init_weights()
                layer.mlp_conv.init_weights()

    def finish_warm_start(
        self, theirs: list[dict], target: Target, generator: torch.Generator | None
    ) -> None:
        """Norm the context as the first layer's states were: its K/V are then exactly the target's
        own."""
        self.hidden_norm.weight.copy_(theirs[0]["input_layernorm.weight"])
        if not self.fusion:
            return read_one_tap(self.fc, 0)
        for layer in self.layers:
            layer.self_attn.k_proj_target.weight.copy_(layer.self_attn.k_proj.weight)
            layer.self_attn.v_proj_target.weight.copy_(layer.self_attn.v_proj.weight)

    def mixes(self, features: torch.Tensor) -> torch.Tensor:
        """Context features (..., len(layer_ids) * D) to each layer's mix of them, (..., layers,
        D)."""
        taps = features.unflatten(-1, (-1, self.config.hidden_size))
        return self.layer_fusion_weights.softmax(-1) @ taps

    def contexts(self, features: torch.Tensor) -> Sequence[torch.Tensor]:
        """Context features (B, T, len(layer_ids) * D) to what each layer's K/V see: (B, T, D)."""
        if self.fusion:
            return self.hidden_norm(self.mixes(features)).unbind(-2)
        return [self.hidden_norm(self.fc(features))] * len(self.layers)

    def block_ids(self, bonus: torch.Tensor) -> torch.Tensor:
        """Bonus tokens (...,) to blocks `[bonus, mask x L]` (..., K)."""
        block = bonus.unsqueeze(-1).repeat_interleave(self.num_queries, dim=-1)
        block[..., 1:] = self.mask_token_id
        return block

    def inputs(
        self, target: Target, ids: torch.Tensor, positions: torch.Tensor, anchors: torch.Tensor
    ):
        """What `forward` takes of packed rows, ids and positions (B, T), beside features and mask:
        the blocks at anchors (B, N), embedded, (B, N*K, D), and their positions (B, N*K)."""
        blocks = self.embed(target, self.block_ids(ids.gather(1, anchors))).flatten(1, 2)
        steps = torch.arange(self.num_queries, device=ids.device)
        return blocks, (positions.gather(1, anchors)[..., None] + steps).flatten(1)

    def forward(
        self,
        features: torch.Tensor,
        positions: torch.Tensor,
        blocks: torch.Tensor,
        block_positions: torch.Tensor,
        *masks: Mask | torch.Tensor | None,
    ) -> torch.Tensor:
        """Training: all blocks of packed rows at once.

        features (B, T, len(layer_ids) * D) and positions (B, T) of the context; blocks (B, N*K, D)
        embedded, at block_positions (B, N*K); masks: `block_mask` of each of the
        `attention_patterns`, from queries of the blocks to keys [context | blocks]. Returns hidden
        states before the head, (B, N*K, D).
        """
        contexts = self.contexts(features)
        block = blocks
        rotary = self.angles(block_positions)
        context_rotary = self.angles(positions)

        def through(
            layer: DFlashLayer, block: torch.Tensor, context: torch.Tensor, mask
        ) -> torch.Tensor:
            before = layer.self_attn.keys_values(
                context, *context_rotary, of=self.context_projections
            )
            return layer(block, rotary, partial(masked_attention_behind, before, mask))

        for layer, context, pattern in zip(
            self.layers, contexts, self.pattern_of_layer, strict=True
        ):
            if self.recompute:  # only `block` and `context` are kept for the backward pass
                block = checkpoint(
                    through, layer, block, context, masks[pattern], use_reentrant=False
                )
            else:
                block = through(layer, block, context, masks[pattern])
        return self.for_head(block)

    def make_state(self, cache: KVCache, angles: tuple[torch.Tensor, torch.Tensor]) -> DFlashState:
        kernels = self.kernels
        eps = self.config.rms_norm_eps
        key_weights = [
            layer.self_attn.k_norm.weight.detach().expand(cache.heads, -1) for layer in self.layers
        ]
        decoder = None
        if not self.layers[0].convolves:
            frozen = not any(parameter.requires_grad for parameter in self.parameters())
            heads = self.config.num_attention_heads, self.config.num_key_value_heads
            modules = zip(
                self.layers if frozen else deepcopy(self.layers), self.pattern_of_layer, strict=True
            )
            layers = [
                read_layer(module, str(pattern), *heads, kernels) for module, pattern in modules
            ]
            decoder = decoder_of(layers, kernels)(
                kernels, layers, Norm(self.norm.weight.detach(), eps)
            )
        return DFlashState(
            cache, angles, decoder, self.projection(), Norm(torch.stack(key_weights), eps)
        )

    def projection(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return what makes all layers' keys and values, (N, layers * 2 * H * E), of features (N,
        F), not yet normed and rotated; where all see the same context, in one matmul."""
        kernels = self.kernels
        norm = Norm(self.hidden_norm.weight.detach(), self.config.rms_norm_eps)
        pairs = [
            layer.self_attn.key_value_projections(self.context_projections) for layer in self.layers
        ]

        if self.fusion:
            each = [join_copies(pair) for pair in pairs]

            def project_mixes(features: torch.Tensor) -> torch.Tensor:
                mixes = kernels.rms_norm(self.mixes(features), norm).unbind(1)
                return torch.cat(
                    [kernels.linear(mix, pair) for mix, pair in zip(mixes, each, strict=True)], 1
                )

            return project_mixes

        fc = join_copies([self.fc])
        together = join_copies([part for pair in pairs for part in pair])

        def project(features: torch.Tensor) -> torch.Tensor:
            return kernels.linear(kernels.rms_norm(kernels.linear(features, fc), norm), together)

        return project

    @torch.no_grad()
    def update_context(self, target, features, tokens, counts, state, on_device=None) -> None:
        """Compute what `Attention.keys_values` does in training, layer by layer; tokens do not
        matter here."""
        cache = state.cache
        layers = len(self.layers)
        rows, width, _ = features.shape
        if cache.widest is not None and width > cache.widest:
            for begin in range(0, width, cache.widest):
                part = slice(begin, begin + cache.widest)
                some = counts and [min(max(count - begin, 0), cache.widest) for count in counts]
                real = None if on_device is None else (on_device - begin).clamp(0, cache.widest)
                self.update_context(target, features[:, part], tokens[:, part], some, state, real)
            return
        projected = state.project(features.flatten(0, 1)).view(
            rows * width, layers, 2 * cache.heads, -1
        )
        window = cache.window(width)
        first_layer = window.layers()[0]
        first_layer.slots = window.slots[:rows].flatten()
        rotation = tuple(
            angle.flatten(0, 1)[:, None] for angle in state.rotary(rows, width)
        )  # (B * C, 1, E)
        self.kernels.qk_norm_rope_write(
            projected, cache.heads, state.key_norm, rotation, first_layer
        )
        cache.advance(counts, on_device)

    def block_states(
        self, target: Target, bonus: torch.Tensor, place: Place, state: DFlashState
    ) -> torch.Tensor:
        """Return the states (B, K, D) of blocks behind bonus tokens (B,), as `for_head` returns
        them. What it computes is `DrafterLayer.forward`'s."""
        (_, rotary, window), decoder = place, state.decoder
        patterns = enumerate(self.attention_patterns)
        masks = {
            str(number): block_sight(place, self.num_queries, pattern)
            for number, pattern in patterns
        }
        states = self.embed(target, self.block_ids(bonus))  # (B, K, D)
        if decoder is None:
            for i, (layer, pattern) in enumerate(
                zip(self.layers, self.pattern_of_layer, strict=True)
            ):
                states = layer(
                    states, rotary, partial(attend_cached, window, i, masks[str(pattern)])
                )
            return self.for_head(states)
        rotation = tuple(angle.flatten(0, 1)[:, None] for angle in rotary)  # (B K, 1, E)
        last = len(self.layers) - 1
        tapped = (last,) if self.raw_states else ()
        rotations = dict.fromkeys(masks, rotation)
        outputs = decoder.run(states.flatten(0, 1), rotations, masks, window.layers(), tapped)
        return outputs[last if self.raw_states else last + 1].unflatten(0, (len(bonus), -1))
