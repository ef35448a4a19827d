"""What a target is by content. A path says neither what is there today nor what was there when
something was begun."""

import hashlib
import json

from infer.targets.loading import weight_files
from infer.utils.files import json_digest

SAMPLES, SAMPLE = 256, 4096  # places of a weight file that are looked at to tell it from others, bytes at each


def target_identity(path: str, tokenizer: str | None) -> dict[str, str | None]:
    """Return what identifies the target at `path`; `tokenizer`: its `tokenizer_digest`."""
    return {"weights": weights_digest(path), "config": config_digest(path), "tokenizer": tokenizer}


def weights_digest(path: str) -> str:
    """A digest of a model's weight files: their names and sizes, and bytes from evenly spread places of
    each."""
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(SAMPLES):
                weights.seek(i * size // SAMPLES)
                digest.update(weights.read(SAMPLE))
    return digest.hexdigest()


def config_digest(path: str) -> str | None:
    """Return the digest of the config.json beside a model's weights, None where there are none."""
    files = [file.parent / "config.json" for file in weight_files(path)]
    return json_digest(json.loads(files[0].read_text())) if files and files[0].is_file() else None
