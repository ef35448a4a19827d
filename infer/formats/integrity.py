"""Write weight files with digests in their metadata, so that damage is detected.

Without digests, a bit that flips on a disk or in transfer would change weights unnoticed. The
metadata of a safetensors file therefore contain two SHA-256 digests: one of the tensors, and one of
the config.json in the same folder. Both are checked when the folder is read. Other programs ignore
them, and files without digests are accepted. Digests protect against damage, not against forgery.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from infer.utils.files import json_digest, save_world_readable_safetensors


def digest_tensors(names: Iterable[str], load_tensor: Callable[[str], torch.Tensor]) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and contents of tensors.

    names: the names of all tensors; their order does not matter
    load_tensor: returns the tensor with a given name. It is called for one tensor after the other,
        so that only one has to be in memory.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = load_tensor(name).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_weights_with_digests(weights: dict[str, torch.Tensor], file: Path, config: dict) -> None:
    """Write a safetensors file whose metadata contain digests of the tensors and of config.json.

    weights: keys are names of tensors. config: the content of config.json.

    Equal inputs give equal files. To this end, the file's header is rewritten with sorted metadata,
    because safetensors writes them in random order.
    """
    metadata = {
        "format": "pt",
        "sha256": digest_tensors(weights, weights.__getitem__),
        "config_sha256": json_digest(config),
    }
    save_world_readable_safetensors(weights, file, metadata)
    with file.open("r+b") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        encoded = text.encode().ljust(size)
        assert len(encoded) == size, "the header's size changed when it was rewritten"
        opened.seek(8)
        opened.write(encoded)
