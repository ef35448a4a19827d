"""`./launch.sh replay run=... step=...`: a skipped step computed again, layer by layer.

Loads the weights and rows that `train.safety.guards.Skips` kept, computes loss and gradient of each process's passes
again in the run's own precision, and prints the first value that is not finite, in the order of computation: weights,
stored features, each layer's output, the loss, the gradients of the outputs, and the gradient of every weight.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

from infer.drafters.base import Drafter
from infer.targets.loading import resolve_device
from infer.targets.target import Target
from train.batches import blocks_behind
from train.config import ReplayConfig, TrainConfig
from train.engine import compute_dtype
from train.run.initial import initial_drafter


@dataclass
class Seen:
    """Values that are not finite, in the order in which they were met."""

    lines: list[str] = field(default_factory=list)

    def look(self, name: str, value: torch.Tensor) -> None:
        """Record a tensor that has such values."""
        if value.is_floating_point() and not value.isfinite().all():
            bad = ~value.isfinite()
            kinds = f"{int(value.isnan().sum())} NaN, {int(value.isinf().sum())} infinite"
            first = [int(place) for place in bad.nonzero()[0]]
            self.lines.append(f"{name}: {kinds} of {value.numel():,} values, the first at {first}")


@contextmanager
def watched(drafter: nn.Module, seen: Seen) -> Iterator[None]:
    """Check every layer's output, and the gradient of that output."""

    def hook(name: str):
        def look(module: nn.Module, inputs: tuple, output: object) -> None:
            if not isinstance(output, torch.Tensor):
                return
            seen.look(f"output of {name}", output.detach())
            if output.requires_grad:
                output.register_hook(lambda gradient: seen.look(f"gradient of the output of {name}", gradient))

        return look

    parts = [(name, part) for name, part in drafter.named_modules() if name]
    handles = [part.register_forward_hook(hook(name)) for name, part in parts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def config_of(record: dict) -> TrainConfig:
    """Return the run's configuration from a skipped step's record. Raises ValueError if it is of another version."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(TrainConfig), record["config"]))
    except OmegaConfBaseException as error:
        raise ValueError(f"skipped.json was written by another version: {str(error).splitlines()[0]}") from error


def passes(folder: Path) -> Iterator[tuple[str, dict[str, torch.Tensor]]]:
    """Yield the name and the rows of every pass of every process."""
    for file in sorted(folder.glob("rows-*.safetensors")):
        tensors = load_file(file)
        for turn in sorted({int(name.split("/")[0]) for name in tensors}):
            start = f"{turn}/"
            yield (
                f"process {file.stem.split('-')[1]}, pass {turn + 1}",
                {name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)},
            )


def replay_pass(
    drafter: Drafter, target: Target, rows: dict[str, torch.Tensor], config: TrainConfig, seen: Seen
) -> tuple[float, float]:
    """Return loss and weight of one pass; its gradients are added to the drafter's."""
    from train.loop import block_loss
    from train.objective import position_weights

    rows = {name: value.to(target.device) for name, value in rows.items()}
    for name in ("context", "last", "context_scale", "last_scale"):
        if name in rows:
            seen.look(f"stored {name}", rows[name])
    anchors, valid = rows.pop("anchors"), rows.pop("valid")
    blocks = blocks_behind(rows, anchors, valid, config)
    with watched(drafter, seen):
        loss = block_loss(drafter, target, rows, blocks, config).loss
        seen.look("loss", loss.detach())
        loss.backward()
    weights = position_weights(config.objective, config.drafter.block_size - 1).to(target.device)
    return loss.item(), (blocks.supervised.sum((0, 1)) * weights).sum().item()


def replay(options: ReplayConfig) -> dict:
    """Compute the step again; return its loss, gradient norm and what was not finite. Raises ValueError where there
    is no such step, FileNotFoundError where the weights are gone."""
    from train.features import StoredRows
    from train.loop import load_frozen

    there = {int(file.parent.name[5:]): file.parent for file in Path(options.run).glob("skipped/step-*/skipped.json")}
    folder = there.get(max(there, default=0) if options.step is None else options.step)
    if folder is None:
        known = ", ".join(map(str, sorted(there))) or "none"
        which = "a" if options.step is None else f"step {options.step} as a"
        raise ValueError(f"run={options.run}: does not keep {which} skipped step; there is {known}")
    record = json.loads((folder / "skipped.json").read_text())
    config = config_of(record)
    config.target.shard = False  # one process computes what several did
    stored = StoredRows(config.features) if config.features else None
    target = load_frozen(config, resolve_device(options.device), stored)
    drafter = initial_drafter(config, target)
    weights = folder.parent / record["weights"]
    if not weights.is_file():
        raise FileNotFoundError(f"{weights} is gone: without the weights that met it the step cannot be computed")
    drafter.load_state_dict(load_file(weights))
    drafter.to(target.device)
    kind = compute_dtype(config, target.device)
    autocast = torch.autocast(target.device.type, kind, enabled=kind != torch.float32)
    drafter.forward = autocast(drafter.forward)  # of the drafter's pass alone, as the engine has it
    seen = Seen()
    for name, parameter in drafter.named_parameters():
        seen.look(f"weight {name}", parameter.detach())
    loss, total = 0.0, 0.0
    for _, rows in passes(folder):
        part, weight = replay_pass(drafter, target, rows, config, seen)
        loss, total = loss + part, total + weight
    total = max(total, 1e-6)
    gradients = {name: p.grad / total for name, p in drafter.named_parameters() if p.grad is not None}
    for name, gradient in gradients.items():
        seen.look(f"gradient of {name}", gradient)
    norm = torch.nn.utils.get_total_norm(list(gradients.values())).item()
    norms = {name: gradient.norm().item() for name, gradient in gradients.items()}
    return {"step": record["step"], "loss": loss / total, "grad_norm": norm, "norms": norms, "seen": seen.lines}


def print_replay(options: ReplayConfig) -> None:
    found = replay(options)
    wide = max(map(len, found["norms"]))
    print(f"{'gradient of':<{wide}}  norm")
    for name, norm in found["norms"].items():
        print(f"{name:<{wide}}  {norm:.4g}")
    print(f"\nstep {found['step']}: loss {found['loss']:.6g}, gradient norm {found['grad_norm']:.6g}")
    if found["seen"]:
        print(f"first not finite: {found['seen'][0]}")
        print("".join(f"then: {line}\n" for line in found["seen"][1:6]), end="")
    else:
        print("all values are finite here: the fault did not come from these rows and weights alone")
