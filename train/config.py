"""The options of training. This module does not import torch, so that an invalid option raises an
error before torch is loaded.

The default of an option is defined only in its dataclass. The dataclasses are in this file, in
`infer.config` and in `data.rows`. The files in conf/ have only values that differ from the
defaults.
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
    """The training loss. It is a weighted sum of divergences between target and drafter over the
    drafted positions of all blocks. In a block, the drafted positions are counted t = 1, 2, ...

    divergence: the divergence that is computed at each position. kl, cross_entropy, tv (total
        variation), acceptance, lk or ce_l1; see DIVERGENCE_TABLE in train/divergences.py
    position_weights: how position t is weighted. 'gamma' is gamma**(t - 1) (DART, section 3.3);
        'exponential' is exp(-(t - 1) / gamma) (DFlash); 'dpace' uses estimated probabilities that
        the block's drafts are accepted (D-PACE), see `dpace_weights` in train/divergences.py
    gamma: the number gamma in the formulas of position_weights. With 'gamma', DART's table 4 uses
        0.6. With 'exponential', DFlash uses 7 for block size 16 and 4 for block size 8
    marginal_weight: weight of an additional loss term, for a drafter with a conditional head (the
        part that conditions a token on the one before it). The term is the divergence between the
        target and the drafter's logits without the head's correction
    chunk_rows: number of drafted positions whose logits are in memory at the same time. There are
        up to four tensors with one float32 number per position and token of the vocabulary. Each
        needs 150 MB for 256 positions and 151,936 tokens
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
                f"objective.gamma={self.gamma} is not allowed: it must be above 0, and with "
                "objective.position_weights=gamma at most 1"
            )
        require_at_least(self, "objective.", chunk_rows=1, marginal_weight=0)


@dataclass
class OptimConfig:
    """The optimiser, the batch size, the length of the run, and the learning rate. The learning
    rate first rises linearly (warm-up) and then falls along half a cosine to zero.

    name: 'adamw', or 'muon', which trains matrices with Muon and all other parameters with AdamW.
        muon needs deepspeed.stage=0
    lr: peak learning rate
    betas: AdamW's decay rates of the first and the second moment
    warmup_ratio: length of the warm-up as a fraction of the run
    max_grad_norm: gradients whose norm is larger are scaled down to this norm
    batch_size: packed sequences per step, in all processes together
    micro_batch_size: packed sequences per forward pass of a process. Gradients are accumulated over
        the forward passes of a step. null means one forward pass per step
    epochs: length of the run in epochs, if steps and max_minutes are null
    steps: length of the run in steps. null means that the option epochs decides
    max_minutes: length of the run in minutes. If it is set, the options steps and epochs are
        ignored. Only training steps count, not preparation, evaluations and saves
    clock: how max_minutes is measured. 'wall' is wall-clock time. 'processor' is the CPU time of
        the main thread, on which other programs have no influence. On a GPU, 'processor' means the
        same as 'wall'
    precision: dtype of matmuls, 'float32', 'bfloat16' or 'auto'. 'auto' means bfloat16 on a GPU and
        on CPUs with AMX, else float32. On a CPU, the target also uses this dtype in training steps.
        The drafter's weights are always float32. Evaluations on a CPU always use float32
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
                f"optim.warmup_ratio={self.warmup_ratio} is not allowed: it is a fraction of the "
                "run and must be from 0 to below 1"
            )
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(
                f"optim.betas={list(self.betas)} is not allowed: both numbers must be from 0 to "
                "below 1"
            )


@dataclass
class DeepSpeedConfig:
    """How DeepSpeed shards the drafter's training state over the processes.

    stage: ZeRO stage. 0 shards nothing, 1 the optimiser's state, 2 also the gradients, 3 also the
        parameters
    offload: keep the optimiser's state in host memory; needs stage 1, 2 or 3
    """

    stage: int = 0
    offload: bool = False

    def check(self) -> None:
        """Raise ValueError for combinations of options that DeepSpeed does not support."""
        require_one_of(self, "deepspeed.", stage=(0, 1, 2, 3))
        if self.offload and self.stage == 0:
            raise ValueError(
                "deepspeed.offload=true needs deepspeed.stage=1, 2 or 3, and deepspeed.stage=0 is "
                "given. Use one of these stages, or deepspeed.offload=false"
            )


@dataclass
class FeaturesConfig:
    """Options of `./launch.sh features`, which stores the target's hidden states for training.

    out: the folder that the command writes
    store_dtype: dtype of the stored hidden states. 'bfloat16', or 'int8' with one scale per vector,
        which needs half as much disk space as 'bfloat16'
    target: the target model, see TargetConfig
    drafter: the drafter that will be trained, see DrafterConfig. Only the hidden states of the
        target layers that this drafter reads are stored
    data: the training data, see DataConfig
    """

    out: str = "features"
    store_dtype: str = "bfloat16"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for invalid options of `./launch.sh features`."""
        check_nested_options(self)
        require_one_of(self, store_dtype=("bfloat16", "int8"))
        refuse_embedded_answers(self.data, self.target.path)


@dataclass
class TrainConfig:
    """All options of a training run.

    name: name of the run. The run's folder is runs_dir/name
    runs_dir: folder of all runs
    seed: seed of the initial weights, the order of the data, and the anchors
    trainable: 'all' trains every parameter of the drafter. 'head' trains only the conditional head
        (the part that conditions a token on the one before it) of the existing drafter that
        drafter.init names, and freezes the rest of this drafter
    features: a folder written by `./launch.sh features`. Training then reads stored hidden states
        and does not keep the target's layers in memory. null means that the target computes the
        hidden states in every step
    anchors_per_sequence: maximum number of anchors per packed sequence. An anchor is a position
        where a training block starts
    anchors_per_document: maximum number of anchors per document. DFlash's recipe uses 512. null
        means no limit
    count_ngrams: whether to count the n-grams of the training data and to save them beside the
        drafter's weights, for draft trees that use n-grams
    checkpoints: number of checkpoints, evenly spaced over the run. The last one is saved at the end
        of the run. Each checkpoint is evaluated
    save_interval_minutes: minutes between saves of the training state, in addition to the
        checkpoints. null means that only checkpoints are saved
    compile: whether the drafter's training step runs under torch.compile. null means true on a GPU
        with deepspeed.stage below 3, else false
    gradient_checkpointing: whether the backward pass recomputes the drafter's layers, which needs
        less memory, but a third more computation than without recomputation. null means true only
        if a step would not fit in the device's memory otherwise
    self_check: before training, compute the loss of a few blocks of the first batch also in a
        slow, independent way, and compare both results
    stall_timeout_minutes: end the run if no step or evaluation has made progress for this number
        of minutes
    wandb: also log to Weights & Biases. The environment variable WANDB_PROJECT names the project;
        its default is blockdraft
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
        """Raise ValueError, with a message for the user, for invalid or contradictory options."""
        check_nested_options(self)
        require_at_least(self, anchors_per_sequence=1, anchors_per_document=1, checkpoints=1)
        require_one_of(self, trainable=("all", "head"))
        require_positive(self, "", "stall_timeout_minutes", "save_interval_minutes")
        if self.optim.name == "muon" and self.deepspeed.stage > 0:
            raise ValueError(
                f"optim.name=muon does not support deepspeed.stage={self.deepspeed.stage}, which "
                "shards the optimiser's state: use deepspeed.stage=0 or optim.name=adamw"
            )
        check_zero_stage(self.drafter.family, self.deepspeed.stage)
        if self.drafter.init is None or self.drafter.head.name != "none":
            # With drafter.init, the head's options come from the existing drafter's config.
            # `resolve_config` reads this config later and then calls `check` again.
            check_conditional_head_options(self)
        check_run_name(self.name)
        refuse_embedded_answers(self.data, self.target.path)
        if self.features and not (Path(self.features) / "manifest.json").is_file():
            raise ValueError(
                f"features={self.features}: this folder has no stored features. ./launch.sh "
                f"features out={self.features} writes them"
            )
        if self.features and self.target.shard:
            raise ValueError(
                f"features={self.features} cannot be combined with target.shard=true, because "
                "training from stored features keeps no target layers in memory: use "
                "target.shard=false"
            )
        if self.anchors_per_sequence > self.data.length - 2:
            raise ValueError(
                f"anchors_per_sequence={self.anchors_per_sequence} is too large: a packed "
                f"sequence of data.length={self.data.length} tokens has room for at most "
                f"{self.data.length - 2} anchors"
            )
        if self.drafter.block_size >= self.data.length:
            raise ValueError(
                f"drafter.block_size={self.drafter.block_size} is too large: it must be below "
                f"data.length={self.data.length}"
            )


def check_run_name(name: str) -> None:
    """Raise ValueError if a run's name cannot be used as the name of a folder."""
    is_short = len(name.encode()) <= MAX_RUN_NAME_BYTES
    if not name or "/" in name or name.startswith(".") or not name.isprintable() or not is_short:
        raise ValueError(
            f"name={name} is not allowed: the name of a run must be a folder name of 1 to "
            f"{MAX_RUN_NAME_BYTES} printable bytes, without a slash and without a leading dot"
        )


def check_conditional_head_options(config: TrainConfig) -> None:
    """Raise ValueError if the drafter's conditional head cannot be trained with the given options.

    If drafter.init names an existing drafter, `config.drafter` must be the result of
    `resolve_drafter_options`, which copies the head's options from the existing drafter's config.
    """
    name = config.drafter.head.name
    stage = config.deepspeed.stage
    head = CONDITIONAL_HEADS.get(name)
    if config.trainable == "head":
        if config.drafter.init is None:
            raise ValueError(
                "trainable=head trains the conditional head of an existing drafter: give the "
                "drafter with drafter.init=<folder or hub id>"
            )
        if head is None:
            raise ValueError(
                "trainable=head: the drafter has no conditional head. Give it one, for example "
                "with head=markov"
            )
        if stage > 0:
            raise ValueError(
                f"trainable=head does not support deepspeed.stage={stage}, because DeepSpeed "
                "cannot shard the state of frozen weights: use deepspeed.stage=0"
            )
    if head is not None and stage > 2:
        raise ValueError(
            f"head={name} does not support deepspeed.stage={stage}, which shards the parameters: "
            "use deepspeed.stage=0, 1 or 2"
        )
    if config.objective.marginal_weight and (head is None or not head.adds_to_logits):
        supported = " or ".join(
            row.name for row in CONDITIONAL_HEADS.values() if row.adds_to_logits
        )
        raise ValueError(
            f"objective.marginal_weight={config.objective.marginal_weight} needs "
            f"head={supported}, and head={name} is given. Use objective.marginal_weight=0 or "
            "another head"
        )
