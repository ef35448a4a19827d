"""Digests in the metadata of a drafter's weight file, which other readers of safetensors ignore.

A bit that flips on a disk or in transfer changes weights without an error. The metadata therefore
holds the SHA-256 of the tensors and of the config.json beside them; both are compared when the
folder is read. Files without digests, written by other programs, are accepted. The digests protect
against damage, not against forgery.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from infer.utils.files import json_digest, save_shared_safetensors


def digest_tensors(names: Iterable[str], load_tensor: Callable[[str], torch.Tensor]) -> str:
    """Return the SHA-256 of tensors: name, dtype, shape and content. One tensor is in memory at a
    time."""
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = load_tensor(name).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_weights_with_digests(weights: dict[str, torch.Tensor], file: Path, config: dict) -> None:
    """Write a weight file with the digests of its tensors and of config.json.

    Equal tensors give equal bytes: safetensors writes metadata in any order, so the header is
    rewritten with sorted keys.
    """
    metadata = {
        "format": "pt",
        "sha256": digest_tensors(weights, weights.__getitem__),
        "config_sha256": json_digest(config),
    }
    save_shared_safetensors(weights, file, metadata)
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        encoded = text.encode().ljust(size)
        assert len(encoded) == size, "the header's size changed when it was rewritten"
        opened.seek(8)
        opened.write(encoded)
