"""The training loop: frozen target in, trained drafter out.

One step: packed rows -> the target's features and final states (no gradient) -> anchors and their blocks -> the
drafter on all blocks at once under the prefix-shared mask -> annealed divergence to the target at every drafted
position.

B rows, T packed length, N anchors, K block size, L = K - 1, D hidden size.
"""

import json
import math
import os
import resource
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data.packing import batch, packed_rows
from infer.drafter import Drafter
from infer.families import warm_layers
from infer.target import Features, Target, load_target, resolve_device, resolve_dtype
from train.blocks import Blocks, block_mask, draw_anchors, lay_out
from train.config import OptimConfig, TrainConfig
from train.engine import build_engine, compute_dtype, micro_batch, restore, start_processes, take_step
from train.features import StoredRows, identity, stored_features
from train.hooks import evaluate_checkpoint, finish_report
from train.initial import initial_drafter, settled
from train.objective import RowLoss, divergence, position_weights
from train.plan import matmul_rate, shape_of, step_operations, total_steps
from train.progress import Progress
from train.state import checkpoint_folder, load, newest, save, seeded, step_of, trim_log
from train.tracking import Tracker

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class StepMetrics:
    """One step over all processes. Tensors on the device: reading them synchronises."""

    loss: torch.Tensor  # () weighted mean divergence, nats
    agreement: torch.Tensor  # (L,) share of supervised positions where drafter and target choose the same token
    prefix: torch.Tensor  # () teacher-forced joint prefix length, the bonus token included
    grad_norm: torch.Tensor  # ()

    def numbers(self) -> dict:
        return {
            "loss": self.loss.item(),
            "prefix": self.prefix.item(),
            "agreement": self.agreement.tolist(),
            "grad_norm": float(self.grad_norm),
        }


def block_loss(
    drafter, target: Target, rows: dict[str, torch.Tensor], blocks: Blocks, config: TrainConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Summed weighted divergence of a batch's blocks, and where the drafter agrees with the target: (B, N, L) bool.

    drafter: the drafter, or the engine around it; rows: columns (B, T), and stored features if there are.
    """
    if "context" in rows:
        features = stored_features(rows, target.dtype)
    else:
        layers = getattr(drafter, "module", drafter).layer_ids
        features = target.packed_features(rows["ids"], rows["positions"], rows["documents"], layers)
    head = getattr(drafter, "module", drafter).head_weight(target)
    result = score(draft_states(drafter, target, rows, blocks, features), head, target, blocks, features, config)
    return result.loss, result.agree.view(blocks.supervised.shape)


def draft_states(
    drafter, target: Target, rows: dict[str, torch.Tensor], blocks: Blocks, features: Features
) -> torch.Tensor:
    """The drafter's states at all drafted positions of a batch, (B*N*L, D) in the target's dtype."""
    module: Drafter = getattr(drafter, "module", drafter)
    kind = module.norm.weight.dtype
    inputs = module.inputs(target, rows["ids"], rows["positions"], blocks.anchors)
    starts = (blocks.anchors - module.lead).clamp(min=0)
    masks = [block_mask(starts, rows["documents"], module.width, kind, *view) for view in module.views]
    hidden = drafter(features.context.to(kind), rows["positions"], *inputs, *masks)  # (B, N*W, D)
    drafted = hidden.unflatten(1, (-1, module.width))[:, :, module.first :]  # (B, N, L, D)
    return drafted.flatten(0, 2).to(target.dtype)


def score(
    drafted: torch.Tensor,
    head: torch.Tensor,
    target: Target,
    blocks: Blocks,
    features: Features,
    config: TrainConfig,
) -> RowLoss:
    """The objective on drafted states (B*N*L, D), block by block; `head` (V, D) is the drafter's."""
    weights = position_weights(config.objective, blocks.supervised.shape[-1]).to(drafted.device) * blocks.supervised
    return divergence(
        drafted,
        features.last.flatten(0, 1),
        blocks.teacher_rows.flatten(0, 1),
        blocks.labels.flatten(0, 1),
        weights.flatten(0, 1),
        target.head_weight,
        config.objective,
        head,
        target.scale,
    )


def draw_blocks(rows: dict[str, torch.Tensor], config: TrainConfig, first: int) -> Blocks:
    """Anchors for a batch that starts with the run's `first`-th draw, and the blocks behind them. Anchors belong to a
    draw, not to a batch: the same ones come out however the rows are spread over processes and micro-steps."""
    count = len(rows["ids"])
    jitter = [torch.rand(config.anchors, generator=seeded(config.seed, first + i)) for i in range(count)]
    anchors, valid = draw_anchors(rows["loss"], rows["documents"], torch.stack(jitter).to(rows["ids"].device))
    return lay_out(rows["ids"], rows["documents"], rows["loss"], anchors, valid, config.drafter.block_size)


class Prefetch:
    """The rows of every step, each read by another thread while the step before is computed."""

    def __init__(self, dataset, config: TrainConfig, pinned: bool) -> None:
        self.dataset, self.config, self.pinned = dataset, config, pinned
        self.thread = ThreadPoolExecutor(1)
        self.ahead: tuple[int, Future] | None = None

    def _read(self, step: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """(draw, rows on the host) of a step's passes: a pure function of the step, so that resuming needs no more."""
        rank, world = dist.get_rank(), dist.get_world_size()
        count, passes = micro_batch(self.config, world)
        read = []
        for i in range(passes):
            draw = step * self.config.optim.batch + (i * world + rank) * count
            rows = batch(self.dataset, draw, count, self.config.seed)
            read.append((draw, {k: v.pin_memory() for k, v in rows.items()} if self.pinned else rows))
        return read

    def __call__(self, step: int) -> list[tuple[int, dict[str, torch.Tensor]]]:
        """The rows of this step; those of the next one are begun."""
        future = self.ahead[1] if self.ahead and self.ahead[0] == step else self.thread.submit(self._read, step)
        rows = future.result()
        self.ahead = (step + 1, self.thread.submit(self._read, step + 1))
        return rows


def train_step(
    engine, target: Target, drawn: list[tuple[int, dict[str, torch.Tensor]]], config: TrainConfig
) -> StepMetrics:
    """One optimiser step over the rows that `Prefetch` has drawn. The loss is divided by the weights of all blocks of
    all passes and processes, so that it depends neither on their number nor on how the blocks fell among them."""
    world, passes = dist.get_world_size(), len(drawn)
    device, length = target.device, config.drafter.block_size - 1
    micro = []
    for draw, rows in drawn:
        rows = {name: column.to(device, non_blocking=True) for name, column in rows.items()}
        micro.append((rows, draw_blocks(rows, config, draw)))
    weights = position_weights(config.objective, length).to(device)
    supervised = sum(blocks.supervised.sum((0, 1)) for _, blocks in micro).float()  # (L,)
    dist.all_reduce(supervised)
    total = (supervised * weights).sum().clamp(min=1e-6)

    loss_sum, agree_sum = torch.zeros((), device=device), torch.zeros(length, device=device)
    prefix_sum = torch.zeros(2, device=device)
    for rows, blocks in micro:
        loss, agree = block_loss(engine, target, rows, blocks, config)
        engine.backward(loss * (world * passes / total))  # DeepSpeed averages over both
        norm = take_step(engine)
        agree = agree & blocks.supervised  # (B, N, L)
        loss_sum += loss.detach()
        agree_sum += agree.sum((0, 1))
        prefix_sum += torch.stack([agree.long().cumprod(-1).sum() + blocks.valid.sum(), blocks.valid.sum()])
    sums = torch.cat([loss_sum[None], agree_sum, prefix_sum])
    dist.all_reduce(sums)
    return StepMetrics(
        loss=sums[0] / total,
        agreement=sums[1 : 1 + length] / supervised.clamp(min=1),
        prefix=sums[-2] / sums[-1].clamp(min=1),
        grad_norm=norm,
    )


def learning_rate(optim: OptimConfig, step: int, total: int) -> float:
    """Linear warm-up, then half a cosine to zero."""
    warmup = max(1, round(optim.warmup * total))
    if step < warmup:
        return optim.lr * (step + 1) / warmup
    return optim.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


# what may be another when a run goes on: nothing here changes what is learnt, beyond rounding
FREE = ("resume", "runs_dir", "keep_states", "log_every", "tracking", "evaluation", "deepspeed", "optim.micro")
FREE += ("compile", "recompute", "target.shard", "target.device")


def differences(known: object, wanted: object, prefix: str = "") -> list[str]:
    """The dotted keys under which two configurations are not the same."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        keys = dict.fromkeys((*wanted, *known))
        return [d for key in keys for d in differences(known.get(key), wanted.get(key), f"{prefix}{key}.")]
    return [] if known == wanted else [prefix.removesuffix(".")]


def open_run(config: TrainConfig) -> Path:
    """The run's folder with its resolved config; an existing run is gone on with or refused, never overwritten.

    Raises ValueError when the folder holds a run of another configuration, or any run and resume=never.
    """
    run = Path(config.runs_dir) / config.name
    wanted = json.loads(json.dumps(asdict(config)))
    file = run / "config.json"
    existed = file.exists()
    dist.barrier()  # all have looked before the first process writes
    if existed:
        if config.resume == "never":
            raise ValueError(f"{run} holds a run already: go on with it by resume=auto, or choose another name=")
        changed = [key for key in differences(json.loads(file.read_text()), wanted) if not key.startswith(FREE)]
        if changed:
            raise ValueError(
                f"{run} holds a run with another configuration ({', '.join(changed)} differ): choose another name="
            )
    elif dist.get_rank() == 0:
        run.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(wanted, indent=1) + "\n")
    return run


def load_frozen(config: TrainConfig, device: torch.device, stored: StoredRows | None = None) -> Target:
    """The target, on the device; on the host for now if it is to be sharded; only its ends, and the layers that the
    drafter starts as, if its features are stored."""
    options, layers = config.target, None
    if stored is not None:
        known = stored.manifest
        layers = warm_layers(config.drafter, known["layers"], known["target"]["layers"])
    dtype = str(resolve_dtype(options.dtype, device)).removeprefix("torch.")
    place = "cpu" if options.shard else str(device)
    return load_target(options.path, dtype, place, options.trust_remote_code, layers)


def prepared_rows(config: TrainConfig, target: Target) -> "Dataset":
    """The packed rows: one process of each machine makes them, the others find them in the cache."""
    first = int(os.environ.get("LOCAL_RANK", 0)) == 0
    rows = packed_rows(config.data, target.tokenizer) if first else None
    dist.barrier()
    return rows if first else packed_rows(config.data, target.tokenizer)


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's most on CUDA, the process's most elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def train(config: TrainConfig) -> Path:
    """Trains a drafter from a checked configuration; returns the run's folder.

    Raises ValueError or FileNotFoundError with a sentence for what the user can mend.
    """
    device = resolve_device(config.target.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    start_processes(device)
    micro_batch(config, dist.get_world_size())  # refuses, before anything is loaded, what the processes cannot share
    config = replace(config, drafter=settled(config.drafter, config.target))
    stored = StoredRows(config.features) if config.features else None
    target = load_frozen(config, device, stored)
    drafter = initial_drafter(config, target)
    if stored is not None:
        stored.check(identity(config, target, drafter.layer_ids))
    run = open_run(config)
    if config.target.shard:
        target.shard(device)
    if stored is not None:
        target.body.layers.to("meta")
    folder, skipped = newest(run)
    state = load(folder) if folder is not None else {}
    if state:
        drafter.load_state_dict({name: tensor for name, tensor in state.items() if "/" not in name})
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    engine = build_engine(drafter, config, device)
    if state:
        restore(engine, state)
    done = step_of(folder) if state else 0
    del state
    dataset = stored if stored is not None else prepared_rows(config, target)
    first = dist.get_rank() == 0
    total = total_steps(config, len(dataset))
    stops = {round(total * (i + 1) / config.checkpoints) for i in range(config.checkpoints)} - {0} | {total}

    progress = Progress(total, enabled=first)
    for line in skipped:
        progress.say(line)
    progress.say(
        f"{config.name}: {parameters:,} trainable parameters, "
        f"{len(dataset):,} packed rows of {config.data.length} tokens, {total} steps"
        + (f"; going on after step {done}" if done else "")
    )
    dist.barrier()  # all have looked what there is
    if first:
        trim_log(run / "metrics.jsonl", done)
    tracker = Tracker(config, run, enabled=first)

    def evaluate(step: int) -> None:
        whole = target if stored is None else load_frozen(config, device)  # in memory while it is needed
        evaluate_checkpoint(run, checkpoint_folder(run, step), whole, config, progress, tracker)

    if done and not (folder / "evaluation" / "evaluation.json").exists():
        evaluate(done)  # the run was stopped between saving and evaluating
    stopping = catch_signals()

    prefetch = Prefetch(dataset, config, pinned=device.type == "cuda")
    rate_of_device = matmul_rate(device, compute_dtype(config, device))
    operations = step_operations(shape_of(config, target.config))
    if stored is not None:
        operations.pop("target")
    share = sum(operations.values()) / dist.get_world_size()  # of a step's work
    pending: list[tuple[int, StepMetrics, float]] = []
    began = time.perf_counter()
    for step in range(done, total):
        rate = learning_rate(config.optim, step, total)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        pending.append((step + 1, train_step(engine, target, prefetch(step), config), rate))
        stop = False
        if (step + 1) % config.log_every == 0 or step + 1 in stops:
            flag = torch.tensor(float(stopping.is_set), device=device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)  # all processes stop after the same step
            stop = bool(flag.item())
            seconds = (time.perf_counter() - began) / len(pending)
            cost = {
                "tokens_per_second": config.optim.batch * config.data.length / seconds,
                "mfu": share / seconds / rate_of_device,  # of this machine's large matrix products
                "peak_gb": peak_memory(device) / 1e9,
            }
            for number, metrics, rate in pending:
                line = {"step": number, "lr": rate, **cost, **metrics.numbers()}
                if first:
                    with (run / "metrics.jsonl").open("a") as log:
                        log.write(json.dumps(line) + "\n")
                    tracker.log(line, number)
                    progress.step(line)
            pending.clear()
            began = time.perf_counter()
        if step + 1 in stops or stop:
            saved = save(run, step + 1, engine, target.dtype, config.keep_states)
            if step + 1 in stops:
                evaluate(step + 1)
            dist.barrier()
            began = time.perf_counter()
        if stop:
            progress.say(
                f"stopped by a signal after step {step + 1}; saved {saved}; the same command goes on from there"
            )
            break
    progress.close()
    if first:
        finish_report(run, tracker)
    tracker.close()
    dist.barrier()
    return run


@dataclass
class StopFlag:
    is_set: bool = False


def catch_signals() -> StopFlag:
    """SIGTERM and SIGUSR1 (a scheduler's preemption) let the step end, save and stop; exit code 0."""
    flag = StopFlag()

    def handler(number: int, frame: object) -> None:
        flag.is_set = True

    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, handler)
    return flag
