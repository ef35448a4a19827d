"""Masked diffusion language models behind one wrapper: logits for the token at every position,
given all other tokens.

A masked diffusion model attends to the whole row in both directions and predicts the token at every
position. Unknown positions contain its mask token (SSD section 3.1). Three kinds are supported: our
own, a Qwen3 with bidirectional attention (its config.json has `mask_token_id` and
`masked_diffusion: {"shifted": bool}`); and LLaDA and Dream with the code of their repositories, if
the user allows it.

B rows, T positions, Q queries or predicted positions, S keys, H key/value heads, E head size, D
hidden size, V vocabulary size.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import ClassVar, cast

import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModel,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    __version__,
)
from transformers.utils import logging

from infer.attention.kv_cache import allocate_zeros
from infer.attention.masks import to_additive_mask
from infer.targets.checks import check_finite
from infer.targets.end_tokens import find_eos_token_ids
from infer.targets.loading import (
    explain_load_errors,
    list_weight_files,
    load_and_check_model,
    load_config,
    load_tokenizer,
    read_weight_shapes,
    resolve_device,
    resolve_dtype,
    resolve_path,
)
from infer.targets.masked_models import MASKED_DIFFUSION_TARGET_KIND, read_config_dict
from infer.targets.support import get_head_size

# Model types that run on transformers' own code, which accepts any 4-D attention mask.
MASKED_MODEL_TYPES_IN_TRANSFORMERS = ("qwen3",)
# `MASKED_DIFFUSION_TARGET_KIND.model_types`, which run on the code of their repositories -> the mask token if
# config.json has none, and whether the model is shifted.
REMOTE_CODE_MODEL_TYPES = {"llada": (126336, False), "dream": (151666, True)}


@dataclass
class MaskedModel:
    """A masked diffusion model.

    With `shifted`, its output at position i - 1 predicts the token at position i, as in models that
    were converted from autoregressive ones. Position 0 then has no prediction.
    """

    # See `infer.api.NonCausalTarget`.
    options_class: ClassVar = "infer.masked.config:MaskedOptions"
    engine_class: ClassVar = "infer.masked.engine:MaskedEngine"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    mask_token_id: int
    shifted: bool
    name: str = "masked model"
    # As in `Target`: whether weights are on several devices, and whether they are quantised.
    is_sharded: bool = False
    is_int8: bool = False

    @property
    def device(self) -> torch.device:
        """The device of the input embeddings."""
        return self.embedding_weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the input embeddings."""
        return self.embedding_weight.dtype

    @property
    def config(self) -> PretrainedConfig:
        """The Hugging Face configuration."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """The vocabulary size V."""
        return len(self.head_weight)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """The weight of the input embeddings, (V, D)."""
        return cast(torch.Tensor, self.model.get_input_embeddings().weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight of the output embeddings, (V, D)."""
        return cast(torch.Tensor, self.model.get_output_embeddings().weight)

    @property
    def attention_break_even_length(self) -> float:
        """Infinite: passes compute whole rows, so no position costs more than another."""
        return math.inf

    @cached_property
    def takes_attention_masks(self) -> bool:
        """Whether the model accepts any attention mask and our cache."""
        return self.config.model_type in MASKED_MODEL_TYPES_IN_TRANSFORMERS

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end an output (`infer.targets.end_tokens`)."""
        configs = (getattr(self.model, "generation_config", None), self.config)
        return find_eos_token_ids(configs, self.tokenizer, self.vocab_size)

    def logits(
        self,
        ids: torch.Tensor,
        allowed: torch.Tensor | None = None,
        selected: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits for the token AT every position: ids (B, T) -> (B, T, V). Those of the mask
        token are minus infinity.

        Every position attends to the positions of its row that are `allowed` (B, T) bool, by
        default all. Padding is not allowed, and only native models support it. With `selected`,
        rows (Q,) and positions (Q,), only the logits of these are computed, (Q, V); a large head is
        most of a small model's time.
        """
        if allowed is None:
            allowed = torch.ones_like(ids, dtype=torch.bool)
        if not self.takes_attention_masks:
            assert allowed.all(), "rows of different lengths"
            outputs = self.model(input_ids=ids).logits
            return self._exclude_mask_token(self._select_outputs(outputs, selected))

        row_length = ids.shape[1]
        mask = to_additive_mask(allowed[:, None, None], self.dtype)
        mask = mask.expand(-1, 1, row_length, -1)  # (B, 1, T, T)
        positions = torch.arange(row_length, device=ids.device)[None]
        hidden = self.compute_hidden(ids, positions, mask)
        return self.head(self._select_outputs(hidden, selected))

    def _select_outputs(
        self, outputs: torch.Tensor, selected: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Select the outputs (B, T, ...) that predict the selected positions, or all positions."""
        if selected is None:
            rows = slice(None)
            positions = torch.arange(outputs.shape[1], device=outputs.device)
        else:
            rows, positions = selected
        return outputs[rows, (positions - int(self.shifted)).clamp(min=0)]

    def compute_hidden(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor,
        cache: object | None = None,
    ) -> torch.Tensor:
        """Return the final hidden states (B, Q, D) of tokens (B, Q) at absolute positions (B, Q).

        `mask` (B, 1, Q, S) is additive. With a cache, S counts the keys that its `update` returns.
        For native models only.
        """
        decoder = self.model.get_decoder()
        output = decoder(
            input_ids=ids,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        return output.last_hidden_state

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V) of hidden states (..., D). Those of the mask token are minus
        infinity, since it is never an output."""
        return self._exclude_mask_token(self.model.get_output_embeddings()(hidden))

    def _exclude_mask_token(self, logits: torch.Tensor) -> torch.Tensor:
        """Set the logits of the mask token to minus infinity."""
        is_mask_token = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(is_mask_token, -torch.inf)

    def allocate_cache(self, rows: int, capacity: int) -> torch.Tensor:
        """Allocate keys and values, (2 * layers, rows, capacity, H, E): keys of layer i at 2i,
        values at 2i + 1. Raises ValueError for models that cannot use them."""
        if not self.takes_attention_masks:
            raise ValueError(
                f"cache=dual: {self.name} runs on its own code, which does not support our cache: use cache=none"
            )
        config = self.config
        heads = config.num_key_value_heads
        layers = config.num_hidden_layers
        shape = (2 * layers, rows, capacity, heads, get_head_size(config))
        return allocate_zeros(shape, self.dtype, self.device)


def load_masked(
    path: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> MaskedModel:
    """Load a masked diffusion model from a folder or the hub: one of ours, LLaDA or Dream.

    Raises ValueError, before weights are loaded, for a model of another kind, for one without a
    mask token, and for one whose own code the user has not allowed. Raises FileNotFoundError if
    there is no model.
    """
    logging.disable_progress_bar()
    config = read_config_dict(path)
    mask_token_id, shifted = get_mask_token_and_shift(path, config)
    model_type = config["model_type"]
    needs_remote_code = model_type.lower() in REMOTE_CODE_MODEL_TYPES
    if needs_remote_code and not trust_remote_code:
        raise ValueError(
            f"target.path={path}: {model_type} models run code that comes with them: read it, then allow it with target.trust_remote_code=true"
        )

    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    folder = Path(resolve_path(path))
    if folder.is_dir():
        read_weight_shapes(path, folder)
    tokenizer = load_tokenizer(path, needs_remote_code and trust_remote_code)
    if needs_remote_code:
        model = load_remote_code_model(path, torch_dtype, trust_remote_code)
    else:
        load_config(path)
        model = load_and_check_model(path, {"dtype": torch_dtype, "attn_implementation": "sdpa"})
    model = model.to(torch_device).eval().requires_grad_(False)
    return MaskedModel(cast(PreTrainedModel, model), tokenizer, mask_token_id, shifted, name=path)


def load_remote_code_model(
    path: str, dtype: torch.dtype, trust_remote_code: bool
) -> PreTrainedModel:
    """Build a model that runs on the code of its repository, and load its weights.

    `from_pretrained` of transformers 5 fails on such code (LLaDA's never calls `post_init`), and
    may leave buffers that are not stored uninitialised, such as those of rotary embeddings. Raises
    ValueError if the code does not run or the weights do not match it.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"target.path={path}: the model's own code does not run with transformers {__version__} ({reason}): install the release that it was written for"
        ) from error

    weights = {}
    for file in list_weight_files(path):
        weights |= load_file(file)
    mismatched_names = sorted(weights.keys() ^ model.state_dict().keys())
    if mismatched_names:
        raise ValueError(
            f"target.path={path}: the weight files and the model's code do not have the same weights, for example {mismatched_names[0]}"
        )
    with explain_load_errors(path):  # tensors of other shapes
        model.load_state_dict(weights)
    check_finite(f"target.path={path}", weights.items())
    return model


def get_mask_token_and_shift(path: str, config: dict) -> tuple[int, bool]:
    """Return the mask token, and whether the model is shifted, from a config.json. Raises
    ValueError if the model is no masked diffusion model, or has no mask token."""
    model_type = config["model_type"].lower()
    diffusion_config = config.get(MASKED_DIFFUSION_TARGET_KIND.config_key)
    if model_type in REMOTE_CODE_MODEL_TYPES:
        default_mask_token, shifted = REMOTE_CODE_MODEL_TYPES[model_type]
    elif model_type in MASKED_MODEL_TYPES_IN_TRANSFORMERS and diffusion_config is not None:
        default_mask_token = None
        shifted = bool(diffusion_config.get("shifted", False))
    else:
        raise ValueError(
            f"target.path={path}: this {config['model_type']} model is no masked diffusion model (no {MASKED_DIFFUSION_TARGET_KIND.config_key} in its config.json): give one of ours, LLaDA or Dream"
        )

    mask_token_id = config.get("mask_token_id")
    if mask_token_id is None:
        mask_token_id = default_mask_token
    if mask_token_id is None:
        raise ValueError(
            f"target.path={path}: this model has no mask token: its config.json needs mask_token_id=<token id>"
        )
    return mask_token_id, shifted
