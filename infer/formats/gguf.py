"""Drafters as GGUF, for llama.cpp: a folder in a layout that its own converter reads is converted by it."""

import os
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from infer.targets.loading import resolve_path

CONVERTER = "convert_hf_to_gguf.py"
FILE = "drafter.gguf"
OF_TARGET = ["*.json", "*.jinja", "*.txt", "*.model"]  # what the converter reads of a target: config and tokenizer


def find_converter() -> Path:
    """Return llama.cpp's converter. Raises ValueError where PATH has none."""
    folders = [Path(folder) / CONVERTER for folder in os.get_exec_path()]
    found = next((file for file in folders if file.is_file()), None)
    if found is None:
        raise ValueError(f"format=gguf is written by llama.cpp's own {CONVERTER}: put llama.cpp's folder on PATH")
    return found


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
