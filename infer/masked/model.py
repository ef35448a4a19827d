"""A wrapper of masked diffusion language models. It returns logits for the token at each position,
given the tokens at all other positions.

A masked diffusion model attends to the whole row in both directions, and predicts the token at each
position. Positions with unknown tokens contain the mask token (SSD section 3.1). Three kinds of
models are supported. Our own models are Qwen3 models with bidirectional attention, and their
config.json has the keys `mask_token_id` and `masked_diffusion: {"shifted": bool}`. LLaDA and Dream
run the code of their repositories, if the user allows this.

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
from infer.targets.masked_models import MASKED_DIFFUSION_TARGET_KIND, read_model_config_dict
from infer.targets.support import get_head_size

# Native model types: they run the code of transformers, which accepts any 4-D attention mask.
MASKED_MODEL_TYPES_IN_TRANSFORMERS = ("qwen3",)
# Model types that run the code of their repositories. Key: model_type in config.json. Value: the
# mask token that is used if config.json names none, and whether the model is shifted (see
# MaskedModel).
REMOTE_CODE_MODEL_TYPES = {"llada": (126336, False), "dream": (151666, True)}


@dataclass
class MaskedModel:
    """A masked diffusion model.

    If `shifted` is true, the output at position i - 1 predicts the token at position i, as in
    models that were converted from autoregressive models. Position 0 then has no prediction.
    """

    # The classes of options and engine for such models, see `infer.api.OtherTarget`.
    options_class: ClassVar = "infer.masked.config:MaskedOptions"
    engine_class: ClassVar = "infer.masked.engine:MaskedEngine"
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    mask_token_id: int
    shifted: bool
    name: str = "masked model"
    # Whether weights are on several devices, and whether weights are int8. `Target` has these
    # attributes too.
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
    def context_length_matching_weight_cost(self) -> float:
        """The context length at which a position costs twice as much as without context. It is
        infinite here: forward passes compute whole rows, so all positions cost the same."""
        return math.inf

    @cached_property
    def takes_attention_masks(self) -> bool:
        """Whether the model accepts any 4-D attention mask and our KV cache."""
        return self.config.model_type in MASKED_MODEL_TYPES_IN_TRANSFORMERS

    @cached_property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids of the tokens that end an output, see `infer.targets.end_tokens`."""
        configs = (getattr(self.model, "generation_config", None), self.config)
        return find_eos_token_ids(configs, self.tokenizer, self.vocab_size)

    def logits(
        self,
        ids: torch.Tensor,
        allowed: torch.Tensor | None = None,
        selected: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Return logits (B, T, V) for the tokens ids (B, T): the logits at a position are for the
        token at this position, not for the next token. The logits of the mask token are minus
        infinity.

        Each position attends to the positions of its row where `allowed` (B, T) bool is true. By
        default these are all positions. `allowed` must be false for padding; only models in
        MASKED_MODEL_TYPES_IN_TRANSFORMERS support padding. `selected` consists of rows (Q,) and
        positions (Q,). If it is given, only the logits (Q, V) of these positions are computed,
        since a large output head takes most of a small model's time.
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
        """Return those of the outputs (B, T, ...) that predict the selected positions. If
        `selected` is None, all positions are selected."""
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

        `mask` (B, 1, Q, S) is an additive attention mask. With a cache, S is the number of keys
        that the cache's `update` returns. Only models in MASKED_MODEL_TYPES_IN_TRANSFORMERS support
        this method.
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
        """Return the logits (..., V) of hidden states (..., D). The logits of the mask token are
        minus infinity, since the mask token is never an output."""
        return self._exclude_mask_token(self.model.get_output_embeddings()(hidden))

    def _exclude_mask_token(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the logits (..., V) with minus infinity for the mask token."""
        is_mask_token = torch.arange(logits.shape[-1], device=logits.device) == self.mask_token_id
        return logits.masked_fill(is_mask_token, -torch.inf)

    def allocate_cache(self, rows: int, capacity: int) -> torch.Tensor:
        """Allocate the KV cache, (2 * layers, rows, capacity, H, E). Index 2i of the first axis has
        the keys of layer i, and index 2i + 1 the values of layer i. Raises ValueError if the model
        cannot use our KV cache."""
        if not self.takes_attention_masks:
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

    Raises ValueError, before weights are loaded, if the model is of another kind, if it has no mask
    token, or if it needs code from its repository and `trust_remote_code` is false. Raises
    FileNotFoundError if there is no model at `path`.
    """
    logging.disable_progress_bar()
    config = read_model_config_dict(path)
    mask_token_id, shifted = get_mask_token_and_shift(path, config)
    model_type = config["model_type"]
    needs_remote_code = model_type.lower() in REMOTE_CODE_MODEL_TYPES
    if needs_remote_code and not trust_remote_code:
        raise ValueError(
            f"target.path={path}: {model_type} models run code that comes with them; read this "
            "code, then allow it with target.trust_remote_code=true"
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
    """Build a model that runs the code of its repository, and load its weights.

    This does not use `from_pretrained` of transformers 5, which fails on such code: LLaDA's code
    never calls `post_init`. `from_pretrained` may also leave buffers uninitialised that are not
    stored, such as those of rotary embeddings. Raises ValueError if the code does not run, or if
    the weights do not match the code.
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
            f"target.path={path}: the weight files and the model's code do not have the same "
            f"weights, for example {mismatched_names[0]}; download the model again"
        )
    with explain_load_errors(path):  # raised if tensors have other shapes
        model.load_state_dict(weights)
    check_finite(f"target.path={path}", weights.items())
    return model


def get_mask_token_and_shift(path: str, config: dict) -> tuple[int, bool]:
    """Return the id of the mask token, and whether the model is shifted (see MaskedModel). `config`
    is the content of config.json. Raises ValueError if the model is no masked diffusion model, or
    has no mask token."""
    model_type = config["model_type"].lower()
    diffusion_config = config.get(MASKED_DIFFUSION_TARGET_KIND.config_key)
    if model_type in REMOTE_CODE_MODEL_TYPES:
        default_mask_token, shifted = REMOTE_CODE_MODEL_TYPES[model_type]
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
