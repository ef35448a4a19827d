"""Loading of targets from a hub id, a local folder, a GGUF file or a short name ("embedded" is the
small target in this repository). A caller can load a whole target, some of its layers, its
tokenizer or its config.json."""

import os
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from huggingface_hub import snapshot_download
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging

from infer.config import TargetConfig
from infer.targets.chat_template import check_chat_template_syntax, write_template_defaults
from infer.targets.checks import (
    DOWNLOAD_AGAIN_HINT,
    WEIGHTS_INDEX_FILE,
    Shape,
    check_config,
    check_finite,
    check_generation_config,
    check_layer_count,
    check_loading_info,
    check_model_size,
    delay_transformers_logs,
    describe_damaged_json,
    find_safetensors_files,
    format_error,
    read_json_object,
    read_tensor_shapes,
)
from infer.targets.gguf import GGUF_MODELS_IN_PYTHON_PACKAGES, convert_gguf_once, find_packaged_gguf
from infer.targets.layer_weights import load_layers_embedding_and_head
from infer.targets.support import (
    get_decoder_layers,
    get_first_truthy_setting,
    refuse_unsupported,
    refuse_unsupported_modules,
)
from infer.targets.target import Target
from infer.utils.optional import require_installed
from infer.utils.progress import set_activity_within_block

MODEL_LOAD_FAILURE_MESSAGE = "this model cannot be loaded"
INT8_LOADING_MODULE = "infer.int8_cpu.loading"
# Value of `quant_method` in the config.json of targets that `infer.int8_cpu` has quantised and
# saved.
INT8_QUANT_METHOD = "blockdraft-int8"
EMBEDDED_TARGET_FOLDER = Path(__file__).resolve().parent.parent.parent / "data" / "embedded"
TARGET_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
NVIDIA_DEVICE_FILE = Path("/dev/nvidia0")
UNUSABLE_GPU_TORCH_HINT = (
    f"torch {torch.__version__} (CUDA {torch.version.cuda}) can use; install a torch that is "
    "built for the driver's CUDA version"
)


def resolve_device(name: str) -> torch.device:
    """Return the device for a value of the option target.device. The value "auto" means CUDA if it
    is available, otherwise the CPU. Raises ValueError if the device cannot be used, or if the value
    is "auto" and torch cannot use the machine's GPU."""
    has_cuda = torch.cuda.is_available()
    if name == "auto":
        hides_gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1")
        if NVIDIA_DEVICE_FILE.exists() and not has_cuda and not hides_gpus:
            raise ValueError(
                f"{NVIDIA_DEVICE_FILE} exists, but this machine has no GPU that "
                f"{UNUSABLE_GPU_TORCH_HINT}, or choose the CPU with target.device=cpu"
            )
        return torch.device("cuda" if has_cuda else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(
            f"target.device={name}: not a torch device; use cpu, cuda or auto"
        ) from error
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(
            f"target.device={name}: torch {torch.__version__} finds no Metal GPU; use cpu"
        )
    if device.type == "cuda" and not has_cuda:
        raise ValueError(f"target.device={name}: there is no GPU that {UNUSABLE_GPU_TORCH_HINT}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"target.device={name}: this machine has {torch.cuda.device_count()} GPUs, numbered "
            "from 0; use one of them"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the dtype for a value of the option target.dtype. The value "auto" means bfloat16 on
    CUDA and float32 elsewhere. Raises ValueError for an unknown name."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if name not in TARGET_DTYPES:
        raise ValueError(f"target.dtype={name}: use float32, bfloat16, float16, float64 or auto")
    return TARGET_DTYPES[name]


def resolve_hub_id_or_folder(path: str) -> str:
    """Return the hub id or local folder for a value of the option target.path.

    "embedded" means the small target in this repository. "smollm2" means a GGUF file in a Python
    package. A GGUF file is converted to a folder by the first call. Raises ValueError or
    FileNotFoundError if the file is missing or cannot be converted.
    """
    if path == "embedded":
        return str(EMBEDDED_TARGET_FOLDER)
    file = find_packaged_gguf(path) if path in GGUF_MODELS_IN_PYTHON_PACKAGES else Path(path)
    if file.suffix.lower() == ".gguf" and file.is_file():
        return str(convert_gguf_once(file))
    return path


def load_tokenizer(
    path: str = "embedded",
    trust_remote_code: bool = False,
    chat_template_kwargs: Mapping[str, object] | None = None,
) -> PreTrainedTokenizerBase:
    """Load a target's tokenizer.

    path: value of the option target.path
    chat_template_kwargs: default values of chat template options, see `write_template_defaults`

    Raises FileNotFoundError if the tokenizer is missing, and ValueError if its files are damaged.
    """
    with explain_load_errors(path):
        tokenizer = AutoTokenizer.from_pretrained(
            resolve_hub_id_or_folder(path), trust_remote_code=trust_remote_code
        )
        tokenizer = cast(PreTrainedTokenizerBase, tokenizer)
        check_chat_template_syntax(path, tokenizer)
    write_template_defaults(tokenizer, chat_template_kwargs or {})
    return tokenizer


def load_config(path: str = "embedded", trust_remote_code: bool = False) -> PretrainedConfig:
    """Load the config.json of the target at `path` (the option target.path). Raises
    FileNotFoundError if the file is missing, and ValueError if it is damaged or has impossible
    sizes."""
    source = resolve_hub_id_or_folder(path)
    if Path(source).is_dir():
        check_layer_count(path, read_json_object(path, Path(source) / "config.json"))
    with explain_load_errors(path):
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        check_config(path, config)
    return config


def load_generation_config(path: str) -> GenerationConfig | None:
    """Load the generation_config.json of the target at `path` (the option target.path). Return None
    if the target has no such file."""
    try:
        return GenerationConfig.from_pretrained(resolve_hub_id_or_folder(path))
    except OSError:
        return None


@contextmanager
def explain_load_errors(path: str, failure: str = MODEL_LOAD_FAILURE_MESSAGE) -> Generator[None]:
    """Convert an exception of transformers within the `with` block to an exception whose message is
    one sentence with a remedy.

    path: the target's path, which the message names
    failure: the beginning of the message if the reason is unknown

    The new exception is FileNotFoundError for missing files, otherwise ValueError. Two kinds of
    exceptions are not converted: out-of-memory errors, and exceptions whose message already names
    the target.
    """
    folder = Path(resolve_hub_id_or_folder(path))
    if folder.is_file():
        raise ValueError(f"target.path={path} is a file; give the model's folder or a GGUF file")
    try:
        with delay_transformers_logs():
            yield
    except (MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if str(error).startswith(f"target.path={path}: "):
            raise
        if not folder.is_dir() and isinstance(error, (OSError, ValueError)):
            raise FileNotFoundError(
                f"target.path={path}: found neither as a local folder nor on the model hub. "
                "Download the model once on a machine with network access, then set "
                "target.path=/path/to/folder"
            ) from error
        if folder.is_dir() and not (folder / "config.json").is_file():
            raise FileNotFoundError(
                f"target.path={path}: this folder contains no config.json; give a model's folder"
            ) from error
        damage = describe_damaged_json(folder) if folder.is_dir() else None
        if damage is not None:
            raise ValueError(f"target.path={path}: {damage}; {DOWNLOAD_AGAIN_HINT}") from error
        error_class = FileNotFoundError if isinstance(error, OSError) else ValueError
        raise error_class(f"target.path={path}: {failure} ({format_error(error)})") from error


def get_local_weights_folder(path: str) -> str:
    """Return the local folder of the model at `path` (the option target.path). If the model is on
    the hub, its safetensors files are downloaded, unless they are already in the hub's cache."""
    source = resolve_hub_id_or_folder(path)
    if Path(source).is_dir():
        return source
    with explain_load_errors(path):
        return snapshot_download(source, allow_patterns=["*.safetensors", WEIGHTS_INDEX_FILE])


def list_weight_files(path: str) -> list[Path]:
    """Return the local safetensors files of the model at `path` (the option target.path). Files on
    the hub are downloaded first, unless they are already in the hub's cache."""
    return sorted(Path(get_local_weights_folder(path)).glob("*.safetensors"))


def load_target(
    path: str = "embedded",
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    only_layers: Iterable[int] | None = None,
    chat_template_kwargs: Mapping[str, object] | None = None,
    quantization: str = "none",
) -> Target:
    """Load a target from a local folder or the hub ("embedded": the target in this repository).

    dtype, device: see `resolve_dtype` and `resolve_device`
    trust_remote_code: whether to run code that comes with the model
    only_layers: load only these decoder layers, the embedding, the final norm and the head; None
        means the whole model. A partly loaded model cannot be run, and its weights are not
        quantised.
    chat_template_kwargs: default values of chat template options, see `write_template_defaults`
    quantization: "none", or "int8" for 8-bit weights and matmuls on a CPU (`infer.int8_cpu`)

    Raises FileNotFoundError if a file is missing. Raises ValueError for damaged files, for weights
    that do not match config.json or are not finite, and for quantised weights if their kernels do
    not run on this machine. Raises OSError if a folder of the hub's cache cannot be written.
    """
    logging.disable_progress_bar()
    torch_device = resolve_device(device)
    if quantization == "int8" and only_layers is None:
        if torch_device.type != "cpu":
            raise ValueError(
                f"target.quantization=int8 runs only on a CPU, not on {torch_device}; set "
                "target.device=cpu"
            )
        package = load_int8_package()
        return package.load_int8_target(path, trust_remote_code, chat_template_kwargs)
    torch_dtype = resolve_dtype(dtype, torch_device)
    options: dict[str, Any] = {"dtype": torch_dtype, "trust_remote_code": trust_remote_code}
    config = load_config(path, trust_remote_code)
    refuse_unsupported(config)
    tokenizer = load_tokenizer(path, trust_remote_code, chat_template_kwargs)
    is_quantized = get_first_truthy_setting(config, "quantization_config") is not None
    shapes = read_local_shapes(path, config)
    with explain_load_errors(path):
        model = build_meta_model(config, **options)
    refuse_unsupported_modules(model)
    if only_layers is not None:
        # Single decoder layers of a quantised model cannot be loaded, so no decoder layer is
        # loaded.
        layers = () if is_quantized else only_layers
        files = find_safetensors_files(path, Path(get_local_weights_folder(path)))
        load_layers_embedding_and_head(path, files, model, layers, torch_dtype, torch_device)
        return Target(model, tokenizer, name=path)
    if shapes and not is_quantized:
        check_model_size(path, model, shapes)
    options["attn_implementation"] = model.config.get_text_config()._attn_implementation
    with set_activity_within_block(f"loading {path}"):
        model = load_model(path, torch_device, config, options)
    target = Target(model, tokenizer, path)
    if is_quantized and not target.is_int8:
        # Run one forward pass, so that an error of the quantisation kernels is raised now.
        target.cache_shapes  # noqa: B018  a cached property
    return target


def load_int8_package() -> Any:
    """Import and return the module `infer.int8_cpu.loading`. Raises ValueError if this optional
    package is not installed."""
    require_installed(INT8_LOADING_MODULE, "quantization=int8")
    return import_module(INT8_LOADING_MODULE)


def read_weight_shapes(path: str, folder: Path) -> dict[str, Shape]:
    """Return the shape of every tensor in the safetensors files of a model's folder, by tensor
    name. Return {} if the weights have another format. Raises ValueError if a weight file or
    generation_config.json is damaged, and FileNotFoundError if a weight file is missing."""
    check_generation_config(path, folder)
    return read_tensor_shapes(path, find_safetensors_files(path, folder))


def read_local_shapes(path: str, config: PretrainedConfig) -> dict[str, Shape]:
    """Return the shape of every weight tensor of a model in a local folder, by tensor name. Return
    {} for a model on the hub. Raises ValueError or FileNotFoundError if weight files are damaged or
    missing, and ValueError if config.json has more layers than the weight files."""
    folder = Path(resolve_hub_id_or_folder(path))
    shapes = read_weight_shapes(path, folder) if folder.is_dir() else {}
    num_layers = config.get_text_config().num_hidden_layers
    if shapes and num_layers > len(shapes):
        raise ValueError(
            f"target.path={path}: config.json has num_hidden_layers={num_layers}, more than the "
            f"{len(shapes)} tensors of the weight files allow; {DOWNLOAD_AGAIN_HINT}"
        )
    return shapes


def load_configured_target(
    config: TargetConfig, only_layers: Iterable[int] | None = None
) -> Target:
    """Load the target that the section `target` of a command's options describes. Raises the
    exceptions of `load_target`.

    only_layers: load only these decoder layers, the embedding, the final norm and the head; None
        means the whole model
    """
    return load_target(
        config.path,
        config.dtype,
        config.device,
        config.trust_remote_code,
        only_layers,
        config.chat_template_kwargs,
        config.quantization,
    )


def shard_target(target: Target, device: torch.device) -> None:
    """Distribute a target's decoder layers over the processes of the default process group.

    device: the device of this process

    This is FSDP without gradients, like ZeRO stage 3. A forward pass gathers one layer after the
    other, so that all processes must take part in it. Every process keeps a copy of the embedding,
    the final norm and the head.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    target.is_sharded = True
    decoder = target.decoder
    layers = get_decoder_layers(decoder)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    layer_parameters = {parameter for layer in layers for parameter in layer.parameters()}
    replicated = {
        parameter for parameter in decoder.parameters() if parameter not in layer_parameters
    }
    fully_shard(decoder, mesh=mesh, ignored_params=replicated)
    for parameter in {*replicated, target.head_weight}:
        parameter.data = parameter.data.to(device)
    for buffer in target.model.buffers():
        buffer.data = buffer.data.to(device)


def load_model(
    path: str, device: torch.device, config: PretrainedConfig, options: dict[str, Any]
) -> PreTrainedModel:
    """Load a whole model onto a device. Quantised weights are loaded directly onto the device,
    because they cannot be moved later. Raises ValueError if the model cannot be loaded or its
    tensors are wrong.

    options: keyword arguments for `from_pretrained`
    """
    quantization = get_first_truthy_setting(config, "quantization_config")
    if quantization is None:
        return load_and_check_model(path, options).to(cast(Any, device))
    if quantization["quant_method"] == INT8_QUANT_METHOD:
        load_int8_package()  # the import registers our int8 quantisation with transformers
        return load_and_check_model(path, options)
    options = options | {"device_map": {"": device}}
    return load_and_check_model(path, options, "quantised weights do not run on this machine")


def load_and_check_model(
    path: str, options: dict[str, Any], failure: str = MODEL_LOAD_FAILURE_MESSAGE
) -> PreTrainedModel:
    """Load a causal language model with transformers, and check its tensors.

    options: keyword arguments for `from_pretrained`

    Raises ValueError, beginning with `failure`, if transformers cannot load the model. Also raises
    ValueError if a tensor is missing, has another shape, is unexpected or is not finite.
    transformers would accept such tensors or replace them by random numbers.
    """
    # Let transformers accept mismatched shapes: `check_loading_info` refuses them below and names
    # the tensors.
    report: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True}
    with explain_load_errors(path, failure):
        source = resolve_hub_id_or_folder(path)
        result: Any = AutoModelForCausalLM.from_pretrained(source, **report, **options)
        model, info = result
        check_loading_info(path, model, info)
    check_finite(f"target.path={path}", [*model.named_parameters(), *model.named_buffers()])
    return model


def build_meta_model(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
    """Build a model on the meta device, where weights have shapes and no values.

    options: keyword arguments for `from_config`

    The model's attention implementation is SDPA. It is "eager" if the model's class does not
    support SDPA, as with soft-capped attention scores (Gemma 2) and attention sinks (gpt-oss).
    """
    with torch.device("meta"):
        try:
            return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", **options)
        except ValueError:  # the model's class does not support SDPA
            return AutoModelForCausalLM.from_config(config, attn_implementation="eager", **options)
