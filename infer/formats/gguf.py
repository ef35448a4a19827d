"""Drafters as GGUF, for llama.cpp: a folder in a layout that its own converter reads is converted
by it."""

import shutil
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from infer.targets.loading import resolve_path

CONVERTER = "convert_hf_to_gguf.py"
FILE = "drafter.gguf"


def find_converter(named: str | None) -> Path:
    """Return llama.cpp's converter: the named file, or the one on PATH. Raises ValueError where
    there is none."""
    found = named or shutil.which(CONVERTER)
    if found is None or not Path(found).is_file():
        where = f"converter={named}: no such file" if named else f"{CONVERTER} is not on PATH"
        raise ValueError(
            f"format=gguf is written by llama.cpp's own converter, and {where}: give converter=<folder of "
            f"llama.cpp>/{CONVERTER}"
        )
    return Path(found)


def convert(folder: Path, target: str, converter: Path) -> Path:
    """Convert the drafter in `folder`, whose target's tokenizer goes into the file; return the
    file. Raises ValueError with the converter's last words where it fails."""
    place = Path(resolve_path(target))
    if not place.is_dir():  # the converter reads config and tokenizer
        place = Path(
            snapshot_download(target, allow_patterns=["*.json", "*.jinja", "*.txt", "*.model"])
        )
    out = folder / FILE
    command = [
        sys.executable,
        str(converter),
        str(folder),
        "--target-model-dir",
        str(place),
        "--outfile",
        str(out),
    ]
    done = subprocess.run(
        [*command, "--outtype", "auto"], capture_output=True, text=True, check=False
    )
    if done.returncode or not out.is_file():
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:] or ["it said nothing"]
        raise ValueError(f"format=gguf: {converter.name} failed: {said[0][:400]}")
    return out
