"""The training loop: frozen target in, trained drafter out.

One step: packed rows -> the target's features and final states (no gradient) -> anchors and their blocks -> the
drafter on all blocks at once under the prefix-shared mask -> annealed divergence to the target at every drafted
position.

B rows, T packed length, N anchors, K block size, L = K - 1, D hidden size.
"""

import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from infer.drafters.base import Drafter
from infer.drafters.families import FAMILIES
from infer.targets.target import Features, Target, load_target, resolve_device, resolve_dtype
from train.batches import Drawn, Prefetch, draw_blocks, prepared_rows
from train.blocks import Blocks, block_mask
from train.config import OptimConfig, TrainConfig
from train.engine import build_engine, compute_dtype, micro_batch, restore, take_step
from train.features import StoredRows, identity, stored_features
from train.objective import RowLoss, divergence, position_weights
from train.plan import matmul_rate, shape_of, step_operations, total_steps
from train.run.checkpoints import checkpoint_folder, load, newest, save, save_rolling, step_of, tidy, trim_log
from train.run.folder import add_lines, logged, look, open_run
from train.run.hooks import evaluate_checkpoint, finish_report
from train.run.initial import initial_drafter, resolve_init
from train.run.progress import Progress
from train.run.tracking import Tracker
from train.safety.guards import Skips, Spikes, finite
from train.safety.processes import Watch, first_only, start_processes
from train.safety.selfcheck import SelfCheck

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
            "loss": finite(self.loss.item()),
            "prefix": self.prefix.item(),
            "agreement": self.agreement.tolist(),
            "grad_norm": finite(self.grad_norm.item()),
        }


def block_loss(drafter, target: Target, rows: dict[str, torch.Tensor], blocks: Blocks, config: TrainConfig) -> RowLoss:
    """The objective on a batch's blocks, G = B * N of them.

    drafter: the drafter, or the engine around it; rows: columns (B, T), and stored features if there are.
    """
    if "context" in rows:
        features = stored_features(rows, target.dtype)
    else:
        layers = getattr(drafter, "module", drafter).layer_ids
        features = target.packed_features(rows["ids"], rows["positions"], rows["documents"], layers)
    head = getattr(drafter, "module", drafter).head_weight(target)
    return score(draft_states(drafter, target, rows, blocks, features), head, target, blocks, features, config)


def draft_states(
    drafter, target: Target, rows: dict[str, torch.Tensor], blocks: Blocks, features: Features
) -> torch.Tensor:
    """The drafter's states at all drafted positions of a batch, (B*N*L, D) in the target's dtype."""
    module: Drafter = getattr(drafter, "module", drafter)
    kind = module.norm.weight.dtype
    inputs = module.inputs(target, rows["ids"], rows["positions"], blocks.anchors)
    starts = (blocks.anchors - module.anchor_offset).clamp(min=0)
    masks = [
        block_mask(starts, rows["documents"], module.num_queries, kind, *view) for view in module.attention_patterns
    ]
    hidden = drafter(features.context.to(kind), rows["positions"], *inputs, *masks)  # (B, N*W, D)
    drafted = hidden.unflatten(1, (-1, module.num_queries))[:, :, module.first_draft_slot :]  # (B, N, L, D)
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


def train_step(
    engine, target: Target, drawn: Drawn, config: TrainConfig, beat: Callable[[int, str], None]
) -> StepMetrics:
    """One optimiser step over the rows that `Prefetch` has drawn; `beat(number, what)` hears what begins. The loss is
    divided by the weights of all blocks of all passes and processes, so that it depends neither on their number nor on
    how the blocks fell among them. A loss that is not finite in any process makes every gradient so, and the step is
    skipped by all."""
    world, passes = dist.get_world_size(), len(drawn)
    device, length = target.device, config.drafter.block_size - 1
    beat(1, "laying out its blocks")
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
    for i, (rows, blocks) in enumerate(micro):
        beat(3 * i + 2, "the forward pass")
        result = block_loss(engine, target, rows, blocks, config)
        loss = result.loss
        poison = torch.where(loss.detach().isfinite(), 1.0, float("nan"))
        beat(3 * i + 3, "the backward pass")
        engine.backward(poison * loss * (world * passes / total))  # DeepSpeed averages over both
        beat(3 * i + 4, "the optimiser's step")
        norm = take_step(engine)
        agree = result.agree.view(blocks.supervised.shape) & blocks.supervised  # (B, N, L)
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


def load_frozen(config: TrainConfig, device: torch.device, stored: StoredRows | None = None) -> Target:
    """The target, on the device; on the host for now if it is to be sharded; only its ends, and the layers that the
    drafter starts as, if its features are stored."""
    options, layers = config.target, None
    if stored is not None:
        known = stored.manifest
        family = FAMILIES[config.drafter.family].load()
        layers = family.warm_layers(known["layers"], config.drafter.layers, known["target"]["layers"])
    dtype = str(resolve_dtype(options.dtype, device)).removeprefix("torch.")
    place = "cpu" if options.shard else str(device)
    return load_target(options.path, dtype, place, options.trust_remote_code, layers)


def peak_memory(device: torch.device) -> int:
    """Bytes: the allocator's most on CUDA, the process's most elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


@dataclass(frozen=True)
class Prepared:
    """All that a run stands on."""

    run: Path
    target: Target
    stored: StoredRows | None
    dataset: "StoredRows | Dataset"
    engine: object  # DeepSpeed's, around the drafter
    done: int  # steps
    notes: list[str]  # what the user should know


def prepare(config: TrainConfig, device: torch.device, held: ExitStack) -> Prepared:
    """Loads everything; the run's folder is held by `held`."""
    micro_batch(config, dist.get_world_size())  # refuses, before anything is loaded, what the processes cannot share
    first_only(lambda: look(config))
    stored = StoredRows(config.features) if config.features else None
    target = load_frozen(config, device, stored)
    drafter = initial_drafter(config, target)
    if stored is not None:
        stored.check(identity(config, target, drafter.layer_ids))
    run = first_only(lambda: held.enter_context(open_run(config)))
    if config.target.shard:
        target.shard(device)
    if stored is not None:
        target.body.layers.to("meta")
    folder, notes = newest(run)
    state = load(folder) if folder is not None else {}
    if state:
        drafter.load_state_dict({name: tensor for name, tensor in state.items() if "/" not in name})
    dataset = stored if stored is not None else prepared_rows(config, target)
    check = SelfCheck(drafter.to(device), target, dataset, config) if config.guards.self_check else None
    parameters = sum(parameter.numel() for parameter in drafter.parameters())
    engine = build_engine(drafter, config, device)
    if check is not None:
        notes.append(check(block_loss(engine, target, check.rows, check.blocks, config)))
    if state:
        restore(engine, state)
    done = step_of(folder) if state else 0
    notes.append(
        f"{config.name}: {parameters:,} trainable parameters, "
        f"{len(dataset):,} packed rows of {config.data.length} tokens, {total_steps(config, len(dataset))} steps"
        + (f"; going on after step {done}" if done else "")
    )
    dist.barrier()  # all have looked what there is
    first_only(lambda: (trim_log(run / "metrics.jsonl", done), tidy(run, done, config.keep_states)))
    return Prepared(run, target, stored, dataset, engine, done, notes)


def train(config: TrainConfig) -> Path:
    """Trains a drafter from a checked configuration; returns the run's folder.

    Raises ValueError or FileNotFoundError with a sentence for what the user can mend before anything is begun, Stopped
    for what ends a run that was begun.
    """
    device = resolve_device(config.target.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    start_processes(device)
    config = replace(config, drafter=resolve_init(config.drafter, config.target))
    with ExitStack() as held:
        all_there = prepare(config, device, held)
        watch = Watch(config.guards.stall_minutes)
        held.callback(watch.close)
        return run_steps(config, device, all_there, watch)


def run_steps(config: TrainConfig, device: torch.device, all_there: Prepared, watch: Watch) -> Path:
    """The steps that are not done yet, with their checkpoints, evaluations and log."""
    run, target, engine, done = all_there.run, all_there.target, all_there.engine, all_there.done
    first, rows = dist.get_rank() == 0, len(all_there.dataset)
    total = total_steps(config, rows)
    stops = {round(total * (i + 1) / config.checkpoints) for i in range(config.checkpoints)} - {0} | {total}
    progress = Progress(total, enabled=first)
    for line in all_there.notes:
        progress.say(line)
    tracker = Tracker(config, run, enabled=first)

    def evaluate(step: int) -> None:
        def whole() -> Target:  # with stored features, it is in memory while it is needed
            return target if all_there.stored is None else load_frozen(config, device)

        def alive() -> None:
            watch.beat(step - 1, 10**6, "an evaluation")  # the last thing of the step before

        alive()
        evaluate_checkpoint(run, checkpoint_folder(run, step), whole, config, progress, tracker, alive)

    if done in stops and not (checkpoint_folder(run, done) / "evaluation" / "evaluation.json").exists():
        evaluate(done)  # the run was stopped between saving and evaluating
    stopping = catch_signals()

    prefetch = Prefetch(all_there.dataset, config, done, total, pinned=device.type == "cuda")
    spikes, skips = Spikes(config, rows, logged(run)), Skips(run, config)
    rate_of_device = matmul_rate(device, compute_dtype(config, device))
    operations = step_operations(shape_of(config, target.config))
    if all_there.stored is not None:
        operations.pop("target")
    share = sum(operations.values()) / dist.get_world_size()  # of a step's work
    pending: list[tuple[int, StepMetrics, float]] = []
    began = saved_at = time.perf_counter()
    for step in range(done, total):
        watch.beat(step, 0, "reading its rows")
        drawn = prefetch()
        rate = learning_rate(config.optim, step, total)
        for group in engine.optimizer.param_groups:
            group["lr"] = rate
        metrics = train_step(engine, target, drawn, config, partial(watch.beat, step))
        if not metrics.grad_norm.isfinite():
            progress.say(skips({"step": step + 1, "lr": rate, **metrics.numbers()}, drawn, engine))
        pending.append((step + 1, metrics, rate))
        stop = due = False
        if (step + 1) % config.log_every == 0 or step + 1 in stops:
            old = config.save_minutes is not None and time.perf_counter() - saved_at > 60 * config.save_minutes
            flags = torch.tensor([float(stopping.is_set), float(first and old)], device=device)
            dist.all_reduce(flags, dist.ReduceOp.MAX)  # all processes stop, or save, after the same step
            stop, due = (bool(flag) for flag in flags.tolist())
            seconds = (time.perf_counter() - began) / len(pending)
            cost = {
                "tokens_per_second": config.optim.batch * config.data.length / seconds,
                "mfu": share / seconds / rate_of_device,  # of this machine's large matrix products
                "peak_gb": peak_memory(device) / 1e9,
            }
            lines = [{"step": number, "lr": lr, **cost, **metrics.numbers()} for number, metrics, lr in pending]
            if first:
                add_lines(run, lines)
                for line in lines:
                    tracker.log(line)
                    progress.step(line)
                    if spike := spikes(line):
                        progress.say(spike)
            pending.clear()
            began = time.perf_counter()
        if step + 1 in stops or stop or due:
            watch.beat(step, 10**5, "saving")
            if step + 1 in stops:
                saved = save(run, step + 1, engine, target.dtype, config.keep_states)
                evaluate(step + 1)
            else:
                saved = save_rolling(run, step + 1, engine)
            dist.barrier()
            began = saved_at = time.perf_counter()
        if stop:
            progress.say(
                f"stopped by a signal after step {step + 1}; saved {saved}; the same command goes on from there"
            )
            break
    watch.close()
    progress.close()
    lost = sum(line["grad_norm"] is None for line in logged(run)) if first else 0
    if lost:
        progress.say(f"{lost} of {total} steps were skipped, as their loss or gradient was not finite")
    first_only(lambda: finish_report(run, tracker))
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
