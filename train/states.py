"""Hidden states that a serving engine wrote, read as stored features: for targets that only an engine runs (in FP8, on
several GPUs).

`write_documents` lists the documents of packed rows; an engine runs each by itself (train/vllm_states.py does so with
vLLM's `extract_hidden_states`) and writes a safetensors file: `token_ids` (T,) and `hidden_states` (T, C, D), the
outputs of the tapped layers in their order and of the last layer, before the final norm, once if it is tapped itself.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from infer.targets.target import Target
from infer.utils.files import replacing


def documents_of(row: dict[str, torch.Tensor]) -> Iterator[slice]:
    """Yield where the documents of a packed row of (T,) columns are, padding left out."""
    numbers, counts = row["documents"].unique_consecutive(return_counts=True)
    start = 0
    for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
        if number >= 0:
            yield slice(start, start + count)
        start += count


def ids_digest(ids: torch.Tensor) -> bytes:
    """Return a digest of token ids (T,), by which a document's file is found."""
    return hashlib.blake2b(ids.to(torch.int64).contiguous().numpy().tobytes(), digest_size=16).digest()


def write_documents(dataset, path: Path) -> int:
    """Write the token ids of all documents of packed rows, each once, a line of JSON each; return how many."""
    seen: set[bytes] = set()
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as fresh, fresh.open("w") as lines:
        for i in range(len(dataset)):
            row = dataset[i]
            for part in documents_of(row):
                digest = ids_digest(row["ids"][part])
                if digest not in seen:
                    seen.add(digest)
                    lines.write(json.dumps({"prompt_token_ids": row["ids"][part].tolist()}) + "\n")
    return len(seen)


def written_layers(layers: tuple[int, ...], target: Target) -> tuple[int, ...]:
    """Return the C layers whose outputs an engine writes: the tapped ones, and the last."""
    last = target.config.num_hidden_layers - 1
    return layers if last in layers else (*layers, last)


class EngineStates:
    """The files that an engine wrote, by the token ids that are in them."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.files: dict[bytes, Path] = {}
        for file in sorted(self.folder.glob("*.safetensors")):
            self.files[ids_digest(self.tensor(file, "token_ids"))] = file
        if not self.files:
            raise ValueError(f"states={folder}: no .safetensors files there; train/vllm_states.py writes them")

    @staticmethod
    def tensor(file: Path, name: str) -> torch.Tensor:
        try:
            with safe_open(file, "pt") as opened:
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file}: {name} cannot be read ({error}): remove it, and let the engine go on") from error

    def of(self, ids: torch.Tensor, count: int, hidden: int) -> torch.Tensor:
        """Return the states (T, count, hidden) of a document with token ids (T,). Raises ValueError where the engine
        has not run it, or wrote something else."""
        file = self.files.get(ids_digest(ids))
        if file is None:
            raise ValueError(
                f"{self.folder} lacks a document of {len(ids)} tokens, {ids[:6].tolist()} and so on: let the engine "
                "run all that documents= wrote with the same data, target and tokenizer"
            )
        states, wanted = self.tensor(file, "hidden_states"), (len(ids), count, hidden)
        if states.shape != wanted:
            raise ValueError(
                f"{file}: hidden_states are {tuple(states.shape)}, this drafter needs {wanted}: tokens, tapped layers "
                "and the last one, hidden size"
            )
        return states

    def features(
        self, target: Target, layers: tuple[int, ...], row: dict[str, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the features of a packed row of (T,) columns: context (T, K, D), and last (T, D), normed here. Zero on
        padding."""
        hidden, length, written = target.config.hidden_size, len(row["ids"]), written_layers(layers, target)
        at_end = written.index(target.config.num_hidden_layers - 1)
        context = torch.zeros(length, len(layers), hidden, dtype=target.dtype, device=target.device)
        last = torch.zeros(length, hidden, dtype=target.dtype, device=target.device)
        for part in documents_of(row):
            states = self.of(row["ids"][part], len(written), hidden).to(target.device, target.dtype)
            context[part] = states[:, : len(layers)]
            last[part] = target.body.norm(states[:, at_end])
        return context, last


@torch.no_grad()
def compare(states: EngineStates, target: Target, layers: tuple[int, ...], rows: list[dict]) -> float:
    """Compare the states of the rows' first documents with the target's own; return the largest difference, relative to
    the states. Raises ValueError where states are closer to another layer's: the engine was asked for other layers, or
    ran another model."""
    depth, worst, written = target.config.num_hidden_layers, 0.0, written_layers(layers, target)
    for row in rows:
        ids = row["ids"][next(documents_of(row))]
        theirs = states.of(ids, len(written), target.config.hidden_size).to(target.device).float()
        here = ids[None].to(target.device)
        places = torch.arange(len(ids), device=target.device)[None]
        own = target.packed_features(here, places, torch.zeros_like(here), tuple(range(depth))).context
        own = own[0].unflatten(-1, (depth, -1)).float()  # (T, layers of the target, D)
        for i, layer in enumerate(written):
            apart = (own - theirs[:, i : i + 1]).norm(dim=(0, 2)) / own.norm(dim=(0, 2))
            nearest = int(apart.argmin())
            if nearest != layer or not apart[layer] < 0.5:
                raise ValueError(
                    f"{states.folder}: what should be the outputs of layer {layer} is nearest to those of layer "
                    f"{nearest}, {apart[layer]:.2g} of their size away from layer {layer}'s: let the engine write "
                    f"layers {','.join(map(str, layers))} of this model (train/vllm_states.py --layers)"
                )
            worst = max(worst, float(apart[layer]))
    return worst
