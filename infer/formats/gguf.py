"""Drafters as GGUF, for llama.cpp: written in a layout that llama.cpp's own converter reads, then converted by it."""

import shutil
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from infer.drafters.base import Drafter
from infer.drafters.families import FORMATS, check_format
from infer.targets.loading import resolve_path

CONVERTER = "convert_hf_to_gguf.py"
FILE = "drafter.gguf"
OF_TARGET = ["*.json", "*.jinja", "*.txt", "*.model"]  # what the converter reads of a target: config and tokenizer


def find_converter(named: str | None) -> Path:
    """Return llama.cpp's converter: the named file, or the one on PATH. Raises ValueError where there is none."""
    found = named or shutil.which(CONVERTER)
    if found is None or not Path(found).is_file():
        where = f"converter={named}: no such file" if named else f"{CONVERTER} is not on PATH"
        raise ValueError(
            f"format=gguf is written by llama.cpp's own converter, and {where}: give converter=<folder of "
            f"llama.cpp>/{CONVERTER}"
        )
    return Path(found)


def layout_for(drafter: Drafter) -> str:
    """Return the layout that the converter is given. Raises ValueError where it knows none for this drafter."""
    faults = []
    for name in FORMATS["gguf"].through:
        try:
            check_format(drafter.family, name, drafter.head_row, bool(drafter.own.get("conv_kernel_size")))
        except ValueError as error:
            faults.append(str(error))
            continue
        if name == "dflash2" and (fault := too_wide(drafter)):
            raise ValueError(fault)
        if (name == "dspark") == bool(drafter.own.get("sample_from_anchor")):
            return name
    raise ValueError("format=gguf: llama.cpp's converter knows no layout for this drafter: " + "; ".join(faults))


def too_wide(drafter: Drafter) -> str | None:
    """Say where llama.cpp's selector has no room for the drafter's: it keeps a slot's pairs in one hidden state."""
    top_k, size = drafter.conditional_head.top_k or drafter.config.vocab_size, drafter.config.hidden_size
    if top_k * (top_k + 1) <= size:
        return None
    return (
        f"format=gguf: its selector chooses among {top_k} tokens, and llama.cpp has room for "
        f"{int((size + 0.25) ** 0.5 - 0.5)} with {size} hidden entries: train it with a smaller drafter.head.top_k"
    )


def convert(folder: Path, target: str, converter: Path) -> Path:
    """Convert the drafter in `folder`, whose target's tokenizer goes into the file; return the file. Raises ValueError
    with the converter's last words where it fails."""
    place = Path(resolve_path(target))
    if not place.is_dir():
        place = Path(snapshot_download(target, allow_patterns=OF_TARGET))
    out = folder / FILE
    command = [sys.executable, str(converter), str(folder), "--target-model-dir", str(place), "--outfile", str(out)]
    done = subprocess.run([*command, "--outtype", "auto"], capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"format=gguf: {converter.name} failed: {said[0][:400]}")
    return out
