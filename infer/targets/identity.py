"""Digests that identify a target by the content of its files. A path alone does not show whether
the files have changed since a run started."""

import hashlib
import json

from infer.targets.loading import list_weight_files
from infer.utils.files import json_digest

# The digest of a weight file covers this many samples, which are evenly spaced.
SAMPLES_PER_WEIGHT_FILE = 256
WEIGHT_SAMPLE_BYTES = 4096


def compute_target_digests(path: str, tokenizer: str | None) -> dict[str, str | None]:
    """Return digests that identify the target at `path`, under the keys "weights", "config" and
    "tokenizer". The config's digest is None if the target has no config.json.

    tokenizer: digest of the target's tokenizer from `infer.targets.target.tokenizer_digest`, or
        None
    """
    config_digest = None
    files = list_weight_files(path)
    if files:
        config_file = files[0].parent / "config.json"
        if config_file.is_file():
            config_digest = json_digest(json.loads(config_file.read_text()))
    return {"weights": weights_digest(path), "config": config_digest, "tokenizer": tokenizer}


def weights_digest(path: str) -> str:
    """Return a hexadecimal SHA-256 of a model's weight files. It covers the names and sizes of the
    files and samples of their content."""
    digest = hashlib.sha256()
    for file in list_weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(SAMPLES_PER_WEIGHT_FILE):
                weights.seek(i * size // SAMPLES_PER_WEIGHT_FILE)
                digest.update(weights.read(WEIGHT_SAMPLE_BYTES))
    return digest.hexdigest()
