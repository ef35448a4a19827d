"""Digests that identify a target by the content of its files. A path alone does not show whether
the files have changed since a run started."""

import hashlib
import json

from infer.targets.loading import list_weight_files
from infer.utils.files import json_digest

# number of samples, at evenly spaced offsets, that enter a file's digest
SAMPLES_PER_WEIGHT_FILE = 256
WEIGHT_SAMPLE_BYTES = 4096


def target_identity(path: str, tokenizer: str | None) -> dict[str, str | None]:
    """Return digests of the weights, config.json and tokenizer of the target at `path`. A file that
    the target lacks has the digest None.

    tokenizer: digest of the target's tokenizer, see `infer.targets.target.tokenizer_digest`
    """
    config_digest = None
    files = list_weight_files(path)
    if files:
        config_file = files[0].parent / "config.json"
        if config_file.is_file():
            config_digest = json_digest(json.loads(config_file.read_text()))
    return {"weights": weights_digest(path), "config": config_digest, "tokenizer": tokenizer}


def weights_digest(path: str) -> str:
    """Return a SHA-256, in hexadecimal, of the names and sizes of a model's weight files and of
    samples of the files' content."""
    digest = hashlib.sha256()
    for file in list_weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(SAMPLES_PER_WEIGHT_FILE):
                weights.seek(i * size // SAMPLES_PER_WEIGHT_FILE)
                digest.update(weights.read(WEIGHT_SAMPLE_BYTES))
    return digest.hexdigest()
