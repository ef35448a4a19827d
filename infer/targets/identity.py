"""What a target is by content. A path says neither what is there today nor what was there when
something was begun."""

import hashlib
import json

from infer.targets.loading import weight_files
from infer.utils.files import json_digest

# places of a weight file that are looked at to tell it from others, bytes at each
SAMPLES = 256
SAMPLE = 4096


def target_identity(path: str, tokenizer: str | None) -> dict[str, str | None]:
    """Return what identifies the target at `path`; `tokenizer`: its `tokenizer_digest`."""
    beside = [file.parent / "config.json" for file in weight_files(path)]
    config = (
        json_digest(json.loads(beside[0].read_text())) if beside and beside[0].is_file() else None
    )
    return {"weights": weights_digest(path), "config": config, "tokenizer": tokenizer}


def weights_digest(path: str) -> str:
    """A digest of a model's weight files: their names and sizes, and bytes from evenly spread
    places of each."""
    digest = hashlib.sha256()
    for file in weight_files(path):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as weights:
            for i in range(SAMPLES):
                weights.seek(i * size // SAMPLES)
                digest.update(weights.read(SAMPLE))
    return digest.hexdigest()
