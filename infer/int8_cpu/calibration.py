"""Calibrate int8 targets on sequences that the target generates itself.

For each linear layer, calibration determines the smoothing factors (SmoothQuant), the number of
int8 codes per activation, and the int8 codes of the weights.

The weights are rounded by GPTQ (arXiv 2210.17323, section 3). GPTQ processes the inputs of a layer
in order. After it has rounded the weights of an input, it changes the weights of all later inputs
to compensate for the rounding errors.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from infer.int8_cpu.modules import Int8Embedding, Int8Linear
from infer.int8_cpu.quantisation import quantise_activations
from infer.int8_cpu.weights import MAX_INT8_CODE, compute_weight_scales, round_weight_to_nearest
from infer.utils.jit import FASTMATH_KEEP_ORDER, njit

INT8_CALIBRATION_SEQUENCE_COUNT = 96  # number of sequences that the target generates
INT8_CALIBRATION_TOKENS_PER_SEQUENCE = 128
INT8_CALIBRATION_SAMPLING_TEMPERATURE = 0.7
# The values that are tried for SmoothQuant's alpha. A larger alpha moves more of the differences
# between the ranges of the inputs from the activations to the weights; with alpha 1, all inputs get
# the same range.
SMOOTHQUANT_ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)
# To save time, alpha and the number of codes per activation are chosen by the errors at some of the
# positions only: at every 48th position, and at most 256 positions in total.
MAX_INT8_CALIBRATION_SAMPLE_POSITIONS = 256
INT8_CALIBRATION_SAMPLE_INTERVAL_POSITIONS = 48
# Number of forward passes whose inputs are added to the second moments in one matmul.
MAX_CALIBRATION_BATCHES_PER_MOMENT_UPDATE = 4
# Limit of the relative error of a layer's outputs with one int8 code per activation. If the error
# is larger, the layer gets two codes per activation.
MAX_ERROR_WITH_ONE_ACTIVATION_CODE = 0.02
# GPTQ adds this fraction of the mean diagonal element to the diagonal of the second moments, so
# that the matrix can be inverted.
GPTQ_DAMPING = 0.01
# Number of outputs of a layer whose weights are rounded together. Their weights stay in the L1 or
# L2 cache.
GPTQ_BLOCK_OUTPUTS = 16
# Maximum size of the second moments of the layers that are calibrated in the same run of the model.
MAX_CALIBRATION_SECOND_MOMENT_BYTES = 4e9


@njit(fastmath=FASTMATH_KEEP_ORDER)
def gptq_round_block(weight: np.ndarray, inverse_factor: np.ndarray, codes: np.ndarray) -> None:
    """Round the weights of some outputs of a linear layer by GPTQ, and write the int8 codes.

    weight: (outputs, inputs), weights divided by their scales; this function overwrites them
    inverse_factor: (inputs, inputs), upper Cholesky factor of the inverse of the second moments of
        the layer's inputs. Row d has the factors by which the rounding error of input d changes the
        weights of later inputs.
    codes: (outputs, inputs) int8, output
    """
    for d in range(weight.shape[1]):
        following_factors = inverse_factor[d, d + 1 :]
        for o in range(weight.shape[0]):
            code = np.int8(min(max(np.rint(weight[o, d]), -MAX_INT8_CODE), MAX_INT8_CODE))
            codes[o, d] = code
            error = np.float32((weight[o, d] - code) / inverse_factor[d, d])
            following_weights = weight[o, d + 1 :]
            # The loop runs over slices, because the compiler then needs no bounds checks and
            # vectorises it.
            for e in range(len(following_factors)):
                following_weights[e] -= error * following_factors[e]


def gptq_round_weight(
    weight: torch.Tensor, moments: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Round the weight of a linear layer by GPTQ (algorithm 1).

    weight: (outputs, inputs)
    moments: (inputs, inputs), second moments of the layer's inputs (X^T X for inputs X)

    Returns int8 codes (outputs, inputs) and scales (outputs, 1).
    """
    scales = compute_weight_scales(weight)
    scaled_weight = weight / scales
    codes = torch.empty(weight.shape, dtype=torch.int8)
    damping = GPTQ_DAMPING * moments.diagonal().mean().clamp(min=1e-20)
    moments = moments + damping * torch.eye(len(moments))
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments.double()))
    inverse_factor = torch.linalg.cholesky(inverse, upper=True).float().contiguous().numpy()

    def round_outputs(weight_block: torch.Tensor, codes_block: torch.Tensor) -> None:
        gptq_round_block(weight_block.numpy(), inverse_factor, codes_block.numpy())

    weight_blocks = scaled_weight.split(GPTQ_BLOCK_OUTPUTS)
    codes_blocks = codes.split(GPTQ_BLOCK_OUTPUTS)
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(round_outputs, weight_blocks, codes_blocks))
    return codes, scales


def compute_relative_error(actual: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """Return the relative error of a layer's outputs: the root mean square over all positions.

    actual, exact: outputs (positions, outputs) with and without rounding

    The relative error at a position is the norm of (actual - exact) divided by the norm of exact.
    """
    errors = (actual - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)
    return errors.square().mean().sqrt()


@dataclass(frozen=True)
class SmoothingCandidate:
    """The smoothing factors of a layer for one value of SmoothQuant's alpha, and the errors of the
    layer's outputs with these factors."""

    # (inputs,). Weights are multiplied by the factors, and activations are divided by the factors.
    factors: torch.Tensor
    # Scalar: relative error of the outputs if only activations are rounded, with one code each.
    activation_error: torch.Tensor
    # Scalar: relative error of the outputs if only weights are rounded.
    weight_error: torch.Tensor

    @property
    def total_error(self) -> torch.Tensor:
        return torch.hypot(self.activation_error, self.weight_error)


class InputStatistics:
    """Statistics of the inputs of a group of linear layers. All layers of the group have the same
    input."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        size = layers[0].in_features
        self.layers = layers
        self.max_magnitudes = torch.zeros(size)
        self.moments = torch.zeros(size, size)
        # The inputs at every INT8_CALIBRATION_SAMPLE_INTERVAL_POSITIONS-th position.
        self.samples: list[torch.Tensor] = []
        # The inputs of recent forward passes, which are not in `moments` yet.
        self.pending_batches: list[torch.Tensor] = []

    def add_batch(self, states: torch.Tensor) -> None:
        """Update the statistics with the inputs of a forward pass, (..., number of inputs)."""
        flat = states.detach().flatten(0, -2).float()
        self.max_magnitudes = torch.maximum(self.max_magnitudes, flat.abs().amax(0))
        first = len(self.samples) % INT8_CALIBRATION_SAMPLE_INTERVAL_POSITIONS
        # The samples are cloned, because a view would keep the inputs of all positions in memory.
        self.samples.append(flat[first::INT8_CALIBRATION_SAMPLE_INTERVAL_POSITIONS].clone())
        if len(self.pending_batches) == MAX_CALIBRATION_BATCHES_PER_MOMENT_UPDATE:
            self.update_moments()
        self.pending_batches.append(flat)

    def update_moments(self) -> None:
        """Add the inputs of recent forward passes (`pending_batches`) to the second moments."""
        flat = torch.cat(self.pending_batches)
        self.pending_batches = []
        self.moments.addmm_(flat.t(), flat)

    def choose_smoothing(self, weight: torch.Tensor) -> SmoothingCandidate:
        """Return the smoothing factors for which the error of the outputs is smallest. The factors
        of each alpha of SMOOTHQUANT_ALPHAS are tried.

        weight: (outputs, inputs), the concatenated weights of all layers of the group
        """
        samples = torch.cat(self.samples)[:MAX_INT8_CALIBRATION_SAMPLE_POSITIONS]
        exact = samples @ weight.t()
        activation_range = self.max_magnitudes.clamp(min=1e-5)
        weight_range = weight.abs().amax(0).clamp(min=1e-5)
        candidates = []
        for alpha in SMOOTHQUANT_ALPHAS:
            factors = activation_range**alpha / weight_range ** (1 - alpha)
            scaled_weight = weight * factors
            codes, scales = quantise_activations(samples, 1 / factors, 1, len(samples))
            outputs = (codes * scales[:, None]) @ scaled_weight.t()
            activation_error = compute_relative_error(outputs, exact)
            codes, scales = round_weight_to_nearest(scaled_weight)
            outputs = (samples / factors) @ (codes * scales).t()
            weight_error = compute_relative_error(outputs, exact)
            candidates.append(SmoothingCandidate(factors, activation_error, weight_error))
        return min(candidates, key=lambda candidate: candidate.total_error)

    def quantise_layers(self) -> dict[nn.Linear, Int8Linear]:
        """Quantise the layers of the group.

        Returns a dict whose keys are the original layers and whose values are the int8 layers.
        """
        self.update_moments()
        weight = torch.cat([layer.weight for layer in self.layers]).float()
        smoothing = self.choose_smoothing(weight)
        codes_per_activation = 1 + int(
            smoothing.activation_error > MAX_ERROR_WITH_ONE_ACTIVATION_CODE
        )

        factors = smoothing.factors
        moments = self.moments / torch.outer(factors, factors)
        codes, scales = gptq_round_weight(weight * factors, moments)

        quantised = {}
        sizes = [layer.out_features for layer in self.layers]
        layer_codes = codes.split(sizes)
        layer_scales = scales.flatten().split(sizes)
        for layer, codes, scales in zip(self.layers, layer_codes, layer_scales, strict=True):
            quantised[layer] = Int8Linear.from_linear(
                layer, codes.clone(), scales.clone(), 1 / factors, codes_per_activation
            )
        return quantised


def find_linear_groups(model: PreTrainedModel) -> list[list[nn.Linear]]:
    """Return the linear layers of a model in groups. All layers of a group have the same input.

    One forward pass is run to find the groups, which are returned in order of execution. Layers
    that are not called in this forward pass are not returned.
    """
    groups: list[tuple[torch.Tensor, list[nn.Linear]]] = []

    def add_to_group(module: nn.Linear, args: tuple) -> None:
        if not groups or groups[-1][0] is not args[0]:
            groups.append((args[0], []))
        groups[-1][1].append(module)

    linear_layers = [module for module in model.modules() if type(module) is nn.Linear]
    with register_pre_hooks([(layer, add_to_group) for layer in linear_layers]):
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return [layers for _, layers in groups]


def register_pre_hooks(hooks: list[tuple[nn.Module, Callable]]) -> ExitStack:
    """Register forward pre-hooks. Return a context manager that removes the hooks at the end of its
    block.

    hooks: tuples (module, hook)
    """
    stack = ExitStack()
    for module, hook in hooks:
        stack.callback(module.register_forward_pre_hook(hook).remove)
    return stack


def find_user_turn_opening_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids that the chat template puts before the first user message.

    Without a chat template, only the BOS token is returned, or token 0 if there is no BOS token.
    """
    opening = [tokenizer.bos_token_id or 0]
    if tokenizer.chat_template:
        marker = "\N{SNOWMAN}"
        messages = [{"role": "user", "content": marker}]
        text = cast(str, tokenizer.apply_chat_template(messages, tokenize=False))
        opening = tokenizer.encode(text.split(marker)[0], add_special_tokens=False) or opening
    return opening


def sample_one_hot_scores(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Sample a token for each batch row. This is a logits processor for `generate`.

    scores: logits (batch rows, vocabulary size)

    Returns scores of the same shape: 1 for the sampled token and 0 for all others, so that greedy
    decoding chooses the sampled token. This is faster than the sampling of transformers, because it
    draws one random number per batch row, and not one for each token of the vocabulary.
    """
    cumulative = (scores / INT8_CALIBRATION_SAMPLING_TEMPERATURE).softmax(-1).cumsum(-1)
    thresholds = torch.rand(len(cumulative), 1) * cumulative[:, -1:]
    chosen = torch.searchsorted(cumulative, thresholds)
    return torch.zeros_like(scores).scatter_(1, chosen, 1)


def iterate_calibration_passes(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[None]:
    """Return an iterator. Each `next` runs the model on sequences that the model generated itself.

    The first `next` generates the sequences. Each later `next` runs the model on the same sequences
    again. A sequence begins with the tokens that open a user message. It may contain several
    messages, because generation does not stop at EOS tokens.
    """
    opening = find_user_turn_opening_tokens(tokenizer)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=INT8_CALIBRATION_TOKENS_PER_SEQUENCE,
        pad_token_id=0,
        # An id outside the vocabulary, so that no sequence ends early.
        eos_token_id=model.config.get_text_config().vocab_size,
        # A cache that grows would fragment the heap and leave gigabytes unused.
        cache_implementation="static",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.tensor([opening] * INT8_CALIBRATION_SEQUENCE_COUNT)
        sequences = cast(Any, model).generate(
            ids,
            config,
            attention_mask=torch.ones_like(ids),
            logits_processor=[sample_one_hot_scores],
        )
    while True:
        yield
        for sequence in sequences:
            model(input_ids=sequence[None], use_cache=False)


@torch.no_grad()
def quantise_model(model: PreTrainedModel, calibration_passes: Iterator[object]) -> dict[str, int]:
    """Calibrate a float32 model, and replace its linear layers and its embedding by int8 modules.

    calibration_passes: an iterator; each `next` runs the model on all calibration sequences. In
        each run, several groups of layers are calibrated. Their second moments need at most
        MAX_CALIBRATION_SECOND_MOMENT_BYTES in total.

    Returns a dict. Keys are the names of the replaced modules. Values are numbers of int8 codes per
    activation, or 0 for the embedding. Layers that a forward pass does not call, and modules other
    than nn.Linear (such as experts in one tensor), are not replaced.
    """
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    int8_modules: dict[str, Int8Linear | Int8Embedding] = {}
    groups = find_linear_groups(model)
    largest_input = max(group[0].in_features for group in groups)
    moment_bytes = 4 * largest_input**2  # size of the second moments in float32
    groups_per_step = max(1, int(MAX_CALIBRATION_SECOND_MOMENT_BYTES / moment_bytes))

    for start in range(0, len(groups), groups_per_step):
        statistics = [InputStatistics(group) for group in groups[start : start + groups_per_step]]
        hooks = []
        for inputs in statistics:
            hooks.append(
                (inputs.layers[0], lambda _, args, inputs=inputs: inputs.add_batch(args[0]))
            )
        with register_pre_hooks(hooks):
            next(calibration_passes)
        for inputs in statistics:
            for layer, int8_layer in inputs.quantise_layers().items():
                int8_modules[names[layer]] = int8_layer
                if layer is not head:
                    model.set_submodule(names[layer], int8_layer)

    model.set_output_embeddings(int8_modules[names[head]])
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        int8_embedding = Int8Embedding(*embedding.weight.shape)
        int8_embedding.codes.data, int8_embedding.scales.data = round_weight_to_nearest(
            embedding.weight
        )
        int8_modules[names[embedding]] = int8_embedding
        model.set_input_embeddings(int8_embedding)

    codes_per_activation = {}
    for name, module in int8_modules.items():
        if isinstance(module, Int8Embedding):
            codes_per_activation[name] = 0
        else:
            codes_per_activation[name] = module.codes_per_activation
    return codes_per_activation
