"""Damages every file that this project reads back, in every way, and looks what becomes of it.

    python tests/robustness/corrupt.py --cases 150

Training checkpoint, drafter folder, stored features, n-gram file: bytes flipped, zeroed, cut off,
added, files swapped, deleted or made links, headers that claim huge sizes and negative places,
manifests that name files elsewhere. Each case must be refused in a sentence that names the file or
its folder, or be without consequence: what is read is bit for bit what was saved. Exit code 1 for
anything else, and for memory that grew by more than `--margin` megabytes.
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

from data.packing import packed_rows
from data.rows import DataConfig
from infer import load_drafter, load_target, save_drafter
from infer.config import DrafterConfig
from infer.drafters.base import Drafter, new_drafter
from infer.ngrams.count import count_ngrams
from infer.ngrams.model import NGram, count_of, find
from infer.targets.target import Target
from train.config import FeaturesConfig
from train.features import StoredRows, dependencies, write_features
from train.run import checkpoints as state

Reader = Callable[
    [Path], object
]  # everything that a folder says, comparable with same(); or an error


def same(one: object, other: object) -> bool:
    """Bit for bit."""
    if isinstance(one, torch.Tensor):
        return (
            torch.equal(one.view(torch.uint8), other.view(torch.uint8)) and one.dtype == other.dtype
        )
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


# What is damaged: a folder is made once, and read after each case.


def tiny_drafter() -> Drafter:
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
    drafter = new_drafter(DrafterConfig(block_size=4, mask_token_id=96), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return drafter


def make_drafter(folder: Path) -> Reader:
    drafter = tiny_drafter()
    save_drafter(drafter.config, drafter.state_dict(), folder)

    def read(folder: Path) -> object:
        again = load_drafter(folder)
        return {"config": again.config.to_dict(), "weights": dict(again.state_dict())}

    return read


def make_features(folder: Path) -> Reader:
    target = load_target("embedded", dtype="bfloat16")
    data = DataConfig(source="stdlib", length=64, max_examples=1)
    config = FeaturesConfig(out=str(folder), data=data)
    layers = (3, 8)
    rows = packed_rows(data, target.tokenizer, target.tokenizer_digest).select(range(8))
    write_features(config, target, layers, rows, lambda *_: None)
    needed = dependencies(config, target, layers)

    def read(folder: Path) -> object:
        rows = StoredRows(folder)
        rows.check(needed)
        return rows[list(range(len(rows)))]

    return read


def make_ngrams(folder: Path) -> Reader:
    dice = random.Random(0)
    documents = [[dice.randrange(60) for _ in range(80)] for _ in range(30)]
    count_ngrams(documents, 97, 3, folder / "ngrams", "0" * 64)

    def read(folder: Path) -> object:
        model = NGram.open(folder / "ngrams", "0" * 64)
        for ids in ([5], [5, 6], [96]):
            count_of(
                model.arrays, find(model.arrays, np.array(ids), 0, len(ids))
            )  # damage is not noticed, does no harm
        return [model.order, model.vocabulary, model.tokens, model.nodes]

    return read


def make_checkpoint(folder: Path) -> Reader:
    drafter = tiny_drafter()
    weights = dict(drafter.state_dict())
    moments = {f"exp_avg/{name}": torch.rand_like(tensor) for name, tensor in weights.items()}
    state.training_state = lambda drafter, engine: (
        weights | moments
    )  # as the engine of a run would give it
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    (folder / "run").mkdir()
    saved = state.save(folder / "run", 1, drafter, None, torch.bfloat16)
    dist.destroy_process_group()
    for part in saved.iterdir():
        part.rename(folder / part.name)
    shutil.rmtree(folder / "run")

    def read(folder: Path) -> object:
        if problem := state.find_damage(folder):
            raise ValueError(f"{folder}: {problem}")
        return {
            "state": state.load(folder),
            "drafter": load_file(folder / "drafter" / "model.safetensors"),
        }

    return read


# What is done to a file.


def flipped(content: bytearray, dice: random.Random) -> bytearray:
    place = dice.randrange(min(len(content), 3000) if dice.random() < 0.5 else len(content))
    content[place] ^= 1 << dice.randrange(8)
    return content


def zeroed(content: bytearray, dice: random.Random) -> bytearray:
    place = dice.randrange(len(content))
    end = min(len(content), place + dice.randrange(1, 5000))
    content[place:end] = bytes(end - place)
    return content


def truncated(content: bytearray, dice: random.Random) -> bytearray:
    return content[: dice.choice([0, 1, 7, 8, len(content) - 1, dice.randrange(len(content))])]


def lengthened(content: bytearray, dice: random.Random) -> bytearray:
    return content + dice.randbytes(dice.choice([1, 8, 4096]))


def claimed(content: bytearray, dice: random.Random) -> bytearray:
    """Headers that promise too much: of safetensors, else numbers somewhere in the first
    kilobyte."""
    number = dice.choice([2**63 - 1, 2**64 - 1, 2**40, 2**31, 100_000_001, 0])
    at = 0 if dice.random() < 0.5 else 8 * dice.randrange(min(128, max(1, len(content) // 8)))
    content[at : at + 8] = struct.pack("<Q", number)
    return content


def edited(content: bytearray, dice: random.Random) -> bytearray:
    """A value somewhere in a JSON text, or in a safetensors header, becomes a hostile one."""
    start = 0
    end = len(content)
    if content[:1] != b"{":
        start = 8
        end = 8 + int.from_bytes(content[:8], "little")
    try:
        said = json.loads(content[start:end])
    except ValueError:
        return flipped(content, dice)
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
    at = said
    while True:
        keys = list(at) if isinstance(at, dict) else range(len(at))
        key = dice.choice(list(keys))
        inside = at[key]
        if isinstance(inside, (dict, list)) and inside and dice.random() < 0.7:
            at = inside
            continue
        if isinstance(at, dict) and dice.random() < 0.3:
            at[dice.choice(["../../x", "/etc/passwd", "x\0y", "x"])] = at.pop(key)
        else:
            at[key] = dice.choice(hostile)
        break
    text = json.dumps(said).encode()
    if start:
        return bytearray(struct.pack("<Q", len(text)) + text + content[end:])
    return bytearray(text)


def deep(content: bytearray, dice: random.Random) -> bytearray:
    text = dice.choice(
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


WAYS = {flipped: 40, zeroed: 8, truncated: 12, lengthened: 8, claimed: 10, edited: 25, deep: 4}


def damage(folder: Path, file: Path, dice: random.Random) -> str:
    """Does something to a file of a folder; returns what."""
    others = [path for path in folder.rglob("*") if path.is_file() and path != file]
    kind = dice.random()
    if kind < 0.03:
        file.unlink()
        return "deleted"
    if kind < 0.08 and others:
        other = dice.choice(others)
        content = other.read_bytes()
        other.write_bytes(file.read_bytes())
        file.write_bytes(content)
        return f"swapped with {other.name}"
    if kind < 0.12:
        to = dice.choice(["/dev/null", "/etc/hostname", "nothing", *map(str, others)])
        file.unlink()
        file.symlink_to(to)
        return "a link"
    (way,) = dice.choices(list(WAYS), WAYS.values())
    file.write_bytes(way(bytearray(file.read_bytes()), dice))
    return way.__name__


def case(
    read: Reader, original: Path, expected: object, dice: random.Random
) -> tuple[str, str | None]:
    """One damaged copy: how it was met, and what is wrong with that."""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / original.name
        shutil.copytree(original, folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = dice.choice(files)
        what = damage(folder, file, dice)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "error", UserWarning
                )  # a config.json that was changed is read, and named
                found = read(folder)
        except (ValueError, FileNotFoundError, UserWarning) as error:
            named = str(folder) in str(error) or file.name in str(error)
            return (
                "named",
                None if named else f"{file.name} {what}: not named in {str(error)[:300]!r}",
            )
        except BaseException as error:
            return "fault", f"{file.name} {what}: {type(error).__name__}: {str(error)[:300]}"
        try:
            equal = same(expected, found)
        except (RuntimeError, AttributeError, TypeError, KeyError):
            equal = False
        return (
            ("harmless", None)
            if equal
            else ("fault", f"{file.name} {what}: something else is read")
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
        "drafter": make_drafter,
        "ngrams": make_ngrams,
        "features": make_features,
        "checkpoint": make_checkpoint,
    }
    failed = False
    with tempfile.TemporaryDirectory() as place:
        for name, make in makers.items():
            folder = Path(place) / name
            dice = random.Random(args.seed)
            counts = Counter()
            folder.mkdir()
            read = make(folder)
            expected = read(folder)
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            for number in range(args.cases):
                outcome, fault = case(read, folder, expected, dice)
                counts[outcome if fault is None else "fault"] += 1
                if fault is not None:
                    print(f"  case {number}: {fault}", file=sys.stderr, flush=True)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024 - before
            failed |= bool(counts["fault"]) or grown > args.margin
            print(
                f"{name:<12}{args.cases} cases: {counts['named']} refused by name, {counts['harmless']} without "
                f"consequence, {counts['fault']} faults; memory at most {grown:.0f} MB above reading it whole",
                flush=True,
            )
    raise SystemExit(failed)


if __name__ == "__main__":
    main()
