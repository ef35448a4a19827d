"""Write weight files whose metadata contain digests, so that damaged files are detected.

A bit that flips on a disk or in transfer changes weights without an error. The metadata of the
safetensors file therefore hold two SHA-256 digests: one of the tensors, and one of the config.json
in the same folder. Both digests are checked when the folder is read. Other programs ignore the
digests, and files without digests are accepted. The digests protect against damage, not against
forgery.
"""

import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from infer.utils.files import json_digest, save_shared_safetensors


def digest_tensors(names: Iterable[str], load_tensor: Callable[[str], torch.Tensor]) -> str:
    """Return the SHA-256 digest of the names, dtypes, shapes and contents of tensors.

    `names` are the names of all tensors, and `load_tensor` returns the tensor with a given name.
    Tensors are loaded one after the other, so that only one is in memory at a time.
    """
    digest = hashlib.sha256()
    for name in sorted(names):
        tensor = load_tensor(name).detach().cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def save_weights_with_digests(weights: dict[str, torch.Tensor], file: Path, config: dict) -> None:
    """Write a weight file whose metadata contain the digests of the tensors and of `config`, the
    content of config.json.

    Equal tensors give equal files. As safetensors writes metadata in no fixed order, the header is
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
