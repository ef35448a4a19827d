"""Options of the commands that decode held-out text, which need the project's data."""

from dataclasses import dataclass, field
from typing import ClassVar

from data.rows import DataConfig
from infer.cli.models import OfDrafter
from infer.config import EvaluationConfig


@dataclass
class OfData(OfDrafter):
    """Options of a command that decodes held-out text.

    data: see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    FROM_RUN: ClassVar = ("target", "data")
    data: DataConfig = field(default_factory=DataConfig, kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig, kw_only=True)
