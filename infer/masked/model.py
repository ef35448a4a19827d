"""Masked diffusion language models behind one wrapper: logits for the token at every position,
given all the others.

A masked diffusion model attends to a whole row in both directions and predicts the token at every
position; unknown positions hold its mask token (SSD section 3.1). Three kinds are supported: our
own, a Qwen3 under an attention mask that hides nothing (its config.json has `mask_token_id` and
`masked_diffusion: {"shifted": bool}`), and LLaDA and Dream with the code of their repositories, if
the user allows it.

B rows, T positions, Q queries or positions asked for, D hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModel, __version__
from transformers.utils import logging

from infer.attention.kv_cache import zeros
from infer.attention.masks import additive
from infer.targets.checks import check_finite
from infer.targets.ends import end_tokens
from infer.targets.kinds import MASKED, read_config
from infer.targets.loading import (
    explain_load_errors,
    load_checked,
    load_config,
    load_tokenizer,
    read_folder,
    resolve_device,
    resolve_dtype,
    resolve_path,
    weight_files,
)
from infer.targets.support import head_size

NATIVE = ("qwen3",)  # run by transformers' own code, which takes any 4-D mask


# `MASKED.model_types`, which bring their own code -> the mask token, where config.json names none,
# and whether they are shifted
FOREIGN = {"llada": (126336, False), "dream": (151666, True)}


@dataclass
class MaskedModel:
    """A masked diffusion model. `shifted`: its output at position i - 1 predicts the token at
    position i, as in models converted from autoregressive ones; position 0 then has no
    prediction."""

    options_class: ClassVar = "infer.masked.config:MaskedOptions"  # see `infer.api.OtherTarget`
    engine_class: ClassVar = "infer.masked.engine:MaskedEngine"
    model: nn.Module
    tokenizer: object | None
    mask_token_id: int
    shifted: bool
    name: str = "masked model"
    spread: bool = False  # see `Target`
    quantised: bool = False  # likewise

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def config(self):
        return self.model.config

    @property
    def vocabulary(self) -> int:
        """V."""
        return len(self.head_weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """(V, D)"""
        return self.model.get_output_embeddings().weight

    @property
    def context_reach(self) -> float:
        """Infinite: passes compute whole rows, whose contexts are not counted apart."""
        return math.inf

    @cached_property
    def native(self) -> bool:
        """Whether it takes any attention mask and our cache."""
        return self.config.model_type in NATIVE

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end an output (`infer.targets.ends`)."""
        configs = (getattr(self.model, "generation_config", None), self.config)
        return end_tokens(configs, self.tokenizer, self.vocabulary)

    def logits(
        self,
        ids: torch.Tensor,
        allowed: torch.Tensor | None = None,
        at: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits for the token AT every position: ids (B, T) -> (B, T, V), the mask token's
        at minus infinity.

        Every position attends to the whole row, or to what is `allowed` (B, T) bool, not to
        padding, which only native models take. `at` asks for some positions only, rows (Q,) and
        positions (Q,): (Q, V); a large head is most of a small model's time."""
        allowed = torch.ones_like(ids, dtype=torch.bool) if allowed is None else allowed
        if not self.native:
            assert allowed.all(), "rows of unlike lengths"
            return self._unmasked(self._about(self.model(input_ids=ids).logits, at))
        mask = additive(allowed[:, None, None], self.dtype).expand(
            -1, 1, ids.shape[1], -1
        )  # (B, 1, T, T)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.head(self._about(self.hidden(ids, places, mask), at))

    def _about(
        self, outputs: torch.Tensor, at: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Select the outputs (B, T, ...) that predict every position, or those asked for."""
        rows, positions = at or (slice(None), torch.arange(outputs.shape[1], device=outputs.device))
        return outputs[rows, (positions - int(self.shifted)).clamp(min=0)]

    def hidden(
        self,
        ids: torch.Tensor,
        places: torch.Tensor,
        mask: torch.Tensor,
        cache: object | None = None,
    ) -> torch.Tensor:
        """Return final hidden states (B, Q, D) of tokens (B, Q) at absolute positions `places` (B,
        Q), under an additive mask (B, 1, Q, S); with a cache, S are the keys that its `update`
        gives. Native models only."""
        body = self.model.get_decoder()
        out = body(
            input_ids=ids,
            position_ids=places,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return out.last_hidden_state

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) of hidden states (..., D), the mask token's at minus infinity: it
        is never written."""
        return self._unmasked(self.model.get_output_embeddings()(hidden))

    def _unmasked(self, logits: torch.Tensor) -> torch.Tensor:
        never = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(never, -torch.inf)

    def cache(self, rows: int, capacity: int) -> torch.Tensor:
        """Allocate keys and values of that many positions: (2 * layers, rows, capacity, H, E), keys
        of layer i at 2i, values at 2i + 1. Raises ValueError for models that cannot use them."""
        if not self.native:
            raise ValueError(
                f"cache=dual: {self.name} is run by its own code, which takes no cache of ours: use cache=none"
            )
        config = self.config
        heads = config.num_key_value_heads
        layers = config.num_hidden_layers
        shape = (2 * layers, rows, capacity, heads, head_size(config))
        return zeros(shape, self.dtype, self.device)


def load_masked(
    path: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> MaskedModel:
    """Load a masked diffusion model from a folder or the hub: one of ours, LLaDA or Dream.

    Raises ValueError, before weights are loaded, for a model of another kind, for one without a
    mask token, and for one whose own code the user has not allowed; FileNotFoundError for one that
    is not there.
    """
    logging.disable_progress_bar()
    config = read_config(path)
    mask, shifted = mask_and_shift(path, config)
    foreign = config["model_type"].lower() in FOREIGN
    if foreign and not trust_remote_code:
        raise ValueError(
            f"target.path={path}: {config['model_type']} models run code that comes with them: read it, then allow it "
            "with target.trust_remote_code=true"
        )
    place = resolve_device(device)
    kind = resolve_dtype(dtype, place)
    folder = Path(resolve_path(path))
    if folder.is_dir():
        read_folder(path, folder)
    tokenizer = load_tokenizer(path, foreign and trust_remote_code)
    if foreign:
        model = load_foreign(path, kind, trust_remote_code)
    else:
        load_config(path)
        model = load_checked(path, {"dtype": kind, "attn_implementation": "sdpa"})
    return MaskedModel(
        model.to(place).eval().requires_grad_(False), tokenizer, mask, shifted, name=path
    )


def load_foreign(path: str, dtype: torch.dtype, trust_remote_code: bool) -> nn.Module:
    """Build a model that is run by its own code, and load its weights into it. `from_pretrained` of
    transformers 5 fails on such code (LLaDA's never calls `post_init`), and may leave buffers that
    are not stored, as of rotary embeddings, without values. Raises ValueError where the code does
    not run, or the weights do not match it."""
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (AttributeError, ImportError, KeyError, TypeError) as wrong:
        reason = f"{type(wrong).__name__}: {wrong}"
        raise ValueError(
            f"target.path={path}: the code that comes with it does not run with transformers {__version__} ({reason}): "
            "it needs the release that it was written for"
        ) from wrong
    weights = {
        name: tensor for file in weight_files(path) for name, tensor in load_file(file).items()
    }
    if wrong := sorted(weights.keys() ^ model.state_dict().keys()):
        raise ValueError(
            f"target.path={path}: files and code do not agree on weights, such as {wrong[0]}"
        )
    with explain_load_errors(path):  # tensors of other shapes
        model.load_state_dict(weights)
    check_finite(f"target.path={path}", weights.items())
    return model


def mask_and_shift(path: str, config: dict) -> tuple[int, bool]:
    """Return the mask token, and whether outputs predict the next position, from a config.json.
    Raises ValueError for a model that is no masked diffusion model, and for one without a mask
    token."""
    kind = config["model_type"].lower()
    ours = config.get(MASKED.config_key)
    if kind not in FOREIGN and (kind not in NATIVE or ours is None):
        raise ValueError(
            f"target.path={path}: a {config['model_type']} model that was not trained to fill masks (no "
            "masked_diffusion in its config.json): give one of ours, LLaDA or Dream"
        )
    default, shifted = FOREIGN.get(kind) or (None, bool(ours.get("shifted", False)))
    mask = default if config.get("mask_token_id") is None else config["mask_token_id"]
    if mask is None:
        raise ValueError(
            f"target.path={path}: this model has no mask token: its config.json needs mask_token_id=<token id>"
        )
    return mask, shifted
