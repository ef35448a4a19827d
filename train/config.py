"""The options of training. This module does not import torch, so that an invalid option raises an
error before torch is loaded.

A default is defined once, here or in `infer.config` and `data.rows`; conf/ has only values that
differ.
"""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig, refuse_embedded_answers
from infer.config import DrafterConfig, EvaluationConfig, TargetConfig
from infer.drafters.families import check_zero_stage
from infer.drafters.heads.table import CONDITIONAL_HEADS
from infer.utils.checks import (
    check_nested_options,
    require_at_least,
    require_one_of,
    require_positive,
)
from train.divergences import DIVERGENCE_TABLE, POSITION_WEIGHTINGS_BY_NAME

MAX_RUN_NAME_BYTES = 200


@dataclass
class ObjectiveConfig:
    """The loss on the L drafted positions of a block.

    divergence: kl, cross_entropy, tv, acceptance, lk or ce_l1, see DIVERGENCE_TABLE in
        train/divergences.py
    position_weights: weight of position t of a block. gamma: gamma**(t - 1), DART section 3.3;
        exponential: exp(-(t - 1) / gamma), DFlash; dpace: by the probability that the block's
        drafts are accepted up to there, see train/divergences.py
    gamma: for position_weights=gamma (0.6 in DART's table 4) and exponential (DFlash: 7 for block
        size 16, 4 for 8)
    marginal_weight: with a conditional head: weight of an added loss term, the divergence of the
        marginals without the head's correction
    chunk_rows: number of rows whose vocabulary-sized tensors are in memory at the same time (each
        150 MB for 256 rows and 151,936 tokens, four of them)
    """

    divergence: str = "kl"
    position_weights: str = "gamma"
    gamma: float = 0.6
    marginal_weight: float = 0.0
    chunk_rows: int = 256

    def check(self) -> None:
        """Raise ValueError for invalid options of the objective."""
        require_one_of(
            self,
            "objective.",
            divergence=DIVERGENCE_TABLE,
            position_weights=POSITION_WEIGHTINGS_BY_NAME,
        )
        if not self.gamma > 0 or (self.position_weights == "gamma" and self.gamma > 1):
            raise ValueError(
                f"objective.gamma={self.gamma}: it must be above 0, and at most 1 with "
                "objective.position_weights=gamma"
            )
        require_at_least(self, "objective.", chunk_rows=1, marginal_weight=0)


@dataclass
class OptimConfig:
    """Optimiser and learning rate schedule: linear warm-up, then half a cosine.

    name: adamw; or muon: Muon for matrices, AdamW for all other parameters (ZeRO stage 0 only)
    lr: peak learning rate
    betas: the two decay rates of AdamW
    warmup_ratio: warm-up, as a fraction of all steps
    max_grad_norm: gradients with a larger norm are scaled down to it
    batch_size: packed sequences per step, over all processes
    micro_batch_size: packed sequences per forward pass of a process; gradients are accumulated over
        passes; null: all of the process's share in one pass
    epochs: length of the run in epochs, unless steps is given
    steps: length of the run in steps; null: by epochs
    max_minutes: length of the run in minutes of training steps, instead of steps and epochs; the
        time before the first step, evaluations and saves are not counted
    clock: how minutes are measured. wall: wall-clock time; processor: CPU time of the main thread,
        on which other programs have no influence
    precision: dtype of matmuls: float32, bfloat16, or auto: bfloat16 on CUDA and on CPUs with AMX,
        float32 elsewhere. On a CPU the target uses it during training too. Weights and evaluations
        stay in float32
    """

    name: str = "adamw"
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_ratio: float = 0.04
    max_grad_norm: float = 1.0
    batch_size: int = 8
    micro_batch_size: int | None = None
    epochs: float = 6.0
    steps: int | None = None
    max_minutes: float | None = None
    clock: str = "wall"
    precision: str = "auto"

    def check(self) -> None:
        """Raise ValueError for invalid options of the optimiser."""
        require_one_of(
            self, "optim.", name=("adamw", "muon"), precision=("auto", "float32", "bfloat16")
        )
        require_one_of(self, "optim.", clock=("wall", "processor"))
        require_positive(self, "optim.", "lr", "epochs", "max_grad_norm", "max_minutes")
        require_at_least(self, "optim.", batch_size=1, micro_batch_size=1, steps=1)
        if not 0 <= self.warmup_ratio < 1:
            raise ValueError(
                f"optim.warmup_ratio={self.warmup_ratio}: it must be a fraction of the run, from "
                "0 to below 1"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)}: both must be from 0 to below 1")


@dataclass
class DeepSpeedConfig:
    """How DeepSpeed shards the drafter's training state.

    stage: ZeRO stage, 0 to 3
    offload: keep optimiser state in host memory (stages 1 to 3)
    """

    stage: int = 0
    offload: bool = False

    def check(self) -> None:
        """Raise ValueError for combinations that DeepSpeed does not support."""
        require_one_of(self, "deepspeed.", stage=(0, 1, 2, 3))
        if self.offload and self.stage == 0:
            raise ValueError("deepspeed.offload=true needs deepspeed.stage 1, 2 or 3")


@dataclass
class FeaturesConfig:
    """Options of `./launch.sh features`, which stores the target's hidden states for training.

    out: the folder that is written
    store_dtype: dtype of stored hidden states: bfloat16; or int8 with one scale per vector, half
        the size
    target: the target, see TargetConfig
    drafter: the drafter that will be trained, see DrafterConfig; it decides which layers are stored
    data: the training data, see DataConfig
    """

    out: str = "features"
    store_dtype: str = "bfloat16"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for invalid options of stored features."""
        check_nested_options(self)
        require_one_of(self, store_dtype=("bfloat16", "int8"))
        refuse_embedded_answers(self.data, self.target.path)


@dataclass
class TrainConfig:
    """A training run.

    name: name of the run; its folder is runs_dir/name
    runs_dir: folder of all runs
    seed: seed of initial weights, data order and anchors
    trainable: all parameters of the drafter; or head: only the conditional head, with the rest of
        the drafter of drafter.init frozen
    features: folder written by ./launch.sh features: train from stored hidden states, without the
        target in memory
    anchors_per_sequence: maximum number of training blocks per packed sequence
    anchors_per_document: maximum number of blocks per document (512 in the published recipe); null:
        no limit
    count_ngrams: count the n-grams of the training data and save them beside the drafter's weights,
        for draft trees that use them
    checkpoints: number of checkpoints, evenly spaced, the last one at the end of the run; each is
        evaluated
    save_interval_minutes: minutes between saves of the training state, in addition to checkpoints;
        null: at checkpoints only
    compile: run the drafter's training step under torch.compile; null: on CUDA, unless ZeRO stage
        is 3
    gradient_checkpointing: recompute the drafter's layers in the backward pass: less memory, a
        third more computation; null: only if a step would not fit in the device's memory
    self_check: before training, compare the loss of the first batch with a slow independent
        computation
    stall_timeout_minutes: end the run if no step and no evaluation makes progress for this many
        minutes
    wandb: also log to Weights & Biases, to the project in WANDB_PROJECT, default blockdraft
    target: see TargetConfig in infer/config.py
    drafter: see DrafterConfig in infer/config.py
    data: see DataConfig in data/rows.py
    objective: see ObjectiveConfig
    optim: see OptimConfig
    evaluation: see EvaluationConfig in infer/config.py
    deepspeed: see DeepSpeedConfig
    """

    name: str = "embedded-dflash"
    runs_dir: str = "runs"
    seed: int = 0
    trainable: str = "all"
    features: str | None = None
    anchors_per_sequence: int = 64
    anchors_per_document: int | None = None
    count_ngrams: bool = False
    checkpoints: int = 2
    save_interval_minutes: float | None = 10.0
    compile: bool | None = None
    gradient_checkpointing: bool | None = None
    self_check: bool = True
    stall_timeout_minutes: float = 30.0
    wandb: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)

    def check(self) -> None:
        """Raise ValueError, with one sentence, for invalid or contradictory options."""
        check_nested_options(self)
        require_at_least(self, anchors_per_sequence=1, anchors_per_document=1, checkpoints=1)
        require_one_of(self, trainable=("all", "head"))
        require_positive(self, "", "stall_timeout_minutes", "save_interval_minutes")
        if self.optim.name == "muon" and self.deepspeed.stage > 0:
            raise ValueError(
                f"optim.name=muon does not support deepspeed.stage={self.deepspeed.stage} "
                "(sharded optimiser): use deepspeed.stage=0 or optim.name=adamw"
            )
        check_zero_stage(self.drafter.family, self.deepspeed.stage)
        if self.drafter.init is None or self.drafter.head.name != "none":
            check_head_training(self)  # with init, it is called when the drafter's config is read
        check_run_name(self.name)
        refuse_embedded_answers(self.data, self.target.path)
        if self.features and not (Path(self.features) / "manifest.json").is_file():
            raise ValueError(
                f"features={self.features}: no stored features there; ./launch.sh features writes "
                "them"
            )
        if self.features and self.target.shard:
            raise ValueError(
                "features= needs no target in memory, so target.shard=true cannot be combined "
                "with it: give one of them"
            )
        if self.anchors_per_sequence > self.data.length - 2:
            raise ValueError(
                f"anchors_per_sequence={self.anchors_per_sequence}: a row of "
                f"data.length={self.data.length} tokens has room for {self.data.length - 2} at "
                "most"
            )
        if self.drafter.block_size >= self.data.length:
            raise ValueError(
                f"drafter.block_size={self.drafter.block_size} must be below "
                f"data.length={self.data.length}"
            )


def check_run_name(name: str) -> None:
    """Raise ValueError if a run's name cannot be the name of its folder."""
    is_short = len(name.encode()) <= MAX_RUN_NAME_BYTES
    if not name or "/" in name or name.startswith(".") or not name.isprintable() or not is_short:
        raise ValueError(
            f"name={name}: a plain folder name is needed, of 1 to {MAX_RUN_NAME_BYTES} printable "
            "bytes, without a slash or a leading dot"
        )


def check_head_training(config: TrainConfig) -> None:
    """Raise ValueError if the conditional head cannot be trained as configured.

    With drafter.init, `config.drafter` must be the result of `resolve_drafter_options`.
    """
    name = config.drafter.head.name
    stage = config.deepspeed.stage
    head = CONDITIONAL_HEADS.get(name)
    if config.trainable == "head":
        if config.drafter.init is None:
            raise ValueError(
                "trainable=head trains a head on an existing drafter: give drafter.init=<folder "
                "or hub id>"
            )
        if head is None:
            raise ValueError(
                "trainable=head: the drafter has no conditional head, give head=markov or another "
                "one"
            )
        if stage > 0:
            raise ValueError(
                f"trainable=head does not support deepspeed.stage={stage} (sharded states of "
                "frozen weights): use 0"
            )
    if head is not None and stage > 2:
        raise ValueError(
            f"head={name} does not support deepspeed.stage={stage} (sharded parameters): use 0, 1 "
            "or 2"
        )
    if config.objective.marginal_weight and (head is None or not head.adds_to_logits):
        supported = " or ".join(
            row.name for row in CONDITIONAL_HEADS.values() if row.adds_to_logits
        )
        raise ValueError(
            f"objective.marginal_weight={config.objective.marginal_weight} needs "
            f"head={supported}, and head={name} is given"
        )
