"""Loading targets: by hub id, folder, GGUF file or name; whole, or the tokenizer, config.json or some
layers alone."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from safetensors.torch import load_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.utils import logging

from infer.config import TargetConfig
from infer.targets.gguf import PACKAGED, converted, packaged_file
from infer.targets.int8 import METHOD, int8_folder
from infer.targets.support import decoder_of, refuse_unfit, refuse_unsupported, setting
from infer.targets.target import Target
from infer.utils.progress import doing

EMBEDDED = Path(__file__).resolve().parent.parent.parent / "data" / "embedded"
DTYPES = {str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)}
NVIDIA = Path("/dev/nvidia0")
WITHOUT_CUDA = (
    f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use: install a torch built for the driver's CUDA"
)


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU. Raises
    ValueError for a device that cannot be used, and under "auto" where torch cannot use a GPU that
    there is."""
    cuda = torch.cuda.is_available()
    if name == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if NVIDIA.exists() and not cuda and not hidden:
            raise ValueError(f"{NVIDIA} is a GPU that {WITHOUT_CUDA}; or ask for the CPU, target.device=cpu")
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"target.device={name}: torch knows no such device") from error
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"target.device={name}: torch {torch.__version__} finds no Metal here; use cpu")
    if device.type == "cuda" and not cuda:
        raise ValueError(f"target.device={name}: there is no GPU that {WITHOUT_CUDA}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"target.device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype of that name; "auto" is bfloat16 on CUDA and float32 elsewhere. Raises
    ValueError for others."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in DTYPES:
        raise ValueError(f"dtype={name}: use float32, bfloat16 or auto")
    return DTYPES[name]


def resolve_path(path: str) -> str:
    """Return a hub id or folder; "embedded" is the repository's own target. A GGUF file, and the one
    that "smollm2" names, stands for the folder that it was converted to. Raises ValueError and
    FileNotFoundError for a file that cannot be."""
    if path == "embedded":
        return str(EMBEDDED)
    file = packaged_file(path) if path in PACKAGED else Path(path)
    return str(converted(file)) if file.suffix.lower() == ".gguf" and file.is_file() else path


def load_tokenizer(path: str = "embedded", trust_remote_code: bool = False, told: Mapping[str, object] | None = None):
    """Load a target's tokenizer alone; its chat template is `told` that much (`tell_template`). Raises
    FileNotFoundError, naming what could not be found."""
    with explain_missing(path):
        tokenizer = AutoTokenizer.from_pretrained(resolve_path(path), trust_remote_code=trust_remote_code)
    tell_template(tokenizer, told or {})
    return tokenizer


def tell_template(tokenizer, told: Mapping[str, object]) -> None:
    """Write settings of a chat template, such as {"enable_thinking": False}, into the tokenizer's
    template, in place: everybody who uses the tokenizer asks the model so, unless told otherwise.
    Raises ValueError for a name that the template does not read."""
    template = tokenizer.chat_template
    words = set(re.findall(r"\w+", str(template or "")))
    for name in told:
        if name not in words:
            raise ValueError(f"target.chat_template_kwargs.{name}: this model's chat template has no such option")
    if told:
        values = {name: "none" if value is None else json.dumps(value) for name, value in told.items()}
        settings = "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {value} %}}{{% endif -%}}"
            for name, value in values.items()
        )
        several = type(template) is dict
        tokenizer.chat_template = {n: settings + t for n, t in template.items()} if several else settings + template


def load_config(path: str = "embedded", trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a target's config.json alone. Raises FileNotFoundError, naming what could not be found."""
    with explain_missing(path):
        return AutoConfig.from_pretrained(resolve_path(path), trust_remote_code=trust_remote_code)


def load_generation_config(path: str) -> GenerationConfig | None:
    """Load a target's generation_config.json alone; None where there is none."""
    try:
        return GenerationConfig.from_pretrained(resolve_path(path))
    except OSError:
        return None


@contextmanager
def explain_missing(path: str) -> Iterator[None]:
    """Turn errors of reading a model into FileNotFoundError with the remedy. A ValueError about a
    folder that exists passes unchanged."""
    folder = Path(resolve_path(path))
    if folder.is_file():
        raise ValueError(f"target.path={path} is a file: give the model's folder, or a GGUF file")
    try:
        yield
    except (OSError, ValueError) as error:
        if not folder.is_dir():
            raise FileNotFoundError(
                f"target.path={path}: found neither as a local folder nor on the model hub from here. "
                "Download the model once where there is a network, then give its folder: target.path=/path/to/folder"
            ) from error
        if not (folder / "config.json").is_file():
            raise FileNotFoundError(f"target.path={path}: there is no config.json in that folder") from error
        if isinstance(error, ValueError):
            raise
        raise FileNotFoundError(f"target.path={path}: {str(error).strip().splitlines()[0][:300]}") from error


def fill_weights(
    model: nn.Module, files: list[Path], layers: Iterable[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Load embedding, head, last norm and some decoder layers of a model on the meta device from the
    files. Layers that are not stored under their own names are left out. Raises ValueError where
    embedding, head or norm are not."""
    body, embedding = decoder_of(model), model.get_input_embeddings()
    ends = {"embedding": embedding, "last norm": body.norm, "head": model.get_output_embeddings()}
    if model.config.get_text_config().tie_word_embeddings:
        del ends["head"]
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    weights = {name: tensor for file in files for name, tensor in load_file(file).items()}  # mapped, not read
    found = {}
    for what, module in (ends | {i: body.layers[i] for i in layers}).items():
        own = [names[id(parameter)] for parameter in module.parameters()]
        if weights.keys() >= {*own}:
            found |= {name: weights[name].to(device, dtype, copy=True) for name in own}
        elif what in ends:
            raise ValueError(f"the target's {what} is not stored under its own name: train without features=")
    model.load_state_dict(found, strict=False, assign=True)
    if scale := vars(embedding).get("scalar_embed_scale"):  # Gemma's, in a buffer that no file holds
        embedding.embed_scale = torch.tensor(scale, device=device)
    model.tie_weights()


def model_folder(path: str) -> str:
    """Return a model's folder on this machine; its safetensors files are downloaded where they are
    missing."""
    source = resolve_path(path)
    return source if Path(source).is_dir() else snapshot_download(source, allow_patterns=["*.safetensors"])


def weight_files(path: str) -> list[Path]:
    """Return a model's safetensors files on this machine."""
    return sorted(Path(model_folder(path)).glob("*.safetensors"))


def load_target(
    path: str = "embedded",
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    only_layers: Iterable[int] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    quantization: str = "none",
) -> Target:
    """Load a target from a local folder or the hub; "embedded" is the repository's own. With
    `only_layers`, just these decoder layers, embedding, last norm and head get memory: nothing can be
    run through it then, and they are not quantised.
    `chat_template_kwargs`: see `tell_template`; `quantization`: none or int8 (`infer.targets.int8`).

    Raises FileNotFoundError, naming what could not be found and how to give a local path, and
    ValueError for quantised weights that this machine cannot run.
    """
    logging.disable_progress_bar()
    place = resolve_device(device)
    if quantization == "int8" and only_layers is None:
        if place.type != "cpu":
            raise ValueError(f"target.quantization=int8 is for the CPU, not for {place}: use target.device=cpu")
        return int8_target(path, trust_remote_code, chat_template_kwargs)
    options = {"dtype": resolve_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code)
    refuse_unsupported(config)
    tokenizer = load_tokenizer(path, trust_remote_code, chat_template_kwargs)
    quantised = setting(config, "quantization_config") is not None
    with explain_missing(path):
        model = without_memory(config, **options)
        refuse_unfit(model)
        if only_layers is not None:  # quantised ones are not stored as the numbers that they stand for
            layers = () if quantised else only_layers
            fill_weights(model, weight_files(path), layers, options["dtype"], place)
            return Target(model, tokenizer, name=path)
        options["attn_implementation"] = model.config.get_text_config()._attn_implementation
        with doing(f"loading {path}"):
            model = load_model(path, place, config, options)
    target = Target(model, tokenizer, path)
    if quantised and not target.quantised:
        target.shapes  # noqa: B018  a pass over one token: what its kernels refuse is said now
    return target


def open_target(place: TargetConfig, only_layers: Iterable[int] | None = None) -> Target:
    """Load the target that the options name, with `load_target`."""
    known = place.chat_template_kwargs, place.quantization
    return load_target(place.path, place.dtype, place.device, place.trust_remote_code, only_layers, *known)


def int8_target(path: str, trust_remote_code: bool, told: Mapping[str, object] | None) -> Target:
    """Load a target in int8 codes, which are written the first time."""

    def whole() -> tuple[nn.Module, object]:
        target = load_target(path, "float32", "cpu", trust_remote_code)
        return target.model, target.tokenizer

    folder = int8_folder(model_folder(path), whole)
    target = load_target(folder, "float32", "cpu", trust_remote_code, None, told)
    target.name = path
    settle(target, weight_files(folder))
    return target


def settle(target: Target, files: list[Path]) -> None:
    """Join the codes of a target just loaded, and keep no page of its files that this reads."""
    parameters = dict(target.model.named_parameters())
    for parameter in filter(torch.is_floating_point, parameters.values()):
        parameter.data = parameter.clone()
    mapped = {name: parameter.data_ptr() for name, parameter in parameters.items()}
    target.lean, target.shapes  # noqa: B018
    for file in files:
        for name, tensor in load_file(file).items():  # mapped, not read
            if tensor.dtype == torch.int8 and name in mapped and parameters[name].data_ptr() == mapped[name]:
                parameters[name].data = tensor


def spread(target: Target, device: torch.device) -> None:
    """Spread the layers over the processes of the group, each on its `device`: a pass gathers them one
    after the other and needs all processes (FSDP without gradients, like ZeRO stage 3). Embedding, norm
    and head are whole in every process."""
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


def load_model(path: str, place: torch.device, config: PretrainedConfig, options: dict) -> nn.Module:
    """Load a model whole onto the device; quantised weights as their method wants them, which no `.to`
    may follow."""
    if not setting(config, "quantization_config"):
        return AutoModelForCausalLM.from_pretrained(resolve_path(path), **options).to(place)
    try:
        where = {} if config.quantization_config["quant_method"] == METHOD else {"device_map": {"": place}}
        return AutoModelForCausalLM.from_pretrained(resolve_path(path), **where, **options)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"target.path={path}: quantised weights do not run on this machine: {reason}") from error


def without_memory(config: PretrainedConfig, **options: object) -> nn.Module:
    """Build a model on the meta device: weights have shapes only. Its attention is SDPA, or Hugging
    Face's own ("eager") where SDPA does not support the model: soft-capped scores (Gemma 2), attention
    sinks (gpt-oss)."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
        except ValueError:  # this model's class has no SDPA
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
