"""Damage every file of a target's folder and load it: one sentence, exit code 2, and nothing loads.

    python tests/robustness/damaged_targets.py [--int8] [--commands 3]

Each case is a copy of a small target's folder, with one safetensors file or in shards, in which one
file is truncated, emptied, deleted or says something else. It is loaded in float32, without its
layers, and with --int8 in int8 too. Each must end in a ValueError or FileNotFoundError of one line
that names the folder, without a warning before it. Of every kind of damage so many cases are also
run as a command, which must print that line alone and end with exit code 2.
"""

import argparse
import contextlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import load_target
from infer.targets.loading import EMBEDDED_TARGET_FOLDER, load_tokenizer

DAMAGE_REPOSITORY = Path(__file__).resolve().parent.parent.parent
DAMAGED_WEIGHTS_FILE = "model.safetensors"
WEIGHT_INDEX_FILE = "model.safetensors.index.json"
GENERATION_CONFIG_FILE = "generation_config.json"
QUERY_WEIGHT = "model.layers.1.self_attn.q_proj.weight"
OUTPUT_WEIGHT = "model.layers.1.self_attn.o_proj.weight"

Damage = Callable[[Path], None]


def make_targets(folder: Path) -> None:
    """Write a random target with the embedded one's tokenizer, as one file and in shards."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("embedded")
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
    )
    model = Qwen3ForCausalLM(config)
    for name, size in {"single": "1GB", "shards": "100KB"}.items():
        model.save_pretrained(folder / name, max_shard_size=size)
        tokenizer.save_pretrained(folder / name)
    shutil.copy(EMBEDDED_TARGET_FOLDER / "generation_config.json", folder / "single")


def truncate(name: str, share: float) -> Damage:
    """Keep this share of a file's bytes, of 1 all but one."""

    def damage(folder: Path) -> None:
        file = folder / name
        content = file.read_bytes()
        file.write_bytes(content[: min(int(share * len(content)), len(content) - 1)])

    return damage


def write(name: str, content: bytes) -> Damage:
    return lambda folder: (folder / name).write_bytes(content) and None


def delete(name: str) -> Damage:
    return lambda folder: (folder / name).unlink()


def edit(name: str, **values: object) -> Damage:
    """Set values of a JSON file."""

    def damage(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(json.loads(file.read_text()) | values))

    return damage


def claim_header(size: int) -> Damage:
    """Have the weights' header claim another size."""

    def damage(folder: Path) -> None:
        content = (folder / DAMAGED_WEIGHTS_FILE).read_bytes()
        (folder / DAMAGED_WEIGHTS_FILE).write_bytes(struct.pack("<Q", size) + content[8:])

    return damage


def change(name: str, new: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Put another tensor in a tensor's place; None: none."""

    def damage(folder: Path) -> None:
        tensors = load_file(folder / DAMAGED_WEIGHTS_FILE)
        tensor = new(tensors.pop(name))
        if tensor is not None:
            tensors[name] = tensor.contiguous()
        save_file(tensors, folder / DAMAGED_WEIGHTS_FILE, metadata={"format": "pt"})

    return damage


def add(name: str) -> Damage:
    """Add a tensor that the model does not have."""

    def damage(folder: Path) -> None:
        save_file(
            load_file(folder / DAMAGED_WEIGHTS_FILE) | {name: torch.ones(4)},
            folder / DAMAGED_WEIGHTS_FILE,
            metadata={"format": "pt"},
        )

    return damage


def fill_entry(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def fill(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return fill


def last_shard(change: Damage | None) -> Damage:
    """Delete the last shard, or change it."""

    def damage(folder: Path) -> None:
        shard = max(folder.glob("model-*.safetensors"))
        if change is None:
            shard.unlink()
        else:
            shard.rename(folder / DAMAGED_WEIGHTS_FILE)
            change(folder)
            (folder / DAMAGED_WEIGHTS_FILE).rename(shard)

    return damage


def weight_cases() -> dict[str, Damage]:
    cases = {
        f"cut to {share:.0%}": truncate(DAMAGED_WEIGHTS_FILE, share)
        for share in (0, 0.0001, 0.005, 0.5, 1)
    }
    cases |= {
        f"header of {size} bytes": claim_header(size) for size in (0, 2**31, 2**63, 2**64 - 1)
    }
    cases |= {
        "deleted": delete(DAMAGED_WEIGHTS_FILE),
        "zeros": write(DAMAGED_WEIGHTS_FILE, bytes(10_000)),
        "text": write(
            DAMAGED_WEIGHTS_FILE,
            b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        ),
        "tensor missing": change(OUTPUT_WEIGHT, lambda tensor: None),
        "embedding missing": change("model.embed_tokens.weight", lambda tensor: None),
        "norm missing": change("model.norm.weight", lambda tensor: None),
        "tensor transposed": change(QUERY_WEIGHT, lambda tensor: tensor[:16]),
        "tensor flat": change(QUERY_WEIGHT, torch.flatten),
        "tensor empty": change(QUERY_WEIGHT, lambda tensor: tensor[:0]),
        "embedding cut": change("model.embed_tokens.weight", lambda tensor: tensor[:-1]),
        "norm longer": change("model.norm.weight", lambda tensor: torch.cat([tensor, tensor])),
        "tensor unexpected": add("model.layers.1.self_attn.q_proj.bias"),
        "layer unexpected": add("model.layers.7.input_layernorm.weight"),
        "NaN": change(QUERY_WEIGHT, fill_entry(float("nan"))),
        "infinite": change("model.norm.weight", fill_entry(float("inf"))),
        "minus infinite": change("model.embed_tokens.weight", fill_entry(-float("inf"))),
    }
    return cases


def config_cases() -> dict[str, Damage]:
    values = {
        "hidden_size": (None, -32, 0, "32", [32], 64, 2**40),
        "num_hidden_layers": (None, -1, 0, "two", 3, 1, 2**31),
        "num_attention_heads": (0, -4, "4", 2**40, 3),
        "num_key_value_heads": (0, -2, 3),
        "head_dim": (0, -8, 16, 7, {}),
        "intermediate_size": (0, -1, 96, "48"),
        "vocab_size": (None, 0, -5, 7, 2**50, [1]),
        "rms_norm_eps": ("small", None, float("nan"), -1.0),
        "rope_parameters": (
            "default",
            {"rope_type": "no such"},
            {"rope_type": "default", "rope_theta": 0},
        ),
        "hidden_act": ("no such", 5),
        "layer_types": ("full_attention", ["full_attention"], ["no such"] * 2),
        "model_type": (None, "no such", 5),
        "eos_token_id": ("end", 1.5, [[0]]),
        "tie_word_embeddings": (False,),
    }
    return {
        f"{key}={value}": edit("config.json", **{key: value})
        for key, hostile_values in values.items()
        for value in hostile_values
    }


def json_cases(name: str) -> dict[str, Damage]:
    cases = {f"cut to {share:.0%}": truncate(name, share) for share in (0, 0.5, 0.9)}
    contents = {
        "list": b"[1]",
        "null": b"null",
        "no text": b"\xff\xfe\x00" * 9,
        "deep": b"[" * 100_000,
    }
    return cases | {kind: write(name, content) for kind, content in contents.items()}


def shard_cases() -> dict[str, Damage]:
    return {
        "last one deleted": last_shard(None),
        "last one emptied": last_shard(write(DAMAGED_WEIGHTS_FILE, b"")),
        "last one cut": last_shard(truncate(DAMAGED_WEIGHTS_FILE, 0.7)),
        "no weight_map": write(WEIGHT_INDEX_FILE, b"{}"),
        "weight_map is a list": edit(
            WEIGHT_INDEX_FILE, weight_map=["model-00001-of-00002.safetensors"]
        ),
        "weight_map is empty": edit(WEIGHT_INDEX_FILE, weight_map={}),
        "names no such file": edit(
            WEIGHT_INDEX_FILE, weight_map={QUERY_WEIGHT: "model-00009-of-00009.safetensors"}
        ),
        "names a number": edit(WEIGHT_INDEX_FILE, weight_map={QUERY_WEIGHT: 5}),
        "names a file elsewhere": edit(
            WEIGHT_INDEX_FILE, weight_map={QUERY_WEIGHT: "../single/model.safetensors"}
        ),
        "index deleted": delete(WEIGHT_INDEX_FILE),
    }


def tokenizer_cases() -> dict[str, Damage]:
    return json_cases("tokenizer.json") | {
        "deleted": delete("tokenizer.json"),
        "empty object": write("tokenizer.json", b"{}"),
        "no model": edit("tokenizer.json", model=None),
    }


DAMAGE_CASES: dict[str, dict[str, Damage]] = {
    "weights": weight_cases(),
    "shards": shard_cases(),
    "index": json_cases(WEIGHT_INDEX_FILE),
    "config.json": json_cases("config.json") | {"deleted": delete("config.json")},
    "config values": config_cases(),
    "generation_config": json_cases(GENERATION_CONFIG_FILE)
    | {"ends": edit(GENERATION_CONFIG_FILE, eos_token_id="")},
    "tokenizer.json": tokenizer_cases(),
    "tokenizer_config": json_cases("tokenizer_config.json"),
    "chat template": {"cut": write("chat_template.jinja", b"{% for message in messages %}{{ mess")},
}
IN_SHARDS = ("shards", "index")


def check_load(folder: Path, **load_options: object) -> str | None:
    """Load a damaged folder; return what is wrong with what came of it."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
            load_target(str(folder), device="cpu", **load_options)
    except (ValueError, FileNotFoundError) as error:
        message = str(error)
        if "\n" in message or len(message) > 700:
            return f"not one sentence: {message!r}"
        if str(folder) not in message:
            return f"the folder is not named: {message!r}"
        if printed.getvalue():
            return f"printed before: {printed.getvalue()[:300]!r}"
        return None
    except BaseException as error:
        return f"{type(error).__name__}: {str(error)[:200]!r}"
    return "it was loaded"


def run_command(folder: Path, int8: bool) -> str | None:
    """Run `generate` with a damaged folder; return what is wrong with what came of it."""
    options = [
        f"target.path={folder}",
        "target.device=cpu",
        "prompt=x",
        *["target.quantization=int8"] * int8,
    ]
    command = [
        sys.executable,
        str(DAMAGE_REPOSITORY / "infer" / "main.py"),
        "generate",
        "decoding.method=plain",
        *options,
    ]
    environment = os.environ | {"PYTHONPATH": str(DAMAGE_REPOSITORY), "HF_HUB_OFFLINE": "1"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = process.stderr.splitlines()
    is_refused = (
        process.returncode == 2
        and len(lines) == 1
        and lines[0].startswith("error: ")
        and not process.stdout
    )
    return (
        None
        if is_refused
        else f"exit code {process.returncode}: {process.stdout[-300:]!r} {process.stderr[-500:]!r}"
    )


def run_cases(work_folder: Path, int8: bool, commands: int) -> Counter:
    """Try all cases; return how many of each kind there were, and how many bugs."""
    make_targets(work_folder)
    for name in ("single", "shards"):
        load_target(str(work_folder / name), "float32", "cpu")
    loading_modes = {"float32": {"dtype": "float32"}, "no layers": {"only_layers": (0, 1)}}
    if int8:
        loading_modes["int8"] = {"quantization": "int8"}
    counts = Counter()
    for kind, cases in DAMAGE_CASES.items():
        for number, (name, damage) in enumerate(cases.items()):
            folder = work_folder / "damaged"
            shutil.copytree(work_folder / ("shards" if kind in IN_SHARDS else "single"), folder)
            damage(folder)
            bugs = {
                mode: check_load(folder, **load_options)
                for mode, load_options in loading_modes.items()
            }
            if number < commands:
                bugs["command"] = run_command(folder, int8 and number % 2 == 1)
                counts["commands"] += 1
            shutil.rmtree(folder)
            counts[kind] += 1
            for mode, bug in bugs.items():
                if bug is not None:
                    counts["bugs"] += 1
                    print(f"  {kind}, {name}, {mode}: {bug}", file=sys.stderr, flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--int8", action="store_true", help="load each folder in int8 too")
    parser.add_argument(
        "--commands", type=int, default=0, help="cases of each kind that are run as a command too"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work_folder:
        counts = run_cases(Path(work_folder), args.int8, args.commands)
    for kind in DAMAGE_CASES:
        print(f"{kind:<20}{counts[kind]} folders")
    print(
        f"{sum(counts[kind] for kind in DAMAGE_CASES)} folders, {counts['commands']} commands, "
        f"{counts['bugs']} bugs"
    )
    raise SystemExit(counts["bugs"] > 0)


if __name__ == "__main__":
    main()
