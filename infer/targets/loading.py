"""Loading targets: by hub id, folder, GGUF file or name; whole, or the tokenizer, config.json or
some layers alone."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from jinja2 import TemplateSyntaxError
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.utils import logging

from infer.config import TargetConfig
from infer.targets.checks import (
    DOWNLOAD_AGAIN,
    INDEX,
    check_config,
    check_finite,
    check_generation_config,
    check_layer_count,
    check_loading_info,
    check_size,
    check_tensors,
    checkpoint_files,
    find_bad_json,
    hold_warnings,
    one_line,
    read_shapes,
    read_small_json,
)
from infer.targets.gguf import PACKAGED, converted, packaged_file
from infer.targets.support import decoder_of, refuse_unfit, refuse_unsupported, setting
from infer.targets.target import Target
from infer.utils.optional import require_installed
from infer.utils.progress import doing

FAILURE = "this model cannot be loaded"
INT8_PACKAGE = "infer.int8_cpu.loading"
INT8_METHOD = (
    "blockdraft-int8"  # quant_method in the config.json of targets that `infer.int8_cpu` wrote
)
EMBEDDED = Path(__file__).resolve().parent.parent.parent / "data" / "embedded"
DTYPES = {
    str(dtype)[6:]: dtype for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64)
}
NVIDIA = Path("/dev/nvidia0")
WITHOUT_CUDA = f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use: install a torch built for the driver's CUDA"


def resolve_device(name: str) -> torch.device:
    """Return the device of that name; "auto" is CUDA where there is one, else the CPU. Raises
    ValueError for a device that cannot be used, and under "auto" where torch cannot use a GPU that
    there is."""
    cuda = torch.cuda.is_available()
    if name == "auto":
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if NVIDIA.exists() and not cuda and not hidden:
            raise ValueError(
                f"{NVIDIA} is a GPU that {WITHOUT_CUDA}; or ask for the CPU, target.device=cpu"
            )
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"target.device={name}: torch knows no such device") from error
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(
            f"target.device={name}: torch {torch.__version__} finds no Metal here; use cpu"
        )
    if device.type == "cuda" and not cuda:
        raise ValueError(f"target.device={name}: there is no GPU that {WITHOUT_CUDA}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"target.device={name}: there are {torch.cuda.device_count()} GPUs, counted from 0"
        )
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
    """Return a hub id or folder; "embedded" is the repository's own target. A GGUF file, and the
    one that "smollm2" names, stands for the folder that it was converted to. Raises ValueError and
    FileNotFoundError for a file that cannot be."""
    if path == "embedded":
        return str(EMBEDDED)
    file = packaged_file(path) if path in PACKAGED else Path(path)
    return str(converted(file)) if file.suffix.lower() == ".gguf" and file.is_file() else path


def load_tokenizer(
    path: str = "embedded",
    trust_remote_code: bool = False,
    told: Mapping[str, object] | None = None,
):
    """Load a target's tokenizer alone; its chat template is `told` that much (`tell_template`).
    Raises FileNotFoundError, naming what could not be found, and ValueError for damaged files."""
    with explain_load_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_path(path), trust_remote_code=trust_remote_code
        )
        check_template(path, tokenizer)
    tell_template(tokenizer, told or {})
    return tokenizer


def check_template(path: str, tokenizer) -> None:
    """Raise ValueError for a chat template with a syntax error. What it makes of messages is not
    checked: it may refuse some."""
    if getattr(tokenizer, "chat_template", None) is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}, {error.message}"
        raise ValueError(
            f"target.path={path}: the chat template is damaged ({reason}): {DOWNLOAD_AGAIN}"
        ) from error
    except Exception:  # of any kind: templates raise what they like
        return


def tell_template(tokenizer, told: Mapping[str, object]) -> None:
    """Write settings of a chat template, such as {"enable_thinking": False}, into the tokenizer's
    template, in place: everybody who uses the tokenizer asks the model so, unless told otherwise.
    Raises ValueError for a name that the template does not read."""
    template = tokenizer.chat_template
    words = set(re.findall(r"\w+", str(template or "")))
    for name in told:
        if name not in words:
            raise ValueError(
                f"target.chat_template_kwargs.{name}: this model's chat template has no such option"
            )
    if told:
        values = {
            name: "none" if value is None else json.dumps(value) for name, value in told.items()
        }
        settings = "".join(
            f"{{%- if {name} is not defined %}}{{% set {name} = {value} %}}{{% endif -%}}"
            for name, value in values.items()
        )
        several = type(template) is dict
        tokenizer.chat_template = (
            {n: settings + t for n, t in template.items()} if several else settings + template
        )


def load_config(path: str = "embedded", trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a target's config.json alone. Raises FileNotFoundError, naming what could not be found,
    and ValueError for a damaged file and for sizes that no model has."""
    source = resolve_path(path)
    if Path(source).is_dir():
        check_layer_count(path, read_small_json(path, Path(source) / "config.json"))
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        check_config(path, config)
    return config


def load_generation_config(path: str) -> GenerationConfig | None:
    """Load a target's generation_config.json alone; None where there is none."""
    try:
        return GenerationConfig.from_pretrained(resolve_path(path))
    except OSError:
        return None


@contextmanager
def explain_load_errors(path: str, failure: str = FAILURE) -> Iterator[None]:
    """Turn whatever transformers raises while it reads a model into one sentence with the remedy:
    FileNotFoundError for what is not there, else ValueError, with `failure` before the reason.
    Errors of memory pass unchanged, and so do those that name the target."""
    folder = Path(resolve_path(path))
    if folder.is_file():
        raise ValueError(f"target.path={path} is a file: give the model's folder, or a GGUF file")
    try:
        with hold_warnings():
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if str(error).startswith(f"target.path={path}: "):
            raise
        if not folder.is_dir() and isinstance(error, (OSError, ValueError)):
            raise FileNotFoundError(
                f"target.path={path}: found neither as a local folder nor on the model hub from here. "
                "Download the model once where there is a network, then give its folder: target.path=/path/to/folder"
            ) from error
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"target.path={path}: there is no config.json in that folder"
            ) from error
        if folder.is_dir() and (damage := find_bad_json(folder)) is not None:
            raise ValueError(f"target.path={path}: {damage}: {DOWNLOAD_AGAIN}") from error
        kind = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise kind(f"target.path={path}: {failure}: {one_line(error)}") from error


def fill_weights(
    path: str, model: nn.Module, layers: Iterable[int], dtype: torch.dtype, device: torch.device
) -> None:
    """Load embedding, head, last norm and some decoder layers of a model on the meta device from
    the safetensors files at `path`. Layers that are not stored under their own names (experts one
    by one) are left out. Raises ValueError where embedding, head or norm are not, and for tensors
    that are missing, of another shape or not finite."""
    body = decoder_of(model)
    embedding = model.get_input_embeddings()
    if not hasattr(body, "norm"):
        raise ValueError(
            f"target.path={path}: the target's last norm has another name: train without features="
        )
    modules = {
        "embedding": embedding,
        "last norm": body.norm,
        "head": model.get_output_embeddings(),
    }
    if model.config.get_text_config().tie_word_embeddings:
        del modules["head"]
    files = checkpoint_files(path, Path(model_folder(path)))
    shapes = read_shapes(path, files)
    check_layer_numbers(path, model, shapes)
    model_names = model.state_dict().keys()  # with buffers, which are not loaded here
    wanted = {}
    for part, module in modules.items():
        expected = named_shapes(model, module)
        missing = [name for name in expected if name not in shapes]
        if missing:
            raise ValueError(
                f"target.path={path}: the target's {part} ({missing[0]}) is not stored under its own name: "
                f"{DOWNLOAD_AGAIN}, or train without features="
            )
        wanted |= expected
    for i in layers:
        expected = named_shapes(model, body.layers[i])
        prefix = os.path.commonprefix([*expected])
        missing = [name for name in expected if name not in shapes]
        others = [name for name in shapes if name.startswith(prefix) and name not in model_names]
        if missing and others:  # stored under other names
            continue
        check_tensors(path, model, missing, (), others)
        wanted |= expected
    mismatched = [
        (name, shapes[name], shape) for name, shape in wanted.items() if shapes[name] != shape
    ]
    check_tensors(path, model, (), mismatched, ())
    stored = {
        name: tensor for file in files for name, tensor in load_file(file).items()
    }  # mapped, not read
    weights = {name: stored[name].to(device, dtype, copy=True) for name in wanted}
    check_finite(f"target.path={path}", weights.items())
    model.load_state_dict(weights, strict=False, assign=True)
    if scale := vars(embedding).get(
        "scalar_embed_scale"
    ):  # Gemma's, in a buffer that no file holds
        embedding.embed_scale = torch.tensor(scale, device=device)
    model.tie_weights()


def check_layer_numbers(path: str, model: nn.Module, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise ValueError where the files hold decoder layers that the model does not have."""
    layers = decoder_of(model).layers
    prefix = next(name for name, module in model.named_modules() if module is layers)
    number = re.compile(re.escape(prefix) + r"\.(\d+)\.")
    matches = filter(None, map(number.match, shapes))
    check_tensors(
        path, model, (), (), [match.string for match in matches if int(match[1]) >= len(layers)]
    )


def named_shapes(model: nn.Module, module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a module's parameters by their names in the model."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: tuple(parameter.shape) for parameter in module.parameters()}


def model_folder(path: str) -> str:
    """Return a model's folder on this machine; its safetensors files are downloaded where they are
    missing."""
    source = resolve_path(path)
    if Path(source).is_dir():
        return source
    with explain_load_errors(path):
        return snapshot_download(source, allow_patterns=["*.safetensors", INDEX])


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
    `only_layers`, just these decoder layers, embedding, last norm and head get memory: nothing can
    be run through it then, and they are not quantised.
    `chat_template_kwargs`: see `tell_template`; `quantization`: none or int8 (`infer.int8_cpu`).

    Raises FileNotFoundError, naming what could not be found and how to give a local path;
    ValueError for damaged files, for weights that do not fit config.json or are not finite, and for
    quantised weights that this machine cannot run; OSError where a folder of the cache cannot be
    written.
    """
    logging.disable_progress_bar()
    place = resolve_device(device)
    if quantization == "int8" and only_layers is None:
        if place.type != "cpu":
            raise ValueError(
                f"target.quantization=int8 is for the CPU, not for {place}: use target.device=cpu"
            )
        return int8_package().load_int8_target(path, trust_remote_code, chat_template_kwargs)
    options = {"dtype": resolve_dtype(dtype, place), "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code)
    refuse_unsupported(config)
    tokenizer = load_tokenizer(path, trust_remote_code, chat_template_kwargs)
    quantised = setting(config, "quantization_config") is not None
    folder = Path(resolve_path(path))
    shapes = read_folder(path, folder) if folder.is_dir() else {}
    if shapes and config.get_text_config().num_hidden_layers > len(shapes):
        raise ValueError(
            f"target.path={path}: config.json has num_hidden_layers={config.get_text_config().num_hidden_layers}, more "
            f"than the {len(shapes)} tensors of the weight files allow: {DOWNLOAD_AGAIN}"
        )
    with explain_load_errors(path):
        model = without_memory(config, **options)
    refuse_unfit(model)
    if only_layers is not None:  # quantised ones are not stored as the numbers that they stand for
        fill_weights(path, model, () if quantised else only_layers, options["dtype"], place)
        return Target(model, tokenizer, name=path)
    if shapes and not quantised:
        check_size(path, model, shapes)
    options["attn_implementation"] = model.config.get_text_config()._attn_implementation
    with doing(f"loading {path}"):
        model = load_model(path, place, config, options)
    target = Target(model, tokenizer, path)
    if quantised and not target.quantised:
        target.shapes  # noqa: B018  a pass over one token: what its kernels refuse is said now
    return target


def int8_package() -> ModuleType:
    """Return `infer.int8_cpu.loading`, which loads targets and rounds drafters. Raises ValueError
    where the optional package is missing."""
    require_installed(INT8_PACKAGE, "quantization=int8")
    return import_module(INT8_PACKAGE)


def read_folder(path: str, folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a model's folder, {} where they are not in safetensors
    files. Raises ValueError for damaged files, and FileNotFoundError for missing ones."""
    check_generation_config(path, folder)
    return read_shapes(path, checkpoint_files(path, folder))


def open_target(place: TargetConfig, only_layers: Iterable[int] | None = None) -> Target:
    """Load the target that the options name, with `load_target`."""
    known = place.chat_template_kwargs, place.quantization
    return load_target(
        place.path, place.dtype, place.device, place.trust_remote_code, only_layers, *known
    )


def spread(target: Target, device: torch.device) -> None:
    """Spread the layers over the processes of the group, each on its `device`: a pass gathers them
    one after the other and needs all processes (FSDP without gradients, like ZeRO stage 3).
    Embedding, norm and head are whole in every process."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    target.spread = True
    body = target.body
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


def load_model(
    path: str, place: torch.device, config: PretrainedConfig, options: dict
) -> nn.Module:
    """Load a model whole onto the device; quantised weights as their method wants them, which no
    `.to` may follow. Raises ValueError as `load_checked`."""
    quantization = setting(config, "quantization_config")
    if quantization is None:
        return load_checked(path, options).to(place)
    if quantization["quant_method"] == INT8_METHOD:
        int8_package()  # it has transformers know the method
        return load_checked(path, options)
    options = options | {"device_map": {"": place}}
    return load_checked(path, options, "quantised weights do not run on this machine")


def load_checked(path: str, options: dict, failure: str = FAILURE) -> nn.Module:
    """Load a causal language model with transformers. Raises ValueError, which begins with
    `failure`, for what transformers cannot load, and for tensors that are missing, of another
    shape, unexpected or not finite, which it takes or fills with random numbers."""
    report = {
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,
    }  # it is refused below, by name
    with explain_load_errors(path, failure):
        model, info = AutoModelForCausalLM.from_pretrained(resolve_path(path), **report, **options)
        check_loading_info(path, model, info)
    check_finite(f"target.path={path}", [*model.named_parameters(), *model.named_buffers()])
    return model


def without_memory(config: PretrainedConfig, **options: object) -> nn.Module:
    """Build a model on the meta device: weights have shapes only. Its attention is SDPA, or Hugging
    Face's own ("eager") where SDPA does not support the model: soft-capped scores (Gemma 2),
    attention sinks (gpt-oss)."""
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
        except ValueError:  # this model's class has no SDPA
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
