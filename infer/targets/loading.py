"""Loading targets: by hub id, by folder or "embedded"; whole, or the tokenizer, config.json or some layers alone."""

import json
import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors import safe_open
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.utils import logging

from infer.targets.support import decoder_of, refuse_unfit, refuse_unsupported
from infer.targets.target import Target
from infer.utils.progress import doing
from infer.utils.together import join

if TYPE_CHECKING:
    from transformers.distributed import DistributedConfig

EMBEDDED = Path(__file__).resolve().parent.parent.parent / "data" / "embedded"


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU. Raises ValueError for a device
    that cannot be used, and under "auto" where torch cannot use the GPUs that there are."""
    if name == "auto" and torch.cuda.is_available():
        return torch.device("cuda")
    if name == "auto":
        if idle := visible_gpus():
            raise ValueError(
                f"nvidia-smi lists {idle} GPUs, and {without_cuda()}; or ask for the CPU, target.device=cpu"
            )
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"target.device={name}: torch knows no such device") from error
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"target.device={name}: torch {torch.__version__} finds no Metal here; use cpu")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"target.device={name}: {without_cuda()}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"target.device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def without_cuda() -> str:
    """Say why this torch has no CUDA, and what to do."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA: install one with CUDA"
    return (
        f"torch {torch.__version__}, which is built for CUDA {torch.version.cuda}, finds none that it can use: "
        "if there is a GPU, its driver is older than that needs; update it, or install a torch for an older CUDA"
    )


def visible_gpus() -> int:
    """Count the GPUs that nvidia-smi lists, 0 if CUDA_VISIBLE_DEVICES hides all."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; "auto" is bfloat16 on CUDA and float32 elsewhere. Raises ValueError for others."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise ValueError(f"dtype={name}: use float32, bfloat16 or auto")
    return getattr(torch, name)


def resolve_path(path: str) -> str:
    """Return a hub id or folder; "embedded" is the repository's own target."""
    return str(EMBEDDED) if path == "embedded" else path


def load_tokenizer(path: str = "embedded", trust_remote_code: bool = False, told: Mapping[str, object] | None = None):
    """Load a target's tokenizer alone; its chat template is `told` that much (`tell_template`). Raises
    FileNotFoundError, naming what could not be found."""
    with explain_missing(path):
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(path), trust_remote_code=trust_remote_code)
    tell_template(tokenizer, told or {})
    return tokenizer


def tell_template(tokenizer, told: Mapping[str, object]) -> None:
    """Write settings of a chat template, such as {"enable_thinking": False}, into the tokenizer's template, in place:
    everybody who uses the tokenizer asks the model so, unless told otherwise. Raises ValueError for a name that the
    template does not read."""
    template = getattr(tokenizer, "chat_template", None)
    words = set(re.findall(r"\w+", str(template or "")))
    for name in told:
        if name not in words:
            raise ValueError(f"target.chat_template_kwargs.{name}: this model's chat template has no such option")
    if told:
        settings = "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {in_template(value)} %}}{{% endif -%}}"
            for name, value in told.items()
        )
        several = isinstance(template, dict)
        tokenizer.chat_template = {n: settings + t for n, t in template.items()} if several else settings + template


def in_template(value: object) -> str:
    """Return a value as a chat template writes it."""
    return "none" if value is None else json.dumps(value)


def load_config(path: str = "embedded", trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a target's config.json alone. Raises FileNotFoundError, naming what could not be found."""
    with explain_missing(path):
        return AutoConfig.from_pretrained(resolve_path(path), trust_remote_code=trust_remote_code)


@contextmanager
def explain_missing(path: str) -> Iterator[None]:
    """Turn errors of reading a model into FileNotFoundError with the remedy. A ValueError about a folder that exists
    passes unchanged. Raises ValueError for a device or pipe in the folder, which might never end."""
    folder = Path(resolve_path(path))
    if folder.is_file():
        kind = "a GGUF file, which is not read here" if folder.suffix.lower() == ".gguf" else "a file"
        raise ValueError(f"target.path={path} is {kind}: give the model's folder with config.json and safetensors")
    for file in folder.glob("*"):
        if file.exists() and not (file.is_file() or file.is_dir()):
            raise ValueError(f"target.path={path}: {file.name} is no regular file, but a device or pipe")
    try:
        yield
    except (OSError, ValueError) as error:
        if folder.is_dir() and not any((folder / name).is_file() for name in ("config.json", "adapter_config.json")):
            raise FileNotFoundError(f"target.path={path}: there is no config.json in that folder") from error
        if isinstance(error, ValueError) and folder.exists():
            raise
        if folder.is_dir():
            raise FileNotFoundError(f"target.path={path}: {str(error).strip().splitlines()[0][:300]}") from error
        raise FileNotFoundError(
            f"target.path={path}: found neither as a local folder nor on the model hub from here. "
            "Download the model once where there is a network, then give its folder: target.path=/path/to/folder"
        ) from error


def fill_weights(
    model: nn.Module, files: list[Path], layers: Iterable[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Load embedding, head, last norm and some decoder layers of a model on the meta device from the files. Layers that
    are not stored under their own names are left out. Raises ValueError where embedding, head or norm are not."""
    body, head = decoder_of(model), model.get_output_embeddings()
    ends = {"embedding": model.get_input_embeddings(), "last norm": body.norm}
    if not model.config.get_text_config().tie_word_embeddings:
        ends["head"] = head
    modules = ends | {f"layer {i}": body.layers[i] for i in layers}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    where = {}
    for file in files:
        with safe_open(file, "pt") as weights:
            where |= dict.fromkeys(weights.keys(), file)
    for what, module in modules.items():
        found = {leaf: names[id(parameter)] for leaf, parameter in module.named_parameters()}
        if not all(name in where for name in found.values()):
            if what in ends:
                raise ValueError(f"the target's {what} is not stored under its own name: train without features=")
            continue
        for leaf, name in found.items():
            with safe_open(where[name], "pt") as weights:
                tensor = weights.get_tensor(name).to(device, dtype)
            owner, _, attribute = leaf.rpartition(".")
            setattr(module.get_submodule(owner), attribute, nn.Parameter(tensor, requires_grad=False))
        if hasattr(module, "scalar_embed_scale"):  # Gemma's, in a buffer that no file holds
            module.embed_scale = torch.tensor(module.scalar_embed_scale, device=device)
    model.tie_weights()


def weight_files(path: str) -> list[Path]:
    """Return a model's safetensors files on this machine, downloaded where they are missing."""
    source = resolve_path(path)
    folder = source if Path(source).is_dir() else snapshot_download(source, allow_patterns=["*.safetensors"])
    return sorted(Path(folder).glob("*.safetensors"))


def load_target(
    path: str = "embedded",
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    only_layers: Iterable[int] | None = None,
    adapter: str | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    tp_plan: str | None = None,
) -> Target:
    """Load a target from a local folder or the hub; "embedded" is the repository's own. With `only_layers`, just
    these decoder layers, embedding, last norm and head get memory: nothing can be run through it then. The LoRA
    `adapter`, a folder or hub id, is added to the weights; `chat_template_kwargs`: see `tell_template`. With `tp_plan`,
    each process of torchrun holds its part of every layer, and all of them must ask for the same passes.

    Raises FileNotFoundError, naming what could not be found and how to give a local path, and ValueError for quantised
    weights that this machine cannot run.
    """
    logging.disable_progress_bar()
    place = join(resolve_device(device)) if tp_plan else resolve_device(device)
    options = {"dtype": resolve_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code)
    refuse_unsupported(config)
    tokenizer = load_tokenizer(path, trust_remote_code, chat_template_kwargs)
    with explain_missing(path):
        model = without_memory(config, **options)
        refuse_unfit(model)
        if only_layers is not None:
            if adapter is not None:
                raise ValueError(f"target.adapter={adapter}: stored features need the merged model as target.path")
            if getattr(config, "quantization_config", None):  # layers are not stored as the numbers that they stand for
                only_layers = ()
            fill_weights(model, weight_files(path), only_layers, options["dtype"], place)
            return Target(model, tokenizer, name=path)
        options["attn_implementation"] = model.config.get_text_config()._attn_implementation
        if tp_plan:
            options["distributed_config"] = parallel_plan(model)
        with doing(f"loading {path}"):
            model = load_model(path, place, config, options)
    if adapter is not None:
        return Target(with_adapter(model, adapter), tokenizer, name=f"{path} + {adapter}")
    target = Target(model, tokenizer, path, tp_plan is not None)
    if getattr(config, "quantization_config", None):
        target.shapes  # noqa: B018  a pass over one token: what its kernels refuse is said now
    return target


def spread(target: Target, device: torch.device) -> None:
    """Spread the layers over the processes of the group, each on its `device`: a pass gathers them one after the other
    and needs all processes (FSDP without gradients, like ZeRO stage 3). Embedding, norm and head are whole in every
    process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    target.spread, body = True, target.body
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in body.layers:
        fully_shard(layer, mesh=mesh)
    inside = {parameter for layer in body.layers for parameter in layer.parameters()}
    rest = {parameter for parameter in body.parameters() if parameter not in inside}
    fully_shard(body, mesh=mesh, ignored_params=rest)
    for parameter in {*rest, target.head_weight}:
        parameter.data = parameter.data.to(device)
    for buffer in target.model.buffers():
        buffer.data = buffer.data.to(device)
    target.lean, target.unlike = None, "layers that are spread over processes"


def load_model(path: str, place: torch.device, config: PretrainedConfig, options: dict) -> nn.Module:
    """Load a model whole onto the device; quantised weights as their method wants them, which no `.to` may follow."""
    quantised = getattr(config, "quantization_config", None)
    if "distributed_config" in options:
        return AutoModelForCausalLM.from_pretrained(resolve_path(path), **options)
    if not quantised:
        return AutoModelForCausalLM.from_pretrained(resolve_path(path), **options).to(place)
    try:
        return AutoModelForCausalLM.from_pretrained(resolve_path(path), device_map={"": place}, **options)
    except (ImportError, RuntimeError) as error:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised.quant_method
        reason = str(error).splitlines()[0]
        raise ValueError(f"target.path={path}: {method} weights do not run on this machine: {reason}") from error


def parallel_plan(model: nn.Module) -> "DistributedConfig":
    """Return how transformers spreads the decoder layers of a model (on the meta device) over all processes. Embedding
    and head stay whole, since drafters share them. Raises ValueError where its authors published no plan, and without
    accelerate."""
    if find_spec("accelerate") is None:
        raise ValueError("target.tp_plan=auto needs accelerate: pip install 'blockdraft[adapters]'")
    from transformers.distributed import DistributedConfig

    if not decoder_of(model).config.base_model_tp_plan:
        raise ValueError(f"target.tp_plan=auto: transformers has no tensor parallel plan for {model.config.model_type}")
    names = {id(module): name for name, module in model.named_modules()}
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    return DistributedConfig(tp_plan=dict.fromkeys((names[id(end)] for end in ends), "replicated_with_grad_allreduce"))


def with_adapter(model: nn.Module, adapter: str) -> nn.Module:
    """Return the model with a LoRA adapter's changes added to its weights. Raises ValueError without peft."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise ValueError(f"target.adapter={adapter} needs peft: pip install 'blockdraft[adapters]'") from error
    with explain_missing(adapter):
        return PeftModel.from_pretrained(model, adapter).merge_and_unload()


def without_memory(config: PretrainedConfig, **options: object) -> nn.Module:
    """Build a model on the meta device: weights have shapes only. Its attention is SDPA, or Hugging Face's own
    ("eager") where SDPA does not support the model: soft-capped scores (Gemma 2), attention sinks (gpt-oss)."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
        except ValueError:  # this model's class has no SDPA
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
