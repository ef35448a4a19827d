"""Targets in 8-bit integers: weights once, activations as they come (`target.quantization=int8`); and
drafters, whose weights are rounded to nearest (`drafter.quantization=int8`).

A product is sums of whole numbers, which come out the same in whatever order they are taken: with norms
and attention in an order of their own (loops.py) a token's numbers are the same to the last bit, alone,
in a draft tree or beside other texts. That is what makes decoding lossless by arithmetic.

Weights have a scale for each output; activations a scale for each token, after a factor for each input
that moves what is large from activations to weights (SmoothQuant, 2211.10438, section 4). Weights are
rounded one input after the other, and those still to come make up for the error on texts that the
target wrote itself (GPTQ, 2210.17323, section 3). Products whose activations lose most, by measured
error, have two digits for each activation.

N positions, D inputs, O outputs of a linear layer.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GenerationConfig
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin

from infer.targets import loops
from infer.targets.model_cache import cache_folder, make_once, save_model
from infer.utils.jit import IN_ORDER, njit

METHOD = "blockdraft-int8"
TOP = 127  # the greatest code
TEXTS, LENGTH = 96, 128  # of the target's own that it is calibrated on, and their tokens
ALPHAS = (0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1)  # how much of the range activations give to weights (SmoothQuant's alpha)
SAMPLES, EVERY = 256, 48  # activations, one of so many, that alpha and digits are chosen by
STEPS = 4  # of texts that are written, added to second moments together
LOSES = 0.02  # relative error of a product from which on its activations have two digits
DAMPING = 0.01  # of GPTQ: added to the diagonal, as a share of its mean
ROWS = 16  # outputs that GPTQ rounds together: few enough to stay in a near cache
SMALL, NEAR = 64, 2**20  # rows and sums of products that are turned where there is AMX
FEW = 4  # rows that are turned back one by one
ROOM = 4e9  # bytes for second moments at once


@cache
def by_loops(inputs: int) -> bool:
    """Return whether products over so many inputs are taken by `loops._multiply`: on an x86 with AVX2
    and without VNNI, for which oneDNN has no fast ones."""
    able = torch.cpu.get_capabilities()
    return able.get("avx2", False) and not (able["avx512_vnni"] or able["avx_vnni"]) and inputs % loops.CODES == 0


@cache
def turned_rows(rows: int, outputs: int) -> int:
    """Return as how many rows the product of so many is best taken the other way
    round, codes (O, D) by rows turned (D, N): with AMX, whose kernels pack the
    right side before they begin. More than FEW behind whole blocks of WIDTH become
    one more, which is turned back at once. 0: not so; sums that leave the cache are
    turned back too slowly."""
    if not torch.cpu.get_capabilities().get("amx_int8") or rows > SMALL or rows * outputs > NEAR:
        return 0
    return rows if rows % loops.WIDTH <= FEW else -(-rows // loops.WIDTH) * loops.WIDTH


def to_nearest(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (O, D) int8 and scales (O, 1) of a weight (O, D), each entry rounded by itself."""
    scales = scales_of(weight)
    return (weight / scales).round().to(torch.int8), scales


def scales_of(weight: torch.Tensor) -> torch.Tensor:
    """Return the scale of every output, (O, 1), of a weight (O, D) whose codes keep within TOP."""
    return weight.abs().amax(1, keepdim=True).clamp(min=1e-30) / TOP


@cache
def shim() -> ctypes.CDLL | None:
    """Return PyTorch's library where its C entries for compiled code (AOTInductor's) have the product of
    whole numbers, else None."""
    with suppress(OSError, StopIteration, AttributeError):
        found = ctypes.CDLL(str(next(Path(torch.__file__).parent.glob("lib/libtorch_cpu.*"))))
        return found if found.aoti_torch_cpu__int_mm_out else None


def matrix_handle(matrix: torch.Tensor) -> int:
    """Return a handle, for PyTorch's C entries, of a tensor over the memory of a matrix. It does not
    keep that memory: whoever uses the handle also holds the matrix, and passes the handle to
    `delete_handles` in the end."""
    handle = ctypes.c_void_p()
    pair = ctypes.c_int64 * 2
    address = ctypes.c_void_p(matrix.data_ptr())
    sizes = pair(*matrix.shape)
    strides = pair(*matrix.stride())
    dtype = shim().aoti_torch_dtype_int8() if matrix.dtype == torch.int8 else shim().aoti_torch_dtype_int32()
    arguments = address, ctypes.c_int64(2), sizes, strides, ctypes.c_int64(0), dtype, 0, -1
    if shim().aoti_torch_create_tensor_from_blob(*arguments, ctypes.byref(handle)):
        raise RuntimeError(f"PyTorch {torch.__version__} makes no tensor over memory for compiled code")
    return handle.value


def delete_handles(handles: list[int]) -> None:
    """Free handles that `matrix_handle` returned."""
    for handle in handles:
        shim().aoti_torch_delete_tensor_object(ctypes.c_void_p(handle))


@cache
def product_entry() -> int:
    """Return the address of PyTorch's C function that writes the product of int8 matrices, left (M, D)
    and right (D, N), to sums (M, N) int32; it takes the handles of sums, left and right."""
    return ctypes.cast(shim().aoti_torch_cpu__int_mm_out, ctypes.c_void_p).value


@dataclass(frozen=True)
class Int8Product:
    """What a linear layer over int8 codes computes: a `lean.Product`."""

    codes: torch.Tensor  # (O, D)
    scales: torch.Tensor  # (O,) of the codes
    smooth: torch.Tensor  # (D,) that activations are multiplied by
    digits: int  # of activations
    bias: torch.Tensor | None = None

    @property
    def taped(self) -> bool:
        """Whether compiled code can call it (tape.py)."""
        return by_loops(self.codes.shape[1]) or shim() is not None

    def sums(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the product (N, O) int32 of whole numbers (N, D) from -127 to 127, int8, with the
        codes.

        oneDNN's is a private name of PyTorch, and the other door to it is `product_entry`; a test holds
        both against integer arithmetic."""
        if by_loops(whole.shape[1]):
            sums = whole.new_empty(len(whole), len(self.codes), dtype=torch.int32)
            loops.multiply(whole, self.codes, sums, loops.run)
            return sums
        wide = turned_rows(rows := len(whole), len(self.codes))
        if not wide:
            return torch._int_mm(whole, self.codes.t())
        return loops.turned(torch._int_mm(self.codes, F.pad(whole, (0, 0, 0, wide - rows)).t()), rows)

    def __call__(self, states: torch.Tensor, norm: loops.Scale | None = None) -> torch.Tensor:
        """Return the product (N, O) of states (N, D), behind a norm if there is one."""
        whole, scales = loops.codes(states, self.smooth, self.digits, norm)
        return loops.finish(self.sums(whole), scales, self.scales, self.bias)

    normed = __call__

    def best(self, states: torch.Tensor) -> torch.Tensor:
        """Return which output is the greatest, (...) int64, of states (..., D): no float of them is
        written."""
        whole, scales = loops.codes(states.flatten(0, -2), self.smooth, self.digits)
        return loops.best(self.sums(whole), scales, self.scales, self.bias).view(states.shape[:-1])

    def onto(self, before: torch.Tensor, states: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the product of states (N, D) times a factor added to others (N, O)."""
        whole, scales = loops.codes(states, self.smooth, self.digits)
        return loops.finish(self.sums(whole), scales, self.scales, self.bias, before, factor)


class Int8Linear(nn.Module):
    """A linear layer over int8 codes."""

    def __init__(self, inputs: int, outputs: int, bias: bool, digits: int = 1) -> None:
        super().__init__()
        self.digits = digits  # of activations
        self.codes = nn.Parameter(torch.empty(outputs, inputs, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(outputs), requires_grad=False)
        self.smooth = nn.Parameter(torch.empty(inputs), requires_grad=False)  # activations are multiplied by it
        self.bias = nn.Parameter(torch.empty(outputs), requires_grad=False) if bias else None

    @classmethod
    def of(cls, linear: nn.Linear, codes: torch.Tensor, scales: torch.Tensor, smooth: torch.Tensor, digits: int):
        """Return what takes a linear layer's place."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, digits)
        new.codes.data, new.scales.data, new.smooth.data = codes, scales, smooth
        if linear.bias is not None:
            new.bias.data = linear.bias.detach().float()
        return new

    @property
    def weight(self) -> torch.Tensor:
        """The weight that the codes stand for, (O, D) float32, made anew."""
        return self.codes * self.scales[:, None] * self.smooth

    @property
    def product(self) -> Int8Product:
        bias = None if self.bias is None else self.bias.data
        return Int8Product(self.codes.data, self.scales.data, self.smooth.data, self.digits, bias)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the products of states (..., D), (..., O)."""
        if states.requires_grad:
            return F.linear(states, self.weight, self.bias)
        return self.product(states.reshape(-1, states.shape[-1])).view(*states.shape[:-1], -1)

    @staticmethod
    def fuse(modules: list["Int8Linear"], join: Callable[[list[nn.Parameter]], torch.Tensor]) -> Int8Product:
        """Return the product of layers that read the same states, whose factors and digits must be the
        same. join: `join_in_place`, or `torch.cat` for a copy."""
        first = modules[0]
        bias = None if first.bias is None else join([module.bias for module in modules])
        codes = join([module.codes for module in modules])
        scales = join([module.scales for module in modules])
        return Int8Product(codes.detach(), scales.detach(), first.smooth.data, first.digits, bias)


class Int8Embedding(nn.Module):
    """An embedding over int8 codes with a scale for each token."""

    def __init__(self, tokens: int, size: int) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.empty(tokens, size, dtype=torch.int8), requires_grad=False)
        self.scales = nn.Parameter(torch.empty(tokens, 1), requires_grad=False)

    @property
    def weight(self) -> torch.Tensor:
        """(V, D) float32, made anew."""
        return self.codes * self.scales

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.codes[ids] * self.scales[ids]


def join_in_place(parts: list[nn.Parameter]) -> torch.Tensor:
    """Return parameters (R_i, ...) as one tensor (sum of R_i, ...) whose views they become, so that it
    takes no memory of its own and sees what is written to them. Parameters that lie one behind the
    other already stay where they are."""
    whole = parts[0].data
    expected = whole.data_ptr()
    adjacent = True
    for part in parts:
        same_storage = part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        adjacent = adjacent and same_storage and part.is_contiguous() and part.data_ptr() == expected
        expected += part.numel() * part.element_size()
    rows = [len(part) for part in parts]
    if adjacent:
        return whole.as_strided((sum(rows), *whole.shape[1:]), whole.stride())
    with torch.inference_mode(False):  # whoever decodes may, but nobody could write to the parameters afterwards
        whole = torch.cat([part.data for part in parts])
        for part, view in zip(parts, whole.split(rows), strict=True):
            part.data = view
    return whole


@njit(fast=IN_ORDER)
def _round_rows(left, upper, codes):
    """Fill codes (O, D) int8 with left (O, D), rounded one input after the other: each one's error goes
    on to those behind it by its row of upper (D, D). left is lost."""
    for d in range(left.shape[1]):
        row = upper[d, d + 1 :]
        for o in range(left.shape[0]):
            codes[o, d] = code = np.int8(min(max(np.rint(left[o, d]), -TOP), TOP))
            error, behind = np.float32((left[o, d] - code) / upper[d, d]), left[o, d + 1 :]
            for e in range(len(row)):  # slices, which have no places to check, become vectors
                behind[e] -= error * row[e]


def round_weight(weight: torch.Tensor, moments: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (O, D) int8 and scales (O, 1) of a weight (O, D) whose inputs have second moments (D,
    D): inputs are rounded in their order, and the ones behind make up for the error (GPTQ, algorithm
    1)."""
    scales = scales_of(weight)
    left, codes = weight / scales, torch.empty(weight.shape, dtype=torch.int8)
    moments = moments + DAMPING * moments.diagonal().mean().clamp(min=1e-20) * torch.eye(len(moments))
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
        self.modules, self.most = modules, torch.zeros(size)
        self.moments, self.sample, self.waiting = torch.zeros(size, size), [], []

    def see(self, states: torch.Tensor) -> None:
        flat = states.detach().flatten(0, -2).float()
        self.most = torch.maximum(self.most, flat.abs().amax(0))
        self.sample.append(flat[len(self.sample) % EVERY :: EVERY].clone())  # a view would keep all of them
        if len(self.waiting) == STEPS:
            self.add()
        self.waiting.append(flat)

    def add(self) -> None:
        flat, self.waiting = torch.cat(self.waiting), []
        self.moments.addmm_(flat.t(), flat)

    def rounded(self) -> dict[nn.Linear, Int8Linear]:
        """Return what takes each layer's place: of the factors that SmoothQuant's alphas give the one
        whose products, of rounded activations and of rounded weights, come closest, and as many digits
        as they need."""
        self.add()
        weight = torch.cat([module.weight for module in self.modules]).float()
        sample = torch.cat(self.sample)[:SAMPLES]
        exact, tried = sample @ weight.t(), []

        def lost(found: torch.Tensor) -> torch.Tensor:
            return ((found - exact).norm(dim=1) / exact.norm(dim=1).clamp(min=1e-9)).square().mean().sqrt()

        for alpha in ALPHAS:
            factors = self.most.clamp(min=1e-5) ** alpha / weight.abs().amax(0).clamp(min=1e-5) ** (1 - alpha)
            scaled, (codes, scales) = weight * factors, loops.codes(sample, 1 / factors, 1)
            error = lost((codes * scales[:, None]) @ scaled.t())
            codes, scales = to_nearest(scaled)
            of_weights = lost((sample / factors) @ (codes * scales).t())
            tried.append((torch.hypot(error, of_weights), error, factors))
        _, error, factors = min(tried, key=lambda one: one[0])
        moments = self.moments / torch.outer(factors, factors)
        codes, scales = round_weight(weight * factors, moments)
        sizes = [module.out_features for module in self.modules]
        parts = zip(self.modules, codes.split(sizes), scales.flatten().split(sizes), strict=True)
        digits = 1 + int(error > LOSES)
        return {m: Int8Linear.of(m, part.clone(), scale.clone(), 1 / factors, digits) for m, part, scale in parts}


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
    """Yield whenever texts went through the target that it writes itself, sampled from the beginning of a
    user's turn on, across the ends of turns: first as they are written, then as they are read again."""
    mark, opening = "\N{SNOWMAN}", [tokenizer.bos_token_id or 0]
    if tokenizer.chat_template:
        text = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
        opening = tokenizer.encode(text.split(mark)[0], add_special_tokens=False) or opening

    def drawn(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # one number a row, not one a token
        sums = (scores / 0.7).softmax(-1).cumsum(-1)
        chosen = torch.searchsorted(sums, torch.rand(len(sums), 1) * sums[:, -1:])
        return torch.zeros_like(scores).scatter_(1, chosen, 1)

    # what ends no text, as it is no token; and a cache that does not grow, which would leave gigabytes of holes behind
    told = {"eos_token_id": model.config.get_text_config().vocab_size, "cache_implementation": "static"}
    config = GenerationConfig(do_sample=False, max_new_tokens=LENGTH, pad_token_id=0, **told)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        ids = torch.tensor([opening] * TEXTS)
        texts = model.generate(ids, config, attention_mask=torch.ones_like(ids), logits_processor=[drawn])
    while True:
        yield
        for row in texts:
            model(input_ids=row[None], use_cache=False)


@torch.no_grad()
def quantise(model: nn.Module, texts: Iterator) -> dict[str, int]:
    """Put int8 codes in the place of a float32 model's linear layers and embedding, calibrated on texts
    that go through it with each step of an iterator; return what became so: names and digits, 0 for the
    embedding. What no text goes through, and what is not a plain linear layer (experts in one tensor),
    stays as it is."""
    names = {module: name for name, module in model.named_modules()}
    head, found, groups = model.get_output_embeddings(), {}, linear_groups(model)
    count = max(1, int(ROOM / (4 * max(group[0].in_features for group in groups) ** 2)))  # float32
    for begin in range(0, len(groups), count):
        now = [Inputs(group) for group in groups[begin : begin + count]]
        with hooked([(inputs.modules[0], lambda _, args, inputs=inputs: inputs.see(args[0])) for inputs in now]):
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
        new.codes.data, new.scales.data = to_nearest(embedding.weight)
        model.set_input_embeddings(new)
    return {name: 0 if type(new) is Int8Embedding else new.digits for name, new in found.items()}


def rounded(linear: nn.Linear, digits: int = 1) -> Int8Linear:
    """Return what takes a linear layer's place, without any texts; `digits` of its activations."""
    codes, scales = to_nearest(linear.weight.detach().float())
    return Int8Linear.of(linear, codes, scales.flatten(), torch.ones(linear.in_features), digits)


def quantise_drafter(drafter: nn.Module) -> None:
    """Put codes in the place of a float32 drafter's linear layers, in place, for decoding.

    A drafter need not be exact: what rounding changes is acceptance, never a text. Conditional heads
    stay."""
    head = drafter.conditional_head, drafter.confidence_head
    kept = {part for module in head if module is not None for part in module.modules()}
    for name, module in list(drafter.named_modules()):
        if type(module) is nn.Linear and module not in kept:
            drafter.set_submodule(name, rounded(module, 2 if name == "fc" else 1))
    drafter.quantised = True
    with suppress(OSError, AttributeError):  # loading leaves ten times what the codes take with the C library
        ctypes.CDLL(None).malloc_trim(0)


class Int8Config(QuantizationConfigMixin):
    """What a config.json says of the codes: the `digits` of every linear layer, 0 of an embedding."""

    def __init__(self, digits: dict[str, int], quant_method: str = METHOD) -> None:
        self.digits, self.quant_method = digits, quant_method


class Int8Quantizer(HfQuantizer):
    """Has transformers load and store such models as any other."""

    is_trainable = False

    def is_serializable(self) -> bool:
        return True

    def _process_model_before_weight_loading(self, model: nn.Module, **_: object) -> None:
        for name, digits in self.quantization_config.digits.items():
            old = model.get_submodule(name)
            if digits:
                new = Int8Linear(old.in_features, old.out_features, old.bias is not None, digits)
            else:
                new = Int8Embedding(*old.weight.shape)
            model.set_submodule(name, new)


AUTO_QUANTIZATION_CONFIG_MAPPING[METHOD], AUTO_QUANTIZER_MAPPING[METHOD] = Int8Config, Int8Quantizer


def int8_folder(path: str, load: Callable[[], tuple[nn.Module, object]]) -> str:
    """Return the folder, in the cache, of a target in int8, made once from the model and tokenizer that
    `load` gives in float32. Raises what `load` raises, and OSError as `make_once`."""
    source = Path(path)
    parts = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in sorted(source.glob("*"))]
    how = [METHOD, TEXTS, LENGTH, ALPHAS, LOSES]
    folder = cache_folder(f"{source.name}-int8", repr([*how, str(source.resolve()), parts]))

    def make(loaded: tuple[nn.Module, object], folder: Path) -> None:
        model, tokenizer = loaded
        digits = quantise(model, own_texts(model, tokenizer))
        model.config.tie_word_embeddings = False
        model.config.quantization_config = config = Int8Config(digits)
        model.hf_quantizer = Int8Quantizer(config)
        save_model(model, tokenizer, folder)

    return str(make_once(folder, f"writing {path} in integers, once, into {folder}", load, make))
