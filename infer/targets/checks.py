"""Whether a model's folder is whole: its files are readable, its config.json makes sense, and its
weights are all of the model's, of the model's shapes, and finite.

transformers checks little of this: it fills missing tensors with random numbers, and raises
exceptions of any kind for damaged files.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from logging.handlers import MemoryHandler
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.utils.logging import get_logger

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
JSON_FILES = (
    *("config.json", "generation_config.json", INDEX),
    *("tokenizer_config.json", "tokenizer.json", "special_tokens_map.json", "added_tokens.json"),
)
DOWNLOAD_AGAIN = "copy or download the model again"
MAX_LAYERS = 10_000  # of a config.json: transformers builds a list of them
MAX_NAMED = 3  # tensors of each kind that an error names
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "head_dim"),
)
# Tensors of a model's parts that a causal language model does not have: layers for multi-token
# prediction, towers for images and sound, and buffers that old files hold and that are computed
# today.
OTHER_PARTS = re.compile(
    r"(^|\.)(mtp|mtp_\w+|vision_\w+|visual|audio_\w+|multi_modal_\w+|mm_\w+|embed_vision|embed_audio|image_\w+)\.|"
    r"rotary_emb\.inv_freq$"
)

Shape = tuple[int, ...]


@contextmanager
def hold_warnings() -> Iterator[None]:
    """Hold back what transformers logs within the block: it is printed at the end if the block
    succeeds, and dropped if it raises."""
    logger = get_logger("transformers")
    handlers = logger.handlers[:]
    held = MemoryHandler(capacity=10_000, flushLevel=logging.CRITICAL + 1)
    logger.handlers = [held]
    try:
        yield
    finally:
        logger.handlers = handlers
    for record in held.buffer:
        logger.handle(record)


def one_line(error: BaseException) -> str:
    """Return an exception's type and message in one line of at most 300 characters."""
    message = " ".join(str(error).split())[:300]
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def find_bad_json(folder: Path) -> str | None:
    """Return which of a folder's JSON files holds no JSON object, and why; None if all that are
    there do."""
    for name in JSON_FILES:
        try:
            content = json.loads((folder / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            return f"{name} is damaged ({one_line(error)})"
        if not isinstance(content, dict):
            return f"{name} is damaged (it holds no JSON object)"
    return None


def read_small_json(path: str, file: Path) -> dict:
    """Return the content of a JSON file, {} where there is none. Raises ValueError if it is
    damaged."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(
            f"target.path={path}: {file.name} is damaged ({one_line(error)}): {DOWNLOAD_AGAIN}"
        ) from error
    if not isinstance(content, dict):
        raise ValueError(f"target.path={path}: {file.name} holds no JSON object: {DOWNLOAD_AGAIN}")
    return content


def check_layer_count(path: str, config: Mapping[str, object]) -> None:
    """Raise ValueError for more layers than a model can have, by the content of its config.json."""
    for part in (config, config.get("text_config")):
        count = part.get("num_hidden_layers") if isinstance(part, dict) else None
        if isinstance(count, int) and count > MAX_LAYERS:
            raise ValueError(
                f"target.path={path}: config.json has num_hidden_layers={count}, at most {MAX_LAYERS} can be"
            )


def check_config(path: str, config: PretrainedConfig) -> None:
    """Raise ValueError for sizes, epsilons and rotary bases in config.json that no model can
    have."""
    values = (
        config.get_text_config().to_dict()
    )  # no attributes: those of heterogeneous layers raise

    def refuse(name: str, value: object, allowed: str) -> None:
        raise ValueError(f"target.path={path}: its configuration has {name}={value!r}: {allowed}")

    for name in SIZES:
        size = values.get(name)
        if (
            size is not None
            and not isinstance(size, list)
            and (not isinstance(size, int) or size < 1)
        ):
            refuse(name, size, "a whole number above 0 is needed")
    heads = values.get("num_attention_heads")
    key_heads = values.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(key_heads, int) and heads % key_heads:
        refuse(
            "num_key_value_heads", key_heads, f"a divisor of num_attention_heads={heads} is needed"
        )
    window = values.get("sliding_window")
    if isinstance(window, int) and window < 0:
        refuse("sliding_window", window, "a number of positions or null is needed")
    for name, value in flat_values(values):
        key = name.rpartition(".")[2]
        number = isinstance(value, (int, float))
        if number and math.isnan(value):
            refuse(name, value, "a number is needed")
        if key == "rope_theta" and value is not None and not (number and 0 < value < math.inf):
            refuse(name, value, "a finite number above 0 is needed")
        if (
            key.endswith(("norm_eps", "norm_epsilon"))
            and value is not None
            and not (number and 0 <= value < math.inf)
        ):
            refuse(name, value, "a finite number of at least 0 is needed")


def flat_values(values: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the values of nested dictionaries with their dotted names."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from flat_values(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def check_generation_config(path: str, folder: Path) -> None:
    """Raise ValueError for a generation_config.json that is damaged, which transformers would leave
    out in silence, and for one whose end tokens are no token ids."""
    ends = read_small_json(path, folder / "generation_config.json").get("eos_token_id")
    ids = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(type(token) is int for token in ids):
        raise ValueError(
            f"target.path={path}: generation_config.json has eos_token_id={ends!r}: token ids are needed"
        )


def checkpoint_files(path: str, folder: Path) -> list[Path]:
    """Return the safetensors files of a folder that its weights are read from; none where they are
    in another format. Raises ValueError for a damaged index and FileNotFoundError for files that
    are not there."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).exists():
        return []
    places = read_small_json(path, folder / INDEX).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"target.path={path}: {INDEX} has no weight_map: {DOWNLOAD_AGAIN}")
    names = sorted({str(name) for name in places.values()})
    for name in names:
        if not re.fullmatch(r"[\w-][\w.-]*", name) or not (folder / name).is_file():
            raise FileNotFoundError(
                f"target.path={path}: {INDEX} names {name}, which is not in that folder: {DOWNLOAD_AGAIN}"
            )
    return [folder / name for name in names]


def read_shapes(path: str, files: Iterable[Path]) -> dict[str, Shape]:
    """Return the shapes of the tensors in safetensors files, by their headers alone. Raises
    ValueError for a file whose header is damaged, or which is shorter or longer than its header
    says."""
    shapes = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                shapes |= {
                    name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()
                }  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"target.path={path}: {file.name} is damaged ({one_line(error)}): {DOWNLOAD_AGAIN}"
            ) from error
    return shapes


def check_size(path: str, model: nn.Module, shapes: Mapping[str, Shape], factor: int = 1) -> None:
    """Raise ValueError where a model, on the meta device, has more than `factor` times as many
    numbers as its
    files: what is too large for the memory is refused before it is allocated."""
    stored = sum(map(math.prod, shapes.values()))
    needed = sum(parameter.numel() for parameter in model.parameters())
    computed = max((buffer.numel() for buffer in model.buffers()), default=0)
    if max(needed, computed) > factor * stored:
        raise ValueError(
            f"target.path={path}: its sizes make a model of {max(needed, computed):,} numbers, but the weight files "
            f"hold {stored:,}{name_differences(model, shapes)}: {DOWNLOAD_AGAIN}"
        )


def name_differences(model: nn.Module, shapes: Mapping[str, Shape]) -> str:
    """Return which tensors the files lack or hold in another shape, as far as they have the model's
    names."""
    wanted = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    if not wanted.keys() & shapes.keys():
        return ""
    missing = [name for name in wanted if name not in shapes]
    mismatched = [
        (name, shapes[name], wanted[name])
        for name in wanted
        if shapes.get(name, wanted[name]) != wanted[name]
    ]
    return f" ({describe(missing, mismatched, ())})"


def describe(
    missing: Iterable[str],
    mismatched: Iterable[tuple[str, Shape, Shape]],
    unexpected: Iterable[str],
) -> str:
    """Return in words which tensors are wrong: a count and the first names of each kind."""
    shapes = [
        f"{name} ({tuple(stored)}, not {tuple(wanted)})"
        for name, stored, wanted in sorted(mismatched)
    ]
    kinds = {
        "missing": sorted(missing),
        "of another shape": shapes,
        "unknown to the model": sorted(unexpected),
    }
    phrases = []
    for kind, names in kinds.items():
        if names:
            more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
            be = "is" if len(names) == 1 else "are"
            phrases.append(f"{len(names)} {be} {kind}: {', '.join(names[:MAX_NAMED])}{more}")
    return "; ".join(phrases)


def is_other_part(name: str, model: PreTrainedModel) -> bool:
    """Return whether a tensor belongs to a part of the checkpoint that a causal language model does
    not have, or that its class ignores."""
    ignored = model._keys_to_ignore_on_load_unexpected or ()
    if OTHER_PARTS.search(name) or any(re.search(pattern, name) for pattern in ignored):
        return True
    text = model.config.get_text_config()
    extra_layers = getattr(text, "num_nextn_predict_layers", None) or 0
    layer = re.search(r"(?:^|\.)layers\.(\d+)\.", name)
    return layer is not None and 0 <= int(layer[1]) - text.num_hidden_layers < extra_layers


def check_tensors(
    path: str,
    model: PreTrainedModel,
    missing: Iterable[str],
    mismatched: Iterable[tuple[str, Shape, Shape]],
    unexpected: Iterable[str],
    remedy: str = DOWNLOAD_AGAIN,
) -> None:
    """Raise ValueError, naming them, for tensors that the weight files lack, hold in another shape
    (name, stored, wanted), or hold beside those of the model."""
    unexpected = [name for name in unexpected if not is_other_part(name, model)]
    if wrong := describe(missing, mismatched, unexpected):
        raise ValueError(
            f"target.path={path}: the weight files do not fit config.json, of their tensors {wrong}; {remedy}"
        )


def check_loading_info(
    path: str, model: PreTrainedModel, info: Mapping[str, Iterable], remedy: str = DOWNLOAD_AGAIN
) -> None:
    """Do as `check_tensors` with what `from_pretrained(..., output_loading_info=True)` returns."""
    check_tensors(
        path, model, info["missing_keys"], info["mismatched_keys"], info["unexpected_keys"], remedy
    )


@torch.no_grad()
def check_finite(place: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError, naming it, for the first tensor with an entry that is NaN or infinite.
    Tensors on the meta device and those of whole numbers are left out. `place`: where they are
    from, for the message."""
    for name, tensor in tensors:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        if tensor.element_size() == 1:  # float8 has no sums
            tensor = tensor.float()
        if torch.isfinite(tensor.sum()):  # an infinite or NaN entry makes the sum so
            continue
        count = int(tensor.isfinite().logical_not().sum())  # 0: the sum alone overflows
        if count:
            raise ValueError(
                f"{place}: {count} of the {tensor.numel():,} numbers of {name} are NaN or infinite: {DOWNLOAD_AGAIN}"
            )
