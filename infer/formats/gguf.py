"""Convert exported drafters to GGUF files for llama.cpp, by running llama.cpp's own script."""

import shutil
import subprocess
import sys
from pathlib import Path

from huggingface_hub import snapshot_download

from infer.targets.loading import resolve_hub_id_or_folder

GGUF_CONVERTER_SCRIPT_NAME = "convert_hf_to_gguf.py"
GGUF_FILE_NAME = "drafter.gguf"
MAX_CONVERTER_ERROR_CHARACTERS = 400


def find_converter(converter: str | None) -> Path:
    """Return the path of llama.cpp's script convert_hf_to_gguf.py.

    converter: the path given by the user; None searches the script on PATH

    Raises ValueError if the script does not exist.
    """
    file = converter or shutil.which(GGUF_CONVERTER_SCRIPT_NAME)
    if file is None or not Path(file).is_file():
        reason = f"{GGUF_CONVERTER_SCRIPT_NAME} is not on PATH"
        if converter:
            reason = f"converter={converter} does not exist"
        raise ValueError(
            f"format=gguf needs llama.cpp's converter script, but {reason}; use "
            f"converter=<folder of llama.cpp>/{GGUF_CONVERTER_SCRIPT_NAME}"
        )
    return Path(file)


def convert_to_gguf(folder: Path, target: str, converter: Path) -> Path:
    """Convert the drafter in `folder` to a GGUF file in the same folder. Return the path of the
    file.

    target: path of the target or its id on the Hugging Face hub; its tokenizer is copied into the
        file
    converter: llama.cpp's script, from `find_converter`

    Raises ValueError with the last line of the script's output if the script fails.
    """
    target_folder = Path(resolve_hub_id_or_folder(target))
    if not target_folder.is_dir():
        # Download only the target's config and tokenizer; the converter does not read its weights.
        patterns = ["*.json", "*.jinja", "*.txt", "*.model"]
        target_folder = Path(snapshot_download(target, allow_patterns=patterns))

    out = folder / GGUF_FILE_NAME
    command = [
        sys.executable,
        str(converter),
        str(folder),
        "--target-model-dir",
        str(target_folder),
        "--outfile",
        str(out),
        "--outtype",
        "auto",
    ]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode or not out.is_file():
        lines = (process.stderr.strip() or process.stdout.strip()).splitlines()
        reason = lines[-1] if lines else "it printed nothing"
        message = f"format=gguf: {converter.name} failed: {reason[:MAX_CONVERTER_ERROR_CHARACTERS]}"
        if "No module named" in reason:
            message += "; install the packages that it imports: pip install '.[gguf]'"
        raise ValueError(message)
    return out
