"""Checks of a model's folder: its files can be read, its config.json is plausible, and its weights
are complete and finite and have the shapes that the model needs.

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
# Largest allowed num_hidden_layers in config.json. transformers builds a list with an entry per
# layer, so a huge number would fill the memory.
MAX_DECODER_LAYERS = 10_000
MAX_LISTED_TENSORS_PER_ERROR = 3  # maximum number of names per kind of error in a message
CONFIG_SIZE_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# Matches the names of tensors in weight files that a causal language model does not need: layers
# for multi-token prediction, encoders of images and audio, and rotary frequencies, which
# transformers computes itself.
IGNORED_TENSOR_NAME_PATTERN = re.compile(
    r"(^|\.)(mtp|mtp_\w+|vision_\w+|visual|audio_\w+|multi_modal_\w+|mm_\w+|embed_vision|embed_audio|image_\w+)\.|"
    r"rotary_emb\.inv_freq$"
)

Shape = tuple[int, ...]
# (tensor name, shape in the file, shape in the model)
ShapeMismatch = tuple[str, Shape, Shape]


@contextmanager
def delay_transformers_logs() -> Generator[None]:
    """Collect the log messages that transformers writes within the `with` block. If the block
    succeeds, they are logged at its end. If the block raises an exception, they are dropped."""
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
    """Return an exception as one line: the name of its class, then its message, cut to 300
    characters."""
    message = " ".join(str(error).split())[:300]
    if message:
        return f"{type(error).__name__}: {message}"
    return type(error).__name__


def describe_damaged_json(folder: Path) -> str | None:
    """Return the name of the first damaged JSON file in a model's folder, followed by the reason. A
    file whose content is not a JSON object counts as damaged. Return None if no file is damaged;
    missing files are ignored."""
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
    """Return the JSON object in `file`, or {} if the file does not exist. Raises ValueError if the
    file is damaged.

    path: the target's path, for the error message
    """
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
    """Raise ValueError if a model has more than MAX_DECODER_LAYERS layers.

    path: the target's path, for the error message
    config: the content of the model's config.json
    """
    for section in (config, config.get("text_config")):
        count = section.get("num_hidden_layers") if isinstance(section, dict) else None
        if isinstance(count, int) and count > MAX_DECODER_LAYERS:
            raise ValueError(
                f"target.path={path}: config.json has num_hidden_layers={count}, but at most "
                f"{MAX_DECODER_LAYERS} are allowed; {DOWNLOAD_AGAIN_HINT}"
            )


def check_config(path: str, config: PretrainedConfig) -> None:
    """Raise ValueError if a size, a norm's epsilon or the base of the rotary angles in config.json
    has an impossible value, such as a negative hidden size.

    path: the target's path, for the error message
    """
    # Read a dictionary, because reading an attribute of the config raises an exception if the
    # layers have different sizes.
    values = config.get_text_config().to_dict()

    def refuse(name: str, value: object, allowed: str) -> NoReturn:
        raise ValueError(
            f"target.path={path}: config.json has {name}={value!r}, but {allowed}; correct this "
            f"value, or {DOWNLOAD_AGAIN_HINT}"
        )

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
    """Yield every value in nested dictionaries as a pair of its dotted name and the value, such as
    ("rope_parameters.rope_theta", 10000.0).

    prefix: put in front of every name
    """
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flatten_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_generation_config(path: str, folder: Path) -> None:
    """Raise ValueError if generation_config.json in `folder` is damaged, or if its eos_token_id
    contains anything but integers. transformers ignores a damaged file without a message.

    path: the target's path, for the error message
    """
    value = read_json_object(path, folder / "generation_config.json").get("eos_token_id")
    if value is None:
        return
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"target.path={path}: generation_config.json has eos_token_id={value!r}, but a token "
            "id or a list of token ids is needed; correct this value"
        )


def find_safetensors_files(path: str, folder: Path) -> list[Path]:
    """Return the safetensors files with the weights of the model in `folder`. Return an empty list
    if the weights have another format. Raises ValueError if the index of the files is damaged, and
    FileNotFoundError if a file in the index is missing.

    path: the target's path, for error messages
    """
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
    the files are read. Raises ValueError if a header is damaged, or if a file's size contradicts
    the header.

    path: the target's path, for error messages
    """
    shapes = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118  this object is not iterable
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
    """Raise ValueError if a model has more than `factor` times as many values as its weight files.
    A wrong config.json is thereby refused before memory is allocated.

    path: the target's path, for the error message
    model: the model on the meta device
    shapes: the shape of every tensor in the weight files, by tensor name
    """
    stored = sum(map(math.prod, shapes.values()))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    largest_buffer = max((buffer.numel() for buffer in model.buffers()), default=0)
    needed = max(parameters, largest_buffer)
    if needed > factor * stored:
        raise ValueError(
            f"target.path={path}: a model of the sizes in config.json has {needed:,} values, but "
            f"the weight files contain {stored:,}{describe_parameter_mismatches(model, shapes)}; "
            f"{DOWNLOAD_AGAIN_HINT}"
        )


def describe_parameter_mismatches(model: PreTrainedModel, shapes: Mapping[str, Shape]) -> str:
    """Return a text in parentheses that lists the model's tensors that are missing in the weight
    files or have another shape there. Return "" if the files contain none of the model's tensor
    names.

    shapes: the shape of every tensor in the weight files, by tensor name
    """
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
    """Return a text that lists missing, mismatched and unexpected tensors. For each of these
    errors, it states the number of tensors and the first names.

    mismatched: tuples (tensor name, shape in the file, shape in the model)
    """
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
        phrase = f"{len(names)} {verb} {error}: {', '.join(names[:MAX_LISTED_TENSORS_PER_ERROR])}"
        if len(names) > MAX_LISTED_TENSORS_PER_ERROR:
            phrase += f" and {len(names) - MAX_LISTED_TENSORS_PER_ERROR} more"
        phrases.append(phrase)
    return "; ".join(phrases)


def is_ignored_tensor(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor in the weight files may be ignored: it belongs to a component that a
    causal language model does not have, such as an image encoder, or the model's class lists its
    name as one to ignore."""
    ignored_patterns = model._keys_to_ignore_on_load_unexpected or ()
    if IGNORED_TENSOR_NAME_PATTERN.search(name):
        return True
    if any(re.search(pattern, name) for pattern in ignored_patterns):
        return True
    config = model.config.get_text_config()
    prediction_layers = getattr(config, "num_nextn_predict_layers", None) or 0
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    if layer is None:
        return False
    return 0 <= int(layer[1]) - config.num_hidden_layers < prediction_layers


def refuse_tensor_errors(
    path: str,
    model: PreTrainedModel,
    missing: Iterable[str],
    mismatched: Iterable[ShapeMismatch],
    unexpected: Iterable[str],
    remedy: str = DOWNLOAD_AGAIN_HINT,
) -> None:
    """Raise ValueError if tensors of the weight files do not match the model. The message names
    these tensors and ends with `remedy`.

    path: the target's path, for the error message
    missing: names of tensors that the model needs but the files do not contain
    mismatched: tensors whose shapes in the files and in the model differ
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
    """Raise ValueError if transformers found missing, mismatched or unexpected tensors while it
    loaded a model. The message names these tensors and ends with `remedy`.

    path: the target's path, for the error message
    info: the loading information from `from_pretrained(..., output_loading_info=True)`
    """
    refuse_tensor_errors(
        path, model, info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"], remedy
    )


@torch.no_grad()
def check_finite(source: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError for the first tensor with a value that is NaN or infinite.

    source: where the tensors come from, such as "target.path=..."; the message begins with it
    tensors: (name, tensor) pairs; integer tensors and tensors on the meta device are skipped
    """
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        if tensor.element_size() == 1:  # PyTorch cannot sum float8
            tensor = tensor.float()
        if torch.isfinite(tensor.sum()):  # a finite sum has only finite terms
            continue
        # The sum may overflow although all values are finite. The count is then 0.
        count = int(tensor.isfinite().logical_not().sum())
        if count:
            raise ValueError(
                f"{source}: {count} of the {tensor.numel():,} values of {name} are NaN or "
                f"infinite; {DOWNLOAD_AGAIN_HINT}"
            )
