"""The first three lines of a run: target, data, and how many steps."""

from typing import TYPE_CHECKING

from data.rows import DataConfig
from infer.targets.target import Target
from train.config import TrainConfig
from train.features import StoredRows
from train.run.sources import column_parts

if TYPE_CHECKING:
    from datasets import Dataset


def overview(config: TrainConfig, target: Target, rows: "StoredRows | Dataset", steps: int) -> list[str]:
    """Return three lines: which target, told what; which data, and how much there is to learn; how many steps."""
    told = config.target.chat_template_kwargs
    layers, size = target.config.num_hidden_layers, target.config.hidden_size
    count = len(rows)
    full = sum(int((part >= 0).sum()) for part in column_parts(rows, "documents")) / (count * config.data.length)
    learnt = sum(int(part.sum()) for part in column_parts(rows, "loss"))
    share = f", at most {config.document_anchors} a document" if config.document_anchors else ""
    return [
        f"target     {config.target.path}, {layers} layers of {size}, {target.dtype}".replace("torch.", "")
        + (f"; chat template told {told}" if told else ""),
        f"data       {described(config.data)}: {count:,} rows of {config.data.length:,} tokens, {100 * full:.1f} % "
        f"full; {learnt:,} tokens to learn from",
        f"run        {steps:,} steps of {config.optim.batch} rows, {config.anchors} blocks a row{share}",
    ]


def described(data: DataConfig) -> str:
    """Name the data, and say whose answers they are where that is known."""
    if data.source == "embedded":
        return "what the embedded target wrote"
    if data.source == "hub":
        return (
            f"{data.path} ({data.split}), answers as published, not this target's: ./launch.sh regenerate makes those"
        )
    if data.source == "mixture":
        return " + ".join(f"{part.path} x {part.weight:g}" for part in data.parts)
    return data.path or "Python's standard library"
