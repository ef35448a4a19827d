"""Calibration of int8 targets: which factors move what is large from activations to weights, how
many digits activations have, and codes of weights.

Weights are rounded one input after the other, and those still to come make up for the error on
texts that the target wrote itself (GPTQ, 2210.17323, section 3).

D inputs, O outputs of a linear layer.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
from torch import nn
from transformers import GenerationConfig

from infer.int8_cpu.modules import Int8Embedding, Int8Linear
from infer.int8_cpu.rows import quantise as quantise_activations
from infer.int8_cpu.weights import MAX_CODE, round_to_nearest, scales_of
from infer.utils.jit import IN_ORDER, njit

# of the target's own that it is calibrated on, and their tokens
TEXTS = 96
LENGTH = 128
ALPHAS = (
    0.4,
    0.5,
    0.6,
    0.7,
    0.8,
    0.9,
    1,
)  # how much of the range activations give to weights (SmoothQuant's alpha)
# activations, one of so many, that alpha and digits are chosen by
SAMPLES = 256
EVERY = 48
STEPS = 4  # of texts that are written, added to second moments together
LOSES = 0.02  # relative error of a product from which on its activations have two digits
DAMPING = 0.01  # of GPTQ: added to the diagonal, as a share of its mean
ROWS = 16  # outputs that GPTQ rounds together: few enough to stay in a near cache
ROOM = 4e9  # bytes for second moments at once


@njit(fast=IN_ORDER)
def _round_rows(left, upper, codes):
    """Fill codes (O, D) int8 with left (O, D), rounded one input after the other: each one's error
    goes on to those behind it by its row of upper (D, D). left is lost."""
    for d in range(left.shape[1]):
        row = upper[d, d + 1 :]
        for o in range(left.shape[0]):
            codes[o, d] = code = np.int8(min(max(np.rint(left[o, d]), -MAX_CODE), MAX_CODE))
            error = np.float32((left[o, d] - code) / upper[d, d])
            behind = left[o, d + 1 :]
            for e in range(len(row)):  # slices, which have no places to check, become vectors
                behind[e] -= error * row[e]


def round_weight(weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (O, D) int8 and scales (O, 1) of a weight (O, D) whose inputs have second
    moments (D, D): inputs are rounded in their order, and the ones behind make up for the error
    (GPTQ, algorithm 1)."""
    scales = scales_of(weight)
    left = weight / scales
    codes = torch.empty(weight.shape, dtype=torch.int8)
    moments = moments + DAMPING * moments.diagonal().mean().clamp(min=1e-20) * torch.eye(
        len(moments)
    )
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments.double()))
    upper = torch.linalg.cholesky(inverse, upper=True).float().contiguous().numpy()
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        parts = zip(left.split(ROWS), codes.split(ROWS), strict=True)
        list(pool.map(lambda part: _round_rows(part[0].numpy(), upper, part[1].numpy()), parts))
    return codes, scales


class Inputs:
    """What is seen of the inputs of linear layers that read the same states."""

    def __init__(self, modules: list[nn.Linear]) -> None:
        size = modules[0].in_features
        self.modules = modules
        self.most = torch.zeros(size)
        self.moments = torch.zeros(size, size)
        self.sample = []
        self.waiting = []

    def see(self, states: torch.Tensor) -> None:
        flat = states.detach().flatten(0, -2).float()
        self.most = torch.maximum(self.most, flat.abs().amax(0))
        self.sample.append(
            flat[len(self.sample) % EVERY :: EVERY].clone()
        )  # a view would keep all of them
        if len(self.waiting) == STEPS:
            self.add()
        self.waiting.append(flat)

    def add(self) -> None:
        flat = torch.cat(self.waiting)
        self.waiting = []
        self.moments.addmm_(flat.t(), flat)

    def rounded(self) -> dict[nn.Linear, Int8Linear]:
        """Return what takes each layer's place: of the factors that SmoothQuant's alphas give the
        one whose products, of rounded activations and of rounded weights, come closest, and as many
        digits as they need."""
        self.add()
        weight = torch.cat([module.weight for module in self.modules]).float()
        sample = torch.cat(self.sample)[:SAMPLES]
        exact = sample @ weight.t()
        tried = []

        def lost(found: torch.Tensor) -> torch.Tensor:
            return (
                ((found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9))
                .square()
                .mean()
                .sqrt()
            )

        for alpha in ALPHAS:
            factors = self.most.clamp(min=1e-5) ** alpha / weight.abs().amax(0).clamp(min=1e-5) ** (
                1 - alpha
            )
            scaled, (codes, scales) = (
                weight * factors,
                quantise_activations(sample, 1 / factors, 1, len(sample)),
            )
            error = lost((codes * scales[:, None]) @ scaled.t())
            codes, scales = round_to_nearest(scaled)
            of_weights = lost((sample / factors) @ (codes * scales).t())
            tried.append((torch.hypot(error, of_weights), error, factors))
        _, error, factors = min(tried, key=lambda one: one[0])
        moments = self.moments / torch.outer(factors, factors)
        codes, scales = round_weight(weight * factors, moments)
        sizes = [module.out_features for module in self.modules]
        parts = zip(self.modules, codes.split(sizes), scales.flatten().split(sizes), strict=True)
        digits = 1 + int(error > LOSES)
        return {
            m: Int8Linear.of(m, part.clone(), scale.clone(), 1 / factors, digits)
            for m, part, scale in parts
        }


def linear_groups(model: nn.Module) -> list[list[nn.Linear]]:
    """Return the linear layers that tokens go through, those together that read the same states."""
    groups: list[tuple[torch.Tensor, list[nn.Linear]]] = []

    def note(module: nn.Linear, args: tuple) -> None:
        if not groups or groups[-1][0] is not args[0]:
            groups.append((args[0], []))
        groups[-1][1].append(module)

    with hooked([(module, note) for module in model.modules() if type(module) is nn.Linear]):
        model(input_ids=torch.arange(8)[None], use_cache=False)
    return [modules for _, modules in groups]


def hooked(hooks: list[tuple[nn.Module, Callable]]) -> ExitStack:
    """Within the block the functions see what goes into the modules."""
    stack = ExitStack()
    for module, hook in hooks:
        stack.callback(module.register_forward_pre_hook(hook).remove)
    return stack


def own_texts(model: nn.Module, tokenizer: object) -> Iterator[None]:
    """Yield whenever texts went through the target that it writes itself, sampled from the
    beginning of a user's turn on, across the ends of turns: first as they are written, then as they
    are read again."""
    mark = "\N{SNOWMAN}"
    opening = [tokenizer.bos_token_id or 0]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        opening = tokenizer.encode(text.split(mark)[0], add_special_tokens=False) or opening

    def drawn(
        _: torch.Tensor, scores: torch.Tensor
    ) -> torch.Tensor:  # one number a row, not one a token
        sums = (scores / 0.7).softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:])
        return torch.zeros_like(scores).scatter_(1, chosen, 1)

    # what ends no text, as it is no token; and a cache that does not grow, which would leave
    # gigabytes of holes behind
    told = {
        "eos_token_id": model.config.get_text_config().vocab_size,
        "cache_implementation": "static",
    }
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0, **told)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.tensor([opening] * TEXTS)
        texts = model.generate(
            ids, config, attention_mask=torch.ones_like(ids), logits_processor=[drawn]
        )
    while True:
        yield
        for row in texts:
            model(input_ids=row[None], use_cache=False)


@torch.no_grad()
def quantise(model: nn.Module, texts: Iterator) -> dict[str, int]:
    """Put int8 codes in the place of a float32 model's linear layers and embedding, calibrated on
    texts that go through it with each step of an iterator; return what became so: names and digits,
    0 for the embedding. What no text goes through, and what is not a plain linear layer (experts in
    one tensor), stays as it is."""
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    found = {}
    groups = linear_groups(model)
    count = max(1, int(ROOM / (4 * max(group[0].in_features for group in groups) ** 2)))  # float32
    for begin in range(0, len(groups), count):
        now = [Inputs(group) for group in groups[begin : begin + count]]
        with hooked(
            [
                (inputs.modules[0], lambda _, args, inputs=inputs: inputs.see(args[0]))
                for inputs in now
            ]
        ):
            next(texts)
        for inputs in now:
            for module, new in inputs.rounded().items():
                found[names[module]] = new
                if module is not head:
                    model.set_submodule(names[module], new)
    model.set_output_embeddings(found[names[head]])
    embedding = model.get_input_embeddings()
    if type(embedding) is nn.Embedding:
        found[names[embedding]] = new = Int8Embedding(*embedding.weight.shape)
        new.codes.data, new.scales.data = round_to_nearest(embedding.weight)
        model.set_input_embeddings(new)
    return {name: 0 if type(new) is Int8Embedding else new.digits for name, new in found.items()}
