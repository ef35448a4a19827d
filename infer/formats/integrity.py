"""Digests inside a drafter's own weight file, where every reader of safetensors leaves them alone.

A bit that flips on a disk or on the way gives other weights and no error. The file's metadata
therefore holds the SHA-256 of its tensors and of the config.json beside it, both compared when the
folder is read. A file that others wrote has none and is believed, as before. This is against
damage; whoever writes files on purpose writes digests too.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from infer.utils.files import json_digest, save_readable


def tensor_digest(names: Iterable[str], tensor_of: Callable[[str], torch.Tensor]) -> str:
    """SHA-256 of tensors by name, dtype, shape and content; one at a time in memory."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = tensor_of(name).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_weights(weights: dict[str, torch.Tensor], file: Path, config: dict) -> None:
    """Writes a weight file with the digests of its tensors and of the config.json beside it. The
    same tensors give the same bytes: safetensors writes metadata in any order, which is put right
    here."""
    digests = {
        "sha256": tensor_digest(weights, weights.__getitem__),
        "config_sha256": json_digest(config),
    }
    save_readable(weights, file, {"format": "pt"} | digests)
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(size)
        assert len(text) == size, "a header that is written otherwise"
        opened.seek(8)
        opened.write(text)
