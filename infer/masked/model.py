"""Masked diffusion language models. The wrapper `MaskedModel` returns logits for the token at each
position, given the tokens at all other positions.

A masked diffusion model attends to the whole sequence in both directions. Positions with unknown
tokens contain the mask token (SSD section 3.1). Three kinds of models are supported. Our own models
are Qwen3 models with bidirectional attention; their config.json has the keys `mask_token_id` and
`masked_diffusion: {"shifted": bool}`. LLaDA and Dream run code from their own repositories, if the
user allows this.
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
    resolve_hub_id_or_folder,
)
from infer.targets.masked_models import MASKED_DIFFUSION_TARGET_KIND, read_model_config_dict
from infer.targets.support import get_head_size

# Model types (`model_type` in config.json) whose code is part of transformers. This code accepts
# any 4-D attention mask.
MASKED_MODEL_TYPES_IN_TRANSFORMERS = ("qwen3",)
# Model types that run the code of their repositories. Keys are values of model_type in config.json.
# Values are the id of the mask token if config.json has none, and whether the output at a position
# predicts the token at the next position.
MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE = {"llada": (126336, False), "dream": (151666, True)}


@dataclass
class MaskedModel:
    """A masked diffusion model.

    If `shifted` is true, the output at position i - 1 predicts the token at position i, as in
    models that were converted from autoregressive models. Position 0 then has no prediction.
    """

    # Dataclass of the decoding options and class of the engine for these models, as "module:name".
    options_class: ClassVar = "infer.masked.config:MaskedOptions"
    engine_class: ClassVar = "infer.masked.engine:MaskedEngine"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    mask_token_id: int
    shifted: bool
    name: str = "masked model"
    # Whether the weights are on several devices, and whether they are int8. Both are always false
    # for masked models. They exist because callers read the same attributes of `Target`.
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
        """The Hugging Face configuration of the model."""
        return self.model.config

    @property
    def vocab_size(self) -> int:
        """The vocabulary size."""
        return len(self.head_weight)

    @property
    def embedding_weight(self) -> torch.Tensor:
        """The weight of the input embeddings, (vocab_size, hidden_size)."""
        return cast(torch.Tensor, self.model.get_input_embeddings().weight)

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight of the output embeddings, (vocab_size, hidden_size)."""
        return cast(torch.Tensor, self.model.get_output_embeddings().weight)

    @property
    def context_length_matching_weight_cost(self) -> float:
        """The context length at which computing a position costs twice as much as without context.
        It is infinite here, because the cost of a position does not depend on its place in the
        sequence: every forward pass computes the whole sequence."""
        return math.inf

    @cached_property
    def supports_masks_and_cache(self) -> bool:
        """Whether the model accepts any 4-D attention mask and our KV cache."""
        return self.config.model_type in MASKED_MODEL_TYPES_IN_TRANSFORMERS

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an output (`infer.targets.end_tokens`)."""
        configs = (getattr(self.model, "generation_config", None), self.config)
        return find_eos_token_ids(configs, self.tokenizer, self.vocab_size)

    def compute_logits(
        self,
        ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        output_indices: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits (B, length, vocab_size) for the tokens at the positions of `ids` (not for
        the next tokens). The logits of the mask token are minus infinity.

        ids: (B, length), token ids
        attention_mask: (B, length) bool, false on padding, which is not attended to; None means no
            padding. Only models in MASKED_MODEL_TYPES_IN_TRANSFORMERS support padding.
        output_indices: batch rows (num_selected,) and positions (num_selected,). If given, only the
            logits (num_selected, vocab_size) at these positions are computed, because a large head
            takes most of a small model's time.
        """
        if attention_mask is None:
            attention_mask = torch.ones_like(ids, dtype=torch.bool)
        if not self.supports_masks_and_cache:
            assert attention_mask.all(), "rows of different lengths"
            outputs = self.model(input_ids=ids).logits
            return self._exclude_mask_token(
                self._select_predicting_outputs(outputs, output_indices)
            )

        row_length = ids.shape[1]
        mask = to_additive_mask(attention_mask[:, None, None], self.dtype)
        mask = mask.expand(-1, 1, row_length, -1)  # (B, 1, length, length)
        positions = torch.arange(row_length, device=ids.device)[None]
        hidden = self.compute_hidden(ids, positions, mask)
        return self.compute_head_logits(self._select_predicting_outputs(hidden, output_indices))

    def _select_predicting_outputs(
        self, outputs: torch.Tensor, selected: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        """Return the entries of `outputs` (B, length, ...) that predict the selected positions. If
        the model is shifted, they are the entries one position to the left.

        selected: batch rows and positions; None means all
        """
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
        """Return the final hidden states (B, length, hidden_size) of tokens (B, length) at absolute
        positions (B, length). Only models in MASKED_MODEL_TYPES_IN_TRANSFORMERS support this
        method.

        mask: (B, 1, length, num_keys), additive attention mask
        cache: object with the methods of a Hugging Face cache, such as `DualCacheView`; num_keys is
            then the number of keys that its `update` returns
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

    def compute_head_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., vocab_size) of final hidden states (..., hidden_size). The logits
        of the mask token are minus infinity, since the mask token is never an output."""
        return self._exclude_mask_token(self.model.get_output_embeddings()(hidden))

    def _exclude_mask_token(self, logits: torch.Tensor) -> torch.Tensor:
        """Return a copy of the logits (..., vocab_size) in which the mask token has minus
        infinity."""
        is_mask_token = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(is_mask_token, -torch.inf)

    def allocate_cache(self, rows: int, capacity: int) -> torch.Tensor:
        """Allocate the KV cache, (2 * num_layers, rows, capacity, num_heads, head_size). Index 2i
        of the first axis has the keys of layer i, and index 2i + 1 its values. Raises ValueError if
        the model cannot use our KV cache.

        rows: number of sequences
        capacity: number of positions per sequence
        """
        if not self.supports_masks_and_cache:
            raise ValueError(
                f"cache=dual: {self.name} runs the code of its repository, which does not support "
                "our KV cache; use cache=none"
            )
        config = self.config
        heads = config.num_key_value_heads
        layers = config.num_hidden_layers
        shape = (2 * layers, rows, capacity, heads, get_head_size(config))
        return allocate_zeros(shape, self.dtype, self.device)


def load_masked(
    path: str, dtype: str = "auto", device: str = "auto", trust_remote_code: bool = False
) -> MaskedModel:
    """Load a masked diffusion model from a folder or the Hugging Face hub: one of our own models,
    LLaDA or Dream.

    Raises FileNotFoundError if there is no model at `path`. Raises ValueError, before weights are
    loaded, if the model is of another kind, if it has no mask token, or if it needs code from its
    repository and `trust_remote_code` is false.
    """
    logging.disable_progress_bar()
    config = read_model_config_dict(path)
    mask_token_id, shifted = get_mask_token_and_shift(path, config)
    model_type = config["model_type"]
    needs_remote_code = model_type.lower() in MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE
    if needs_remote_code and not trust_remote_code:
        raise ValueError(
            f"target.path={path}: {model_type} models run code that comes with them; read this "
            "code, then allow it with target.trust_remote_code=true"
        )

    torch_device = resolve_device(device)
    torch_dtype = resolve_dtype(dtype, torch_device)
    folder = Path(resolve_hub_id_or_folder(path))
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
    """Build a model that runs the code of its repository, and load its weights. Raises ValueError
    if the code does not run, or if the weights do not match the code.

    `from_pretrained` of transformers 5 cannot be used: it fails on code that never calls
    `post_init`, such as LLaDA's. It may also leave buffers uninitialised that are not stored, such
    as those of rotary embeddings.
    """
    try:
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
        model = AutoModel.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    except (AttributeError, ImportError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ValueError(
            f"target.path={path}: the model's own code does not run with transformers "
            f"{__version__} ({reason}); install the transformers release that the model's code "
            "was written for"
        ) from error

    weights = {}
    for file in list_weight_files(path):
        weights |= load_file(file)
    mismatched_names = sorted(weights.keys() ^ model.state_dict().keys())
    if mismatched_names:
        raise ValueError(
            f"target.path={path}: {len(mismatched_names)} tensors are only in the weight files or "
            f"only in the model's code, for example {mismatched_names[0]}; download the model "
            "again"
        )
    with explain_load_errors(path):  # fails if tensors have wrong shapes
        model.load_state_dict(weights)
    check_finite(f"target.path={path}", weights.items())
    return model


def get_mask_token_and_shift(path: str, config: dict) -> tuple[int, bool]:
    """Return the id of a model's mask token, and whether the output at a position predicts the
    token at the next position. Raises ValueError if the model is no masked diffusion model, or has
    no mask token.

    path: the target's path, for error messages
    config: content of the model's config.json
    """
    model_type = config["model_type"].lower()
    diffusion_config = config.get(MASKED_DIFFUSION_TARGET_KIND.config_key)
    if model_type in MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE:
        default_mask_token, shifted = MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE[model_type]
    elif model_type in MASKED_MODEL_TYPES_IN_TRANSFORMERS and diffusion_config is not None:
        default_mask_token = None
        shifted = bool(diffusion_config.get("shifted", False))
    else:
        raise ValueError(
            f"target.path={path}: this {config['model_type']} model is no masked diffusion model "
            f"(its config.json has no key {MASKED_DIFFUSION_TARGET_KIND.config_key}); use LLaDA, "
            "Dream, or a masked diffusion model that was trained with this program"
        )

    mask_token_id = config.get("mask_token_id")
    if mask_token_id is None:
        mask_token_id = default_mask_token
    if mask_token_id is None:
        raise ValueError(
            f"target.path={path}: this model has no mask token; add mask_token_id, the id of the "
            "mask token, to its config.json"
        )
    return mask_token_id, shifted
