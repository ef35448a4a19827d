"""Masked diffusion language models behind one door: which token stands at every position, given all the others.

A masked diffusion model sees a whole row at once, in both directions, and says for every position which token stands
there; unknown positions hold its mask token (SSD section 3.1). Three kinds are known: our own, a Qwen3 that is run with
an attention mask that hides nothing (its config.json has `mask_token_id` and `masked_diffusion: {"shifted": bool}`),
and LLaDA and Dream with the code that comes with them, if the user allows that.

B rows, T positions, Q positions asked for, D hidden size, V vocabulary.
"""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from infer.architecture import head_size
from infer.cache import KVCache, Window
from infer.masks import additive
from infer.target import resolve_device, resolve_dtype

NATIVE = ("qwen3",)  # run by transformers' own code, which takes any 4-D mask


@dataclass(frozen=True)
class Foreign:
    """What is known of a kind of model that brings its own code."""

    mask_token_id: int  # where its config.json names none
    shifted: bool


FOREIGN = {"llada": Foreign(126336, shifted=False), "dream": Foreign(151666, shifted=True)}


@dataclass
class MaskedModel:
    """A masked diffusion model. `shifted`: its output at position i - 1 is about the token at position i, as in models
    that were autoregressive once; position 0 has no prediction then."""

    model: nn.Module
    tokenizer: object | None
    mask_token_id: int
    shifted: bool
    name: str = "masked model"

    @property
    def device(self) -> torch.device:
        return self.model.get_input_embeddings().weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.get_input_embeddings().weight.dtype

    @property
    def config(self):
        return self.model.config

    @cached_property
    def native(self) -> bool:
        """Whether it takes any attention mask and a cache of ours."""
        return self.config.model_type in NATIVE

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """Tokens that end a text: the generation config's, else the config's."""
        generation = getattr(self.model, "generation_config", None)
        ids = getattr(generation, "eos_token_id", None)
        ids = getattr(self.config, "eos_token_id", None) if ids is None else ids
        return frozenset([ids] if isinstance(ids, int) else ids or [])

    def logits(
        self, ids: torch.Tensor, allowed: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits for the token AT every position: ids (B, T) -> (B, T, V), the mask token's own at minus infinity.

        Every position sees the whole row, or what `allowed` says, bool: (B, T) positions that may be seen (not the
        padding), or (B, T, T) which position (second axis) sees which (third). `positions` (T,) asks for some positions
        of the rows only: (B, Q, V); a large head is most of a small model's time. Raises ValueError for a mask with a
        model that takes none.
        """
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        at = (positions - int(self.shifted)).clamp(min=0)  # whose outputs are about these positions
        if not self.native:
            if allowed is not None and not bool(allowed.all()):
                raise ValueError(f"{self.name}: this kind of model takes no padding: give rows of one length")
            return self._unmasked(self.model(input_ids=ids).logits[:, at])
        if allowed is None:
            allowed = torch.ones(1, ids.shape[1], dtype=torch.bool, device=ids.device)
        seen = allowed[:, None] if allowed.dim() == 2 else allowed  # (B, 1 or T, T)
        mask = additive(seen[:, None].expand(-1, 1, ids.shape[1], -1), self.dtype)  # (B, 1, T, T)
        places = torch.arange(ids.shape[1], device=ids.device)[None]
        return self.head(self.hidden(ids, places, mask)[:, at])

    def hidden(
        self, ids: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, window: Window | None = None
    ) -> torch.Tensor:
        """Final hidden states (B, Q, D) of tokens (B, Q) at absolute positions `places` (B, Q), under an additive mask
        (B, 1, Q, S); with a cache's window the S keys are its. Native models only."""
        body = self.model.get_decoder()
        out = body(
            input_ids=ids,
            position_ids=places,
            attention_mask=mask,
            past_key_values=window,
            use_cache=window is not None,
        )
        return out.last_hidden_state

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., D) to logits (..., V), the mask token's at minus infinity: a mask is never written."""
        return self._unmasked(self.model.get_output_embeddings()(hidden))

    def _unmasked(self, logits: torch.Tensor) -> torch.Tensor:
        never = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(never, -torch.inf)

    def cache(self, capacity: int) -> KVCache:
        """Room for one row of up to `capacity` positions. Raises ValueError for models that have no use for it."""
        if not self.native:
            raise ValueError(
                f"cache=dual: {self.name} is run by its own code, which takes no cache of ours: use cache=none"
            )
        config = self.config
        layers, heads = config.num_hidden_layers, config.num_key_value_heads
        return KVCache(layers, 1, capacity, heads, head_size(config), self.dtype, self.device)


def load_masked(path: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False) -> MaskedModel:
    """Loads a masked diffusion model from a folder or the hub: one of ours, LLaDA or Dream.

    Raises ValueError, before weights are loaded, for a model of another kind, for one without a mask token, and for
    one whose own code the user has not allowed; FileNotFoundError for one that is not there.
    """
    from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = _config(path, PretrainedConfig)
    mask, shifted = mask_and_shift(path, config)
    foreign = config["model_type"].lower() in FOREIGN
    if foreign and not trust_remote_code:
        raise ValueError(
            f"{path}: {config['model_type']} models run code that comes with them: read it, then allow it with "
            "trust_remote_code=true"
        )
    place = resolve_device(device)
    kind = AutoModel if foreign else AutoModelForCausalLM
    options = {} if foreign else {"attn_implementation": "sdpa"}
    allow = foreign and trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=allow)
    model = kind.from_pretrained(path, dtype=resolve_dtype(dtype, place), trust_remote_code=allow, **options)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    if not 0 <= mask < vocabulary:
        raise ValueError(f"{path}: mask_token_id={mask} is no token of its vocabulary of {vocabulary}")
    return MaskedModel(model.to(place).eval().requires_grad_(False), tokenizer, mask, shifted, name=path)


def _config(path: str, reader: type) -> dict:
    """A model's config.json. Raises FileNotFoundError where there is none."""
    try:
        config, _ = reader.get_config_dict(path)
    except OSError:
        config = {}
    if not config.get("model_type"):
        raise FileNotFoundError(
            f"{path}: found neither as a model's folder nor on the model hub from here: give the folder of a masked "
            f"diffusion model{'' if Path(path).exists() else ' that exists'}"
        )
    return config


def mask_and_shift(path: str, config: dict) -> tuple[int, bool]:
    """The mask token, and whether outputs are about the next position, from a config.json. Raises ValueError for what
    is no masked diffusion model, and for one without a mask token."""
    kind = config["model_type"].lower()
    mask = config.get("mask_token_id")
    if kind in FOREIGN:
        return FOREIGN[kind].mask_token_id if mask is None else mask, FOREIGN[kind].shifted
    ours = config.get("masked_diffusion")
    if kind not in NATIVE or ours is None:
        raise ValueError(
            f"{path}: a {config['model_type']} model that was not trained to fill masks (no masked_diffusion in its "
            f"config.json): give one of ours, LLaDA or Dream"
        )
    if mask is None:
        raise ValueError(f"{path}: this model has no mask token: its config.json needs mask_token_id=<token id>")
    return mask, bool(ours.get("shifted", False))
