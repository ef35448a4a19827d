"""The training loop: frozen target in, trained drafter out.

One step: packed rows -> the target's features and final states (no gradient) -> anchors and their blocks -> the
drafter on all blocks at once under the prefix-shared mask -> annealed divergence to the target at every drafted
position.

B rows, T packed length, N anchors, K block size, L = K - 1, D hidden size.
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch.nn import functional as F

from infer.attention.masks import block_mask
from infer.drafters.base import Drafter, head_weight
from infer.drafters.families import FAMILIES
from infer.drafters.heads.draft import teach
from infer.targets.loading import load_config, load_target, resolve_device, resolve_dtype, spread
from infer.targets.target import Features, Target
from infer.utils.interrupts import INTERRUPTED
from infer.utils.progress import HEARTBEAT
from train.batches import Prefetch, StepRows, prepared_rows
from train.blocks import Blocks
from train.config import TrainConfig
from train.engine import (
    build_engine,
    compute_dtype,
    micro_batch,
    restore,
    take_step,
    target_dtype,
)
from train.features import StoredRows, dependencies, stored_features
from train.objective import Correction, RowLoss, RowPlan, divergence, position_weights
from train.optim import learning_rate, set_rate
from train.plan import (
    matmul_rate,
    shape_of,
    step_operations,
    total_steps,
)
from train.run.checkpoints import Writer, checkpoint_folder, load, newest, save, save_rolling, step_of, tidy
from train.run.folder import check_run_folder, open_run
from train.run.hooks import evaluate_best, evaluate_checkpoint, finish_report, note_few_prompts
from train.run.initial import initial_drafter, named_mask, take_weights
from train.run.log import METRICS, StepLog, StepMetrics, read_log, trim_log
from train.run.ngrams import count_rows
from train.run.overview import overview
from train.run.progress import Progress
from train.run.settle import completed, settled
from train.run.sources import sources
from train.run.tracking import Tracker
from train.safety.guards import Skips
from train.safety.processes import (
    Meetings,
    StallWatch,
    catch_signals,
    first_only,
    own_gpu,
    start_processes,
    stopped_at_once,
)
from train.safety.selfcheck import SelfCheck

if TYPE_CHECKING:
    from datasets import Dataset


def block_loss(
    drafter,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    config: TrainConfig,
    plan: RowPlan | None = None,
) -> RowLoss:
    """Compute the objective on a batch's blocks, G = B * N of them.

    drafter: the drafter, or the engine around it; rows: columns (B, T), with stored features if there are any; plan:
    `plan_blocks` of the blocks, where it was made before.
    """
    module = getattr(drafter, "module", drafter)
    if "context" in rows:
        features = stored_features(rows, target.dtype)
    else:
        features = target.packed_features(rows["ids"], rows["positions"], rows["documents"], module.layer_ids)
    drafted = draft_states(drafter, target, rows, blocks, features)
    return score(module, drafted, target, rows, blocks, features, config, plan)


def draft_states(
    drafter, target: Target, rows: dict[str, torch.Tensor], blocks: Blocks, features: Features
) -> torch.Tensor:
    """Return the drafter's states at all drafted positions of a batch, (B*N*L, D) in the target's dtype."""
    module: Drafter = getattr(drafter, "module", drafter)
    kind = module.norm.weight.dtype
    inputs = module.inputs(target, rows["ids"], rows["positions"], blocks.anchors)
    starts = (blocks.anchors - module.anchor_offset).clamp(min=0)
    masks = [block_mask(starts, rows["documents"], module.num_queries, *view) for view in module.attention_patterns]
    hidden = drafter(features.context.to(kind), rows["positions"], *inputs, *masks)  # (B, N*W, D)
    drafted = hidden.unflatten(1, (-1, module.num_queries))[:, :, module.first_draft_slot :]  # (B, N, L, D)
    return drafted.flatten(0, 2).to(target.dtype)


def score(
    drafter: Drafter,
    drafted: torch.Tensor,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    features: Features,
    config: TrainConfig,
    plan: RowPlan | None = None,
) -> RowLoss:
    """Compute the objective on drafted states (B*N*L, D), block by block; a conditional head sees the true tokens."""
    length = blocks.supervised.shape[-1]
    weights = position_weights(config.objective, length).to(drafted.device, non_blocking=True)
    weights = (weights * blocks.supervised).flatten(0, 1)
    head, confidence = drafter.conditional_head, drafter.confidence_head
    correction = None
    if head is not None:
        states = drafted.unflatten(0, (-1, length))  # (G, L, D)
        answer = teach(drafter, target, states, blocks.tokens_before(rows["ids"]).flatten(0, 1))
        drafted = answer.read.flatten(0, 1).to(target.dtype)
        if answer.correction is not None:
            correction = Correction(answer.correction.flatten(0, 1).to(target.dtype), head.out, head.top_k)
    result = divergence(
        drafted,
        features.last.flatten(0, 1),
        blocks.teacher_rows.flatten(0, 1),
        blocks.labels.flatten(0, 1),
        weights,
        target.head_weight,
        config.objective,
        head_weight(drafter, target),
        target.scale,
        correction,
        overlap=confidence is not None,
        plan=plan,
    )
    if confidence is None:
        return result
    logits = confidence(states, answer)  # (G, L)
    entropy = F.binary_cross_entropy_with_logits(logits, result.overlap.to(logits), reduction="none")
    return result._replace(loss=result.loss + config.objective.confidence * (entropy * weights).sum())


def train_step(
    engine, target: Target, drawn: StepRows, config: TrainConfig, report_progress: Callable[[str], None]
) -> StepMetrics:
    """Take one optimiser step over the rows that `Prefetch` read; `report_progress(phase)` is called as each phase
    begins. The loss is divided by the weights of all blocks of all passes and processes, so that it depends neither on
    their number nor on how the blocks fell among them. A loss that is not finite in one process makes the gradients of
    all processes so, and all skip the step."""
    world, passes = dist.get_world_size(), len(drawn)
    device, length = target.device, config.drafter.block_size - 1
    report_progress("taking its rows")
    micro = [laid.to(device) for laid in drawn]
    weights = position_weights(config.objective, length).to(device, non_blocking=True)
    supervised = sum(laid.blocks.supervised.sum((0, 1)) for laid in micro).float()  # (L,)
    dist.all_reduce(supervised)
    total = (supervised * weights).sum().clamp(min=1e-6)

    loss_sum, agree_sum = torch.zeros((), device=device), torch.zeros(length, device=device)
    prefix_sum = torch.zeros(2, device=device)
    for laid in micro:
        blocks = laid.blocks
        report_progress("the forward pass")
        result = block_loss(engine, target, laid.rows, blocks, config, laid.plan)
        loss = result.loss
        poison = torch.where(loss.detach().isfinite(), 1.0, float("nan"))
        report_progress("the backward pass")
        engine.backward(poison * loss * (world * passes / total))  # DeepSpeed averages over both
        report_progress("the optimiser's step")
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


def load_frozen(
    config: TrainConfig, device: torch.device, stored: StoredRows | None = None, dtype: torch.dtype | None = None
) -> Target:
    """Load the target onto the device, or onto the host if it is to be sharded, in the dtype of training's passes or
    another. With stored features, load only its embedding, its head and the layers that the drafter is initialised
    from."""
    options, layers = config.target, None
    if stored is not None:
        known = stored.manifest
        family = FAMILIES[config.drafter.family].load()
        theirs = load_config(options.path, options.trust_remote_code).get_text_config()
        layers = family.warm_layers(known["layers"], config.drafter.layers, theirs)
    kind = str(dtype or target_dtype(config, device)).removeprefix("torch.")
    place = "cpu" if options.shard else str(device)
    told = options.chat_template_kwargs
    return load_target(options.path, kind, place, options.trust_remote_code, layers, told)


@dataclass(frozen=True)
class RunState:
    """Everything that the steps need, loaded; computed once from the configuration."""

    config: TrainConfig  # complete: `train.run.settle.completed`
    folder: Path
    device: torch.device
    target: Target
    stored: StoredRows | None
    dataset: "StoredRows | Dataset"
    engine: object  # DeepSpeed's, around the drafter
    done: int  # steps
    notes: list[str]  # lines for the user
    seconds: float  # that a step takes at this machine's full rate

    @property
    def total(self) -> int:
        """Steps of the whole run."""
        return total_steps(self.config, len(self.dataset))

    @property
    def dtype(self) -> torch.dtype:
        """Of decoding: the target's in evaluations, and the saved drafters'."""
        return resolve_dtype(self.config.target.dtype, self.device)

    @property
    def stops(self) -> set[int]:
        """The steps after which a checkpoint is due: evenly spread, the last at the end."""
        count = self.config.checkpoints
        return {round(self.total * (i + 1) / count) for i in range(count)} - {0} | {self.total}


def prepare_run(config: TrainConfig, device: torch.device, held: ExitStack) -> RunState:
    """Load everything, from the newest undamaged checkpoint if there is one; `held` keeps the lock of the folder."""
    micro_batch(config, dist.get_world_size())  # raises, before anything is loaded, if the rows cannot be shared evenly
    first_only(lambda: check_run_folder(config))
    stored = StoredRows(config.features) if config.features else None
    target = load_frozen(config, device, stored)
    dataset = stored if stored is not None else prepared_rows(config, target)
    asked, (config, recompute) = config, completed(config, target, dataset, device)
    seconds = seconds_at_full_rate(config, target, device)
    drafter = initial_drafter(config, target)
    if stored is not None:
        stored.check(dependencies(config, target, drafter.layer_ids))
    few = first_only(lambda: note_few_prompts(config, target))
    learnt_from = first_only(lambda: sources(config.target.path, target, dataset))
    folder = first_only(lambda: held.enter_context(open_run(asked, learnt_from)))
    said = first_only(lambda: overview(config, target, dataset, total_steps(config, len(dataset))))
    if dist.get_rank() == 0:  # before the work of the self-check, which takes a while for a large model
        print(*said, recompute, sep="\n", flush=True)
    if config.target.shard:
        spread(target, device)
    if stored is not None:
        target.body.layers.to("meta")
    checkpoint, notes = newest(folder)
    if config.anchors < asked.anchors:
        notes.append(f"anchors={asked.anchors}: no row has room for more than {config.anchors}")
    state = load(checkpoint) if checkpoint is not None else {}
    if state:
        take_weights(drafter, state, checkpoint)
    HEARTBEAT.at("checking a step against a plain computation")
    check = SelfCheck(drafter.to(device), target, dataset, config) if config.guards.self_check else None
    parameters = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    engine = build_engine(drafter, config, device)
    if check is not None:
        notes.append(check(block_loss(engine, target, check.rows, check.blocks, config)))
    if state:
        restore(engine, state)
    done = step_of(checkpoint) if state else 0
    notes.append(
        f"{config.name}: {parameters:,} trainable parameters, "
        f"{len(dataset):,} packed rows of {config.data.length} tokens, {total_steps(config, len(dataset))} steps"
        + named_mask(drafter.mask_token_id, target.tokenizer)
        + (f"; going on after step {done}" if done else "")
    )
    if few:
        notes.append(few)
    if config.ngrams:
        first_only(lambda: count_rows(dataset, target, folder, drafter.ngrams))
    dist.barrier()  # every process has looked for checkpoints
    first_only(lambda: (trim_log(folder / METRICS, done), tidy(folder, done, config.keep_states)))
    return RunState(config, folder, device, target, stored, dataset, engine, done, notes, seconds)


def train(config: TrainConfig) -> Path:
    """Train a drafter from a checked configuration; return the run's folder.

    Raises ValueError or FileNotFoundError with a sentence for what the user can mend before anything is begun, Stopped
    for what ends a run that was begun.
    """
    device = resolve_device(own_gpu(config.target.device))
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        torch.cuda.set_device(device)
    start_processes(device)
    with ExitStack() as held:
        run = prepare_run(settled(config, device), device, held)
        watch = StallWatch(config.guards.stall_minutes)
        held.callback(watch.close)
        return run_steps(run, watch)


def run_steps(run: RunState, watch: StallWatch) -> Path:
    """Take the remaining steps, with their log, checkpoints and evaluations; return the run's folder."""
    config, stops = run.config, run.stops
    progress = Progress(run.total, run.done, enabled=dist.get_rank() == 0)
    for line in run.notes:
        progress.say(line)
    tracker = Tracker(config, run.folder, enabled=dist.get_rank() == 0)
    if run.done in stops and not (checkpoint_folder(run.folder, run.done) / "evaluation" / "evaluation.json").exists():
        watch.begin_step(run.done, "an evaluation")
        evaluate(run, run.done, watch, progress, tracker)  # the run was stopped between saving and evaluating
    with closing(prefetch_of(run)) as prefetch, closing(Writer()) as writer:
        stopped_by = step_on(run, prefetch, writer, watch, progress, tracker)
    watch.close()
    progress.close()
    finish(run, progress, tracker)
    if stopped_by == signal.SIGINT:
        raise SystemExit(INTERRUPTED)
    return run.folder


def prefetch_of(run: RunState) -> Prefetch:
    """Begin to read the remaining steps ahead."""
    return Prefetch(run.dataset, run.config, run.done, run.total, pinned=run.device.type == "cuda")


def step_on(
    run: RunState, prefetch: Prefetch, writer: Writer, watch: StallWatch, progress: Progress, tracker: Tracker
) -> int | None:
    """Take the remaining steps; return the signal that stopped them, if one did."""
    config, engine, stopping = run.config, run.engine, catch_signals()
    log, skips = StepLog(config, run.folder, len(run.dataset), run.seconds), Skips(config, len(run.dataset))
    saved_at, meetings = time.perf_counter(), Meetings(run.done, config.log_every, run.device)
    for step in range(run.done + 1, run.total + 1):
        watch.begin_step(step, "reading its rows")
        rows = prefetch()
        rate = set_rate(engine.optimizer, learning_rate(config.optim, step - 1, run.total))
        metrics = train_step(engine, run.target, rows, config, watch.report_progress)
        if not metrics.grad_norm.isfinite():
            progress.say(skips(step, metrics.numbers()["loss"]))
        log.add(step, rate, metrics)
        if step % config.log_every == 0 or step in run.stops or log.due:
            log.write(progress, tracker)
        if step not in run.stops and not meetings.due(step):
            continue
        save_due = config.save_minutes is not None and time.perf_counter() - saved_at > 60 * config.save_minutes
        agreed = meetings.agree(step, stopping.is_set, save_due or writer.failed)
        if step in run.stops or agreed.stop or agreed.save:
            log.write(progress, tracker)
            watch.report_progress("saving")
            if step in run.stops:
                first_only(writer.wait)
                saved = save(run.folder, step, engine, run.dtype, config.keep_states)
                if not agreed.stop:  # else the same command evaluates it
                    with stopped_at_once(f"{saved} is whole, and the same command evaluates it and goes on from there"):
                        evaluate(run, step, watch, progress, tracker)
            else:
                save_rolling(run.folder, step, engine, writer)
                saved = first_only(writer.wait) if agreed.stop else None
            dist.barrier()
            saved_at = log.restart_clock()
        if agreed.stop:
            how = f"saved {saved}; the same command goes on from there"
            progress.say(f"stopped by {stopping.name} after step {step}; {how}")
            break
    return stopping.number


def evaluate(run: RunState, step: int, watch: StallWatch, progress: Progress, tracker: Tracker) -> None:
    """Decode held-out prompts with the checkpoint of a step, and update the report."""

    def whole_target() -> Target:  # with stored features, or trained in another dtype: in memory only meanwhile
        if run.stored is None and run.target.dtype == run.dtype:
            return run.target
        return load_frozen(run.config, run.device, dtype=run.dtype)

    def alive() -> None:
        watch.report_progress("an evaluation")

    alive()
    folder = checkpoint_folder(run.folder, step)
    shared = whole_target, run.config, progress, tracker, alive
    evaluate_checkpoint(run.folder, folder, *shared, last=step == run.total)
    if step == run.total:
        evaluate_best(run.folder, *shared)


def finish(run: RunState, progress: Progress, tracker: Tracker) -> None:
    """Report skipped steps, write the last report, and close the tracker."""
    lost = sum(line["grad_norm"] is None for line in read_log(run.folder)) if dist.get_rank() == 0 else 0
    if lost:
        progress.say(f"{lost} of {run.total} steps were skipped, as their loss or gradient was not finite")
    first_only(lambda: finish_report(run.folder, tracker))
    tracker.close()
    dist.barrier()


def seconds_at_full_rate(config: TrainConfig, target: Target, device: torch.device) -> float:
    """Return the seconds that a step's work would take at this machine's rate of large matrix products."""
    operations = step_operations(shape_of(config, target.config))
    if config.features:
        operations.pop("target")
    rate = matmul_rate(device, compute_dtype(config, device))
    return sum(operations.values()) / dist.get_world_size() / rate
