"""Damage every file that this project reads back, in many ways, and read it.

    python tests/robustness/corrupt.py --cases 150

Training checkpoint, drafter folder, stored features, n-gram file: bytes flipped, zeroed, cut off,
added, files swapped, deleted or replaced by links, headers with huge sizes and negative offsets,
manifests that name files elsewhere. Each case must be refused with a sentence that names the file
or its folder, or have no effect: what is read equals what was saved, bit for bit. The exit code is
1 for anything else, and for memory that grew by more than `--margin` megabytes.
"""

import argparse
import json
import random
import resource
import shutil
import struct
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from data.packing import load_packed_dataset
from data.rows import DataConfig
from infer import load_drafter, load_target, save_drafter
from infer.config import DrafterConfig
from infer.drafters.base import Drafter
from infer.drafters.build import create_drafter
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGramModel, find_ngram_node, get_node_count
from infer.targets.target import Target
from train.config import FeaturesConfig
from train.features import StoredFeatures, feature_dependencies, write_features
from train.run import checkpoints as state

# Reads everything in a folder, for equal_bits, or raises an error.
Reader = Callable[[Path], object]


def equal_bits(first: object, other: object) -> bool:
    """Return whether two values are equal, tensors bit for bit."""
    if isinstance(first, torch.Tensor):
        return (
            torch.equal(first.view(torch.uint8), other.view(torch.uint8))
            and first.dtype == other.dtype
        )
    if isinstance(first, np.ndarray):
        return np.array_equal(first, other)
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(
            equal_bits(first[key], other[key]) for key in first
        )
    if isinstance(first, (list, tuple)):
        return len(first) == len(other) and all(map(equal_bits, first, other))
    return first == other


# Folders that are damaged: each is created once, and read after each case.


def build_tiny_drafter() -> Drafter:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "head_dim": 8,
    }
    target = Target(
        Qwen3ForCausalLM(Qwen3Config(num_attention_heads=4, num_key_value_heads=2, **sizes))
    )
    drafter = create_drafter(DrafterConfig(block_size=4, mask_token_id=96), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter


def prepare_drafter(folder: Path) -> Reader:
    drafter = build_tiny_drafter()
    save_drafter(drafter.config, drafter.state_dict(), folder)

    def read(folder: Path) -> object:
        again = load_drafter(folder)
        return {"config": again.config.to_dict(), "weights": dict(again.state_dict())}

    return read


def prepare_features(folder: Path) -> Reader:
    target = load_target("embedded", dtype="bfloat16")
    data = DataConfig(source="stdlib", length=64, max_examples=1)
    config = FeaturesConfig(out=str(folder), data=data)
    layers = (3, 8)
    rows = load_packed_dataset(data, target.tokenizer, target.tokenizer_digest).select(range(8))
    write_features(config, target, layers, rows, lambda *_: None)
    needed = feature_dependencies(config, target, layers)

    def read(folder: Path) -> object:
        rows = StoredFeatures(folder)
        rows.check_dependencies(needed)
        return rows[list(range(len(rows)))]

    return read


def prepare_ngrams(folder: Path) -> Reader:
    random_numbers = random.Random(0)
    documents = [[random_numbers.randrange(60) for _ in range(80)] for _ in range(30)]
    count_ngrams(documents, 97, 3, folder / "ngrams", "0" * 64)

    def read(folder: Path) -> object:
        model = NGramModel.open(folder / "ngrams", "0" * 64)
        for ids in ([5], [5, 6], [96]):
            get_node_count(
                model.trie, find_ngram_node(model.trie, np.array(ids), 0, len(ids))
            )  # damage is not noticed, does no harm
        return [model.order, model.vocabulary, model.num_tokens, model.nodes_per_level]

    return read


def prepare_checkpoint(folder: Path) -> Reader:
    drafter = build_tiny_drafter()
    weights = dict(drafter.state_dict())
    moments = {f"exp_avg/{name}": torch.rand_like(tensor) for name, tensor in weights.items()}
    state.gather_training_state = lambda drafter, engine: (
        weights | moments
    )  # as the engine of a run would give it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (folder / "run").mkdir()
    saved = state.save_checkpoint(folder / "run", 1, drafter, None, torch.bfloat16)
    dist.destroy_process_group()
    for file in saved.iterdir():
        file.rename(folder / file.name)
    shutil.rmtree(folder / "run")

    def read(folder: Path) -> object:
        if problem := state.describe_checkpoint_damage(folder):
            raise ValueError(f"{folder}: {problem}")
        return {
            "state": state.load_training_state(folder),
            "drafter": load_file(folder / "drafter" / "model.safetensors"),
        }

    return read


# Kinds of damage to a file's content.


def flip_bit(content: bytearray, random_numbers: random.Random) -> bytearray:
    position = random_numbers.randrange(
        min(len(content), 3000) if random_numbers.random() < 0.5 else len(content)
    )
    content[position] ^= 1 << random_numbers.randrange(8)
    return content


def zero_bytes(content: bytearray, random_numbers: random.Random) -> bytearray:
    position = random_numbers.randrange(len(content))
    end = min(len(content), position + random_numbers.randrange(1, 5000))
    content[position:end] = bytes(end - position)
    return content


def truncate(content: bytearray, random_numbers: random.Random) -> bytearray:
    return content[
        : random_numbers.choice(
            [0, 1, 7, 8, len(content) - 1, random_numbers.randrange(len(content))]
        )
    ]


def append_bytes(content: bytearray, random_numbers: random.Random) -> bytearray:
    return content + random_numbers.randbytes(random_numbers.choice([1, 8, 4096]))


def insert_huge_number(content: bytearray, random_numbers: random.Random) -> bytearray:
    """Write a huge number into the header of a safetensors file, or into the first kilobyte."""
    number = random_numbers.choice([2**63 - 1, 2**64 - 1, 2**40, 2**31, 100_000_001, 0])
    at = (
        0
        if random_numbers.random() < 0.5
        else 8 * random_numbers.randrange(min(128, max(1, len(content) // 8)))
    )
    content[at : at + 8] = struct.pack("<Q", number)
    return content


def edit_json_value(content: bytearray, random_numbers: random.Random) -> bytearray:
    """Replace a random value of a JSON text or safetensors header by a hostile one."""
    start = 0
    end = len(content)
    if content[:1] != b"{":
        start = 8
        end = 8 + int.from_bytes(content[:8], "little")
    try:
        parsed = json.loads(content[start:end])
    except ValueError:
        return flip_bit(content, random_numbers)
    hostile = [
        -1,
        2**62,
        10**30,
        1e308,
        float("nan"),
        None,
        "",
        "../../x",
        "/dev/zero",
        "\0",
        [],
        {},
        True,
        [-5, 2**60],
    ]
    at = parsed
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = random_numbers.choice(list(keys))
        inside = at[key]
        if isinstance(inside, (dict, list)) and inside and random_numbers.random() < 0.7:
            at = inside
            continue
        if isinstance(at, dict) and random_numbers.random() < 0.3:
            at[random_numbers.choice(["../../x", "/etc/passwd", "x\0y", "x"])] = at.pop(key)
        else:
            at[key] = random_numbers.choice(hostile)
        break
    text = json.dumps(parsed).encode()
    if start:
        return bytearray(struct.pack("<Q", len(text)) + text + content[end:])
    return bytearray(text)


def replace_content(content: bytearray, random_numbers: random.Random) -> bytearray:
    text = random_numbers.choice(
        [
            b"[" * 100_000,
            b'{"files":' * 50_000,
            b'{"a": 1' + b"0" * 6000 + b"}",
            b"\xff" * 100,
            b"null",
            b"[]",
        ]
    )
    return bytearray(text)


DAMAGE_WEIGHTS = {
    flip_bit: 40,
    zero_bytes: 8,
    truncate: 12,
    append_bytes: 8,
    insert_huge_number: 10,
    edit_json_value: 25,
    replace_content: 4,
}


def damage_file(folder: Path, file: Path, random_numbers: random.Random) -> str:
    """Damage a file of a folder; return a description."""
    others = [path for path in folder.rglob("*") if path.is_file() and path != file]
    kind = random_numbers.random()
    if kind < 0.03:
        file.unlink()
        return "deleted"
    if kind < 0.08 and others:
        other = random_numbers.choice(others)
        content = other.read_bytes()
        other.write_bytes(file.read_bytes())
        file.write_bytes(content)
        return f"swapped with {other.name}"
    if kind < 0.12:
        to = random_numbers.choice(["/dev/null", "/etc/hostname", "nothing", *map(str, others)])
        file.unlink()
        file.symlink_to(to)
        return "a link"
    (damage_function,) = random_numbers.choices(list(DAMAGE_WEIGHTS), DAMAGE_WEIGHTS.values())
    file.write_bytes(damage_function(bytearray(file.read_bytes()), random_numbers))
    return damage_function.__name__


def case(
    read: Reader, original: Path, expected: object, random_numbers: random.Random
) -> tuple[str, str | None]:
    """One damaged copy: how it was met, and what is wrong with that."""
    with tempfile.TemporaryDirectory() as work_folder:
        folder = Path(work_folder) / original.name
        shutil.copytree(original, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = random_numbers.choice(files)
        description = damage_file(folder, file, random_numbers)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", UserWarning
                )  # a config.json that was changed is read, and named
                outcome = read(folder)
        except (ValueError, FileNotFoundError, UserWarning) as error:
            named = str(folder) in str(error) or file.name in str(error)
            return (
                "named",
                None if named else f"{file.name} {description}: not named in {str(error)[:300]!r}",
            )
        except BaseException as error:
            return "fault", f"{file.name} {description}: {type(error).__name__}: {str(error)[:300]}"
        try:
            equal = equal_bits(expected, outcome)
        except (RuntimeError, AttributeError, TypeError, KeyError):
            equal = False
        return (
            ("harmless", None)
            if equal
            else ("fault", f"{file.name} {description}: something else is read")
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=150, help="of each kind of folder")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--margin", type=float, default=400.0)
    args = parser.parse_args()
    makers = {
        "drafter": prepare_drafter,
        "ngrams": prepare_ngrams,
        "features": prepare_features,
        "checkpoint": prepare_checkpoint,
    }
    failed = False
    with tempfile.TemporaryDirectory() as work_folder:
        for name, make in makers.items():
            folder = Path(work_folder) / name
            random_numbers = random.Random(args.seed)
            counts = Counter()
            folder.mkdir()
            read = make(folder)
            expected = read(folder)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            for number in range(args.cases):
                outcome, fault = case(read, folder, expected, random_numbers)
                counts[outcome if fault is None else "fault"] += 1
                if fault is not None:
                    print(f"  case {number}: {fault}", file=sys.stderr, flush=True)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
            failed |= bool(counts["fault"]) or grown > args.margin
            print(
                f"{name:<12}{args.cases} cases: {counts['named']} refused by name, "
                f"{counts['harmless']} without "
                f"consequence, {counts['fault']} faults; memory at most {grown:.0f} MB above "
                "reading it whole",
                flush=True,
            )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
