"""The whole configuration of a training run. No torch here: a wrong option is refused before it
loads.

A default is written once, here or in `infer.config` and `data.packing`; conf/ holds only choices
that differ.
"""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig, check_source
from infer.config import DrafterConfig, EvaluationConfig, TargetConfig
from infer.drafters.families import check_stage
from infer.drafters.heads.table import HEADS
from infer.utils.checks import above_zero, at_least, check_parts, one_of
from train.divergences import DIVERGENCES, WEIGHTS


@dataclass
class ObjectiveConfig:
    """The loss on a block's L drafted positions.

    divergence: kl, cross_entropy, tv, acceptance, lk or ce_l1: a row of DIVERGENCES in
        train/divergences.py
    weights: weights of a block's positions. gamma: gamma**(t - 1), DART section 3.3; exponential:
        exp(-(t - 1) / gamma), DFlash; dpace: by how likely the block's drafts survive, see
        train/divergences.py
    gamma: with weights gamma and exponential; 0.6 in DART's table 4; the DFlash recipe has 7 for
        block 16 and 4 for block 8
    unary: with a conditional head: so many times the divergence without its corrections is added
    chunk_rows: rows of vocabulary-sized tensors alive at a time (four of 150 MB for 151,936 tokens)
    """

    divergence: str = "kl"
    weights: str = "gamma"
    gamma: float = 0.6
    unary: float = 0.0
    chunk_rows: int = 256

    def check(self) -> None:
        """Raise ValueError for an objective that does not exist."""
        one_of(self, "objective.", divergence=DIVERGENCES, weights=WEIGHTS)
        if not self.gamma > 0 or (self.weights == "gamma" and self.gamma > 1):
            raise ValueError(
                f"objective.gamma={self.gamma}: above 0, and at most 1 where weights=gamma"
            )
        at_least(self, "objective.", chunk_rows=1, unary=0)


@dataclass
class OptimConfig:
    """Warm-up and half a cosine.

    name: the optimiser. adamw; muon: Muon for matrices, AdamW for the rest (not sharded: ZeRO stage
        0)
    lr: peak learning rate
    betas: AdamW's two decay rates
    warmup: share of all steps
    clip: largest norm of the gradient; longer ones are scaled down
    batch: packed rows per step, of all processes together
    micro: rows in one pass of a process, gradients are accumulated over passes; None: all of the
        process's share of batch
    epochs: length of the run in passes over the data, unless steps is given
    steps: length of the run in steps; None: by epochs
    minutes: length of the run in minutes of its steps, whatever steps and epochs say; what comes
        before the first step, evaluations and saves do not count
    clock: what minutes are of. wall: as a clock on the wall; processor: on a CPU the processor time
        of the main thread, which other programs do not shorten but which may take several times as
        long on the wall
    precision: dtype of products: float32, bfloat16, or auto: bfloat16 on CUDA and on a CPU with
        AMX, else float32; on a CPU the target's too while it teaches. Weights stay float32, and
        so do evaluations there
    """

    name: str = "adamw"
    lr: float = 6e-4
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.04
    clip: float = 1.0
    batch: int = 8
    micro: int | None = None
    epochs: float = 6.0
    steps: int | None = None
    minutes: float | None = None
    clock: str = "wall"
    precision: str = "auto"

    def check(self) -> None:
        """Raise ValueError for settings that cannot train."""
        one_of(self, "optim.", name=("adamw", "muon"), precision=("auto", "float32", "bfloat16"))
        one_of(self, "optim.", clock=("wall", "processor"))
        above_zero(self, "optim.", "lr", "epochs", "clip", "minutes")
        at_least(self, "optim.", batch=1, micro=1, steps=1)
        if not 0 <= self.warmup < 1:
            raise ValueError(f"optim.warmup={self.warmup}: a share of the run, from 0 to below 1")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optim.betas={list(self.betas)}: two numbers from 0 to below 1")


@dataclass
class DeepSpeedConfig:
    """How DeepSpeed spreads the drafter's training state.

    stage: ZeRO stage 0 to 3
    offload: optimiser state in host memory (stages 1 to 3)
    """

    stage: int = 0
    offload: bool = False

    def check(self) -> None:
        """Raise ValueError for combinations that DeepSpeed does not have."""
        one_of(self, "deepspeed.", stage=(0, 1, 2, 3))
        if self.offload and self.stage == 0:
            raise ValueError("deepspeed.offload=true needs deepspeed.stage 1, 2 or 3")


@dataclass
class FeaturesConfig:
    """What `./launch.sh features` stores, and where.

    out: the folder that is written
    store: dtype of features. bfloat16; int8: half of its size, each vector with a scale
    target: the target, see TargetConfig
    drafter: the drafter that will be trained, see DrafterConfig: it decides which layers are stored
    data: the training data, see DataConfig
    """

    out: str = "features"
    store: str = "bfloat16"
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError, one sentence, for what cannot be stored."""
        check_parts(self)
        one_of(self, store=("bfloat16", "int8"))
        check_source(self.data, self.target.path)


@dataclass
class TrainConfig:
    """A run. Its folder is runs_dir/name.

    name: name of the run; its folder is runs_dir/name
    runs_dir: folder of all runs
    seed: seed of initial weights, data order and anchors
    train: what is trained: all; or head, the conditional head alone, on the frozen drafter of
        drafter.init
    features: a folder that ./launch.sh features wrote: train from it, not from the target itself
    anchors: blocks per packed row, at most
    document_anchors: of these, blocks per document at most (512 in the published recipe); None: no
        limit
    ngrams: count the training texts' n-grams and lay them beside the drafter's weights, for trees
        that ask them
    checkpoints: how many, evenly spread over the run, the last at its end; each is evaluated
    save_minutes: minutes between saves of the training state, besides those at checkpoints; None:
        none besides
    compile: the drafter's training step under torch.compile; None: on CUDA, but not with ZeRO 3
    recompute: compute the drafter's layers again in the backward pass: less memory, a third more
        work; None: where a step would not fit the device otherwise
    self_check: compare the first batch with a slow plain computation before training
    stall_minutes: minutes without any progress, in steps and evaluations, after which the run ends
    wandb: log to Weights & Biases as well; the project is WANDB_PROJECT's, else blockdraft
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
    train: str = "all"
    features: str | None = None
    anchors: int = 64
    document_anchors: int | None = None
    ngrams: bool = False
    checkpoints: int = 2
    save_minutes: float | None = 10.0
    compile: bool | None = None
    recompute: bool | None = None
    self_check: bool = True
    stall_minutes: float = 30.0
    wandb: bool = False
    target: TargetConfig = field(default_factory=TargetConfig)
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    data: DataConfig = field(default_factory=DataConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    deepspeed: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)

    def check(self) -> None:
        """Raise ValueError, one sentence, for anything that could not work."""
        check_parts(self)
        at_least(self, anchors=1, document_anchors=1, checkpoints=1)
        one_of(self, train=("all", "head"))
        above_zero(self, "", "stall_minutes", "save_minutes")
        if self.optim.name == "muon" and self.deepspeed.stage > 0:
            raise ValueError(
                f"optim.name=muon needs whole matrices, deepspeed.stage={self.deepspeed.stage} cuts them"
            )
        check_stage(self.drafter.family, self.deepspeed.stage)
        if self.drafter.init is None or self.drafter.head.name != "none":
            check_head_training(self)  # what a drafter of init has is seen when its folder is read
        plain = self.name.isprintable() and len(self.name.encode()) <= 200
        if not self.name or "/" in self.name or self.name.startswith(".") or not plain:
            raise ValueError(f"name={self.name}: a plain folder name")
        check_source(self.data, self.target.path)
        if self.features and not (Path(self.features) / "manifest.json").is_file():
            raise ValueError(
                f"features={self.features}: no stored features there; ./launch.sh features makes them"
            )
        if self.features and self.target.shard:
            raise ValueError(
                "features= needs no target in memory, and target.shard=true spreads one: choose"
            )
        if self.anchors > self.data.length - 2:
            raise ValueError(
                f"anchors={self.anchors}: a row of data.length={self.data.length} tokens has room for "
                f"{self.data.length - 2} at most"
            )
        if self.drafter.block_size >= self.data.length:
            raise ValueError(
                f"drafter.block_size={self.drafter.block_size} does not fit in rows of data.length={self.data.length}"
            )


def check_head_training(config: TrainConfig) -> None:
    """Raise ValueError where a conditional head cannot be trained as asked, or there is none.
    `config.drafter` is complete: `resolve_init` has read the drafter's folder."""
    name = config.drafter.head.name
    stage = config.deepspeed.stage
    row = HEADS.get(name)
    if config.train == "head":
        if config.drafter.init is None:
            raise ValueError(
                "train=head trains a head on an existing drafter: give drafter.init=<folder or hub id>"
            )
        if row is None:
            raise ValueError(
                "train=head: the drafter has no conditional head, give head=markov or another one"
            )
        if stage > 0:
            raise ValueError(
                f"train=head leaves most weights alone, which deepspeed.stage={stage} cuts up: use 0"
            )
    if row is not None and stage > 2:
        raise ValueError(
            f"head={name} needs weights whole that deepspeed.stage={stage} cuts up: use 0, 1, 2"
        )
    if config.objective.unary and (row is None or not row.corrects):
        takers = " or ".join(row.name for row in HEADS.values() if row.corrects)
        raise ValueError(
            f"objective.unary={config.objective.unary} is for head={takers}, not for head={name}"
        )
