"""Digests that identify a target by its content. A path alone does not show whether the files are
still those that a run started with."""

import hashlib
import json

from infer.targets.loading import list_weight_files
from infer.utils.files import json_digest

SAMPLES_PER_WEIGHT_FILE = 256  # read at evenly spaced offsets to identify a file
WEIGHT_SAMPLE_BYTES = 4096


def target_identity(path: str, tokenizer: str | None) -> dict[str, str | None]:
    """Return digests of the weights, config.json and tokenizer of the target at `path`.

    tokenizer: its `tokenizer_digest`. The value is None for what the target does not have.
    """
    config_digest = None
    files = list_weight_files(path)
    if files:
        config_file = files[0].parent / "config.json"
        if config_file.is_file():
            config_digest = json_digest(json.loads(config_file.read_text()))
    return {"weights": weights_digest(path), "config": config_digest, "tokenizer": tokenizer}


def weights_digest(path: str) -> str:
    """Return the SHA-256, as hexadecimal digits, of names, sizes and samples of a model's weight
    files."""
    digest = hashlib.sha256()
    for file in list_weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(SAMPLES_PER_WEIGHT_FILE):
                weights.seek(i * size // SAMPLES_PER_WEIGHT_FILE)
                digest.update(weights.read(WEIGHT_SAMPLE_BYTES))
    return digest.hexdigest()
