"""Checks of a model's folder: its files can be read, its config.json is plausible, and its weights
are complete, finite and of the shapes that the model needs.

transformers checks little of this. It fills missing tensors with random numbers, and it raises
exceptions of any class for damaged files.
"""

import json
import logging
import math
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import get_logger

SINGLE_WEIGHTS_FILE = "model.safetensors"
WEIGHTS_INDEX_FILE = "model.safetensors.index.json"
MODEL_JSON_FILES = (
    *("config.json", "generation_config.json", WEIGHTS_INDEX_FILE),
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
)
DOWNLOAD_AGAIN_HINT = "copy or download the model again"
# largest num_hidden_layers in config.json, since transformers builds a list with an entry per layer
MAX_DECODER_LAYERS = 10_000
MAX_LISTED_TENSORS = 3  # largest number of tensor names in an error message, for each kind of error
CONFIG_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# Matches the names of tensors that a causal language model does not need. These are layers for
# multi-token prediction, image and audio encoders, and buffers that old files store and that
# transformers now computes.
IGNORED_TENSOR_NAMES = re.compile(
    r"(^|\.)(mtp|mtp_\w+|vision_\w+|visual|audio_\w+|multi_modal_\w+|mm_\w+|embed_vision|embed_audio|image_\w+)\.|"
    r"rotary_emb\.inv_freq$"
)

Shape = tuple[int, ...]
# (tensor name, shape in the file, shape in the model)
ShapeMismatch = tuple[str, Shape, Shape]


@contextmanager
def delay_warnings() -> Generator[None]:
    """Hold back what transformers logs within the block. The messages are logged at the end if the
    block succeeds, and dropped if the block raises an exception."""
    logger = get_logger("transformers")
    handlers = logger.handlers[:]
    collector = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [collector]
    try:
        yield
    finally:
        logger.handlers = handlers
    for record in collector.buffer:
        logger.handle(record)


def format_error(error: BaseException) -> str:
    """Return the name of an exception's class, followed by the exception's message in one line of
    at most 300 characters."""
    message = " ".join(str(error).split())[:300]
    if message:
        return f"{type(error).__name__}: {message}"
    return type(error).__name__


def find_damaged_json(folder: Path) -> str | None:
    """Return a description of the first damaged JSON file in a model's folder: the file's name and
    the reason. A file that contains no JSON object is damaged too. Return None if all files that
    exist are in order."""
    for name in MODEL_JSON_FILES:
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} is damaged ({format_error(error)})"
        if not isinstance(content, dict):
            return f"{name} is damaged (it contains no JSON object)"
    return None


def read_json_object(path: str, file: Path) -> dict[str, Any]:
    """Return the JSON object in `file`; {} if the file does not exist. Raises ValueError if the
    file is damaged; the message begins with the target's `path`."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"target.path={path}: {file.name} is damaged ({format_error(error)}); "
            f"{DOWNLOAD_AGAIN_HINT}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(
            f"target.path={path}: {file.name} contains no JSON object; {DOWNLOAD_AGAIN_HINT}"
        )
    return content


def check_layer_count(path: str, config: Mapping[str, Any]) -> None:
    """Raise ValueError if `config`, the content of a config.json, has more than MAX_DECODER_LAYERS
    layers."""
    for section in (config, config.get("text_config")):
        count = section.get("num_hidden_layers") if isinstance(section, dict) else None
        if isinstance(count, int) and count > MAX_DECODER_LAYERS:
            raise ValueError(
                f"target.path={path}: config.json has num_hidden_layers={count}, but at most "
                f"{MAX_DECODER_LAYERS} are allowed"
            )


def check_config(path: str, config: PretrainedConfig) -> None:
    """Raise ValueError if a size, an epsilon or a rotary base in config.json has a value that no
    model can have."""
    # This reads a dictionary, because reading an attribute raises an exception if layers have
    # different sizes.
    values = config.get_text_config().to_dict()

    def refuse(name: str, value: object, allowed: str) -> NoReturn:
        raise ValueError(f"target.path={path}: config.json has {name}={value!r}, but {allowed}")

    for name in CONFIG_SIZE_KEYS:
        size = values.get(name)
        if size is None or isinstance(size, list):
            continue
        if not isinstance(size, int) or size < 1:
            refuse(name, size, "an integer above 0 is needed")
    heads = values.get("num_attention_heads")
    key_heads = values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        refuse(
            "num_key_value_heads", key_heads, f"a divisor of num_attention_heads={heads} is needed"
        )
    window = values.get("sliding_window")
    if isinstance(window, int) and window < 0:
        refuse("sliding_window", window, "a number of positions or null is needed")
    for name, value in flatten_values(values):
        key = name.rpartition(".")[2]
        is_number = isinstance(value, (int, float))
        if isinstance(value, (int, float)) and math.isnan(value):
            refuse(name, value, "a number is needed")
        if value is None:
            continue
        is_base = key == "rope_theta"
        is_eps = key.endswith(("norm_eps", "norm_epsilon"))
        if is_base and not (is_number and 0 < value < math.inf):
            refuse(name, value, "a finite number above 0 is needed")
        if is_eps and not (is_number and 0 <= value < math.inf):
            refuse(name, value, "a finite number of at least 0 is needed")


def flatten_values(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values in nested dictionaries, each with its dotted name."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_generation_config(path: str, folder: Path) -> None:
    """Raise ValueError if generation_config.json is damaged, or if its eos_token_id contains a
    value that is not an integer. transformers would ignore a damaged file without a message."""
    value = read_json_object(path, folder / "generation_config.json").get("eos_token_id")
    if value is None:
        return
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"target.path={path}: generation_config.json has eos_token_id={value!r}, but a token "
            "id or a list of token ids is needed"
        )


def find_checkpoint_files(path: str, folder: Path) -> list[Path]:
    """Return the safetensors files that contain the weights in a model's folder. The list is empty
    if the weights have another format. Raises ValueError for a damaged index, and FileNotFoundError
    if a file that the index names is missing."""
    if (folder / SINGLE_WEIGHTS_FILE).is_file():
        return [folder / SINGLE_WEIGHTS_FILE]
    if not (folder / WEIGHTS_INDEX_FILE).exists():
        return []
    weight_map = read_json_object(path, folder / WEIGHTS_INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(
            f"target.path={path}: {WEIGHTS_INDEX_FILE} has no weight_map; {DOWNLOAD_AGAIN_HINT}"
        )
    names = sorted({str(name) for name in weight_map.values()})
    for name in names:
        if not re.fullmatch(r"[\w-][\w.-]*", name) or not (folder / name).is_file():
            raise FileNotFoundError(
                f"target.path={path}: {WEIGHTS_INDEX_FILE} names the file {name}, which is not in "
                f"the folder; {DOWNLOAD_AGAIN_HINT}"
            )
    return [folder / name for name in names]


def read_tensor_shapes(path: str, files: Iterable[Path]) -> dict[str, Shape]:
    """Return the shape of every tensor in safetensors files, by tensor name. Only the headers of
    the files are read. Raises ValueError if a header is damaged, or if a file is shorter or longer
    than its header says."""
    shapes = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    shapes[name] = tuple(opened.get_slice(name).get_shape())
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"target.path={path}: {file.name} is damaged ({format_error(error)}); "
                f"{DOWNLOAD_AGAIN_HINT}"
            ) from error
    return shapes


def check_model_size(
    path: str, model: PreTrainedModel, shapes: Mapping[str, Shape], factor: int = 1
) -> None:
    """Raise ValueError if a model on the meta device has more than `factor` times as many values as
    its weight files. In this way a wrong config.json is refused before memory is allocated.

    shapes: the shape of every tensor in the weight files, by tensor name
    """
    stored = sum(map(math.prod, shapes.values()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest_buffer = max((buffer.numel() for buffer in model.buffers()), default=0)
    needed = max(parameters, largest_buffer)
    if needed > factor * stored:
        raise ValueError(
            f"target.path={path}: a model of the sizes in config.json has {needed:,} values, but "
            f"the weight files contain {stored:,}{describe_name_differences(model, shapes)}; "
            f"{DOWNLOAD_AGAIN_HINT}"
        )


def describe_name_differences(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> str:
    """Describe, in parentheses, which tensors the weight files lack or contain with another shape.
    Return an empty string if the files contain none of the model's tensor names."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not expected.keys() & shapes.keys():
        return ""
    missing = [name for name in expected if name not in shapes]
    mismatched = [
        (name, shapes[name], shape)
        for name, shape in expected.items()
        if shapes.get(name, shape) != shape
    ]
    return f" ({describe_tensor_errors(missing, mismatched, ())})"


def describe_tensor_errors(
    missing: Iterable[str], mismatched: Iterable[ShapeMismatch], unexpected: Iterable[str]
) -> str:
    """Describe which tensors are wrong. For each kind of error, the text has the number of tensors
    and the first names."""
    mismatches = [
        f"{name} ({tuple(stored)}, not {tuple(expected)})"
        for name, stored, expected in sorted(mismatched)
    ]
    names_by_error = {
        "missing": sorted(missing),
        "of another shape": mismatches,
        "unknown to the model": sorted(unexpected),
    }
    phrases = []
    for error, names in names_by_error.items():
        if not names:
            continue
        verb = "is" if len(names) == 1 else "are"
        phrase = f"{len(names)} {verb} {error}: {', '.join(names[:MAX_LISTED_TENSORS])}"
        if len(names) > MAX_LISTED_TENSORS:
            phrase += f" and {len(names) - MAX_LISTED_TENSORS} more"
        phrases.append(phrase)
    return "; ".join(phrases)


def is_ignored_tensor(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor of the weight files may be ignored: it belongs to a component that a
    causal language model does not have, or the model's class ignores it."""
    ignored_patterns = model._keys_to_ignore_on_load_unexpected or ()
    if IGNORED_TENSOR_NAMES.search(name):
        return True
    if any(re.search(pattern, name) for pattern in ignored_patterns):
        return True
    config = model.config.get_text_config()
    prediction_layers = getattr(config, "num_nextn_predict_layers", None) or 0
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer is None:
        return False
    return 0 <= int(layer[1]) - config.num_hidden_layers < prediction_layers


def check_tensors(
    path: str,
    model: PreTrainedModel,
    missing: Iterable[str],
    mismatched: Iterable[ShapeMismatch],
    unexpected: Iterable[str],
    remedy: str = DOWNLOAD_AGAIN_HINT,
) -> None:
    """Raise ValueError if tensors of the weight files do not match the model. The message names the
    tensors and ends with `remedy`.

    missing: names of tensors that the model needs and the files lack
    mismatched: tensors whose shape in the files differs from the model's
    unexpected: names of tensors in the files that the model does not use
    """
    unexpected = [name for name in unexpected if not is_ignored_tensor(name, model)]
    errors = describe_tensor_errors(missing, mismatched, unexpected)
    if errors:
        raise ValueError(
            f"target.path={path}: the weight files do not match config.json. Of the tensors, "
            f"{errors}; {remedy}"
        )


def check_loading_info(
    path: str,
    model: PreTrainedModel,
    info: Mapping[str, Iterable[Any]],
    remedy: str = DOWNLOAD_AGAIN_HINT,
) -> None:
    """Check the loading information that `from_pretrained(..., output_loading_info=True)` returns
    with a model. Raises ValueError like `check_tensors`."""
    check_tensors(
        path, model, info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"], remedy
    )


@torch.no_grad()
def check_finite(source: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for the first tensor with a value that is NaN or infinite.

    source: where the tensors come from; the message begins with it
    tensors: (name, tensor) pairs; integer tensors and tensors on the meta device are skipped
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        if tensor.element_size() == 1:  # PyTorch cannot sum float8
            tensor = tensor.float()
        if torch.isfinite(tensor.sum()):  # the sum would be NaN or infinite if any value were
            continue
        # The count is 0 if all values are finite and only their sum overflows.
        count = int(tensor.isfinite().logical_not().sum())
        if count:
            raise ValueError(
                f"{source}: {count} of the {tensor.numel():,} values of {name} are NaN or "
                f"infinite; {DOWNLOAD_AGAIN_HINT}"
            )
