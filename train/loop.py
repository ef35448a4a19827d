"""The training loop: frozen target in, trained drafter out.

One step: packed rows -> the target's features and final states (no gradient) -> anchors and their
blocks -> the drafter on all blocks at once under the prefix-shared mask -> annealed divergence to the
target at every drafted position.

B rows, T packed length, N anchors, K block size, L = K - 1, D hidden size.
"""

import signal
import time
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F

from data.packing import row_index
from infer.drafters.base import Drafter, head_weight, packed_states, rows_of
from infer.drafters.heads.draft import teach
from infer.targets.loading import spread
from infer.targets.target import Features, Target
from infer.utils.errors import Stopped
from infer.utils.interrupts import INTERRUPTED
from infer.utils.progress import HEARTBEAT
from train.batches import Prefetch, StepRows, prepared_rows
from train.blocks import Blocks
from train.config import TrainConfig
from train.engine import build_engine, micro_batch, restore, take_step, target_dtype
from train.features import StoredRows, dependencies, stored_features
from train.objective import Batch, Correction, RowLoss, RowPlan, divergence, position_weights
from train.optim import set_rate
from train.plan import length_of
from train.processes import (
    StallWatch,
    agreed,
    catch_signals,
    first_only,
    own_device,
    release_signals,
    start_processes,
    stopped_at_once,
)
from train.run.checkpoints import checkpoint_folder, load, newest, save, step_of, tidy
from train.run.evaluation import evaluate_best, evaluate_checkpoint, finish_report, note_few_prompts
from train.run.folder import begin_run, count_rows, frequent_tokens, open_run, sources
from train.run.initial import initial_drafter, named_mask, take_weights
from train.run.log import METRICS, RunLog, StepMetrics, peak_memory, read_log, trim_log
from train.run.state import RunState, completed, course_of, load_frozen, overview, settled
from train.selfcheck import SelfCheck

MOST_SKIPPED = 5  # steps in a row with a loss or gradient that is not finite; that many end the run


def block_loss(
    drafter,
    target: Target,
    rows: dict[str, torch.Tensor],
    blocks: Blocks,
    config: TrainConfig,
    plan: RowPlan | None = None,
) -> RowLoss:
    """Compute the objective on a batch's blocks, G = B * N of them.

    drafter: the drafter, or the engine around it; rows: columns (B, T), with stored features if there
    are any; plan: `plan_rows` of the blocks, where it was made before.
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
    """Return the drafter's states at all slots of a batch's blocks, (B*N, W, D) in the target's
    dtype."""
    module: Drafter = getattr(drafter, "module", drafter)
    states = packed_states(module, target, rows, blocks.anchors, features.context, drafter)  # (B, N, W, D)
    return states.flatten(0, 1).to(target.dtype)


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
    """Compute the objective on drafted states (B*N, W, D), block by block; a conditional head sees the
    true tokens.

    A drafter of a part of the vocabulary learns the target's distribution among its tokens, normalised,
    where the true token is one of them (EAGLE-3's mask). The others' rows weigh nothing and agree with
    nothing, but count: so the loss is, for texts of the target's own, the divergence times the
    probability of its tokens.
    """
    length = blocks.supervised.shape[-1]
    weights = position_weights(config.objective, length).to(drafted.device, non_blocking=True)
    weights = (weights * blocks.supervised).flatten(0, 1)
    labels, counted = drafter.vocabulary.columns(blocks.labels.flatten(0, 1)), weights
    if drafter.d2t is not None:  # other rows than were planned
        weights, plan = weights * (labels >= 0), None
    head, confidence = drafter.conditional_head, drafter.confidence_head
    correction, states = None, drafted[:, drafter.first_draft_slot :]  # (G, L, D)
    if head is None:
        drafted = states.flatten(0, 1)
    else:
        # the true token before every label, (B, N, L)
        before = torch.cat([rows["ids"].gather(1, blocks.anchors)[..., None], blocks.labels[..., :-1]], -1)
        answer = teach(drafter, target, drafted, before.flatten(0, 1))
        drafted = answer.read.flatten(0, 1).to(target.dtype)
        if answer.correction is not None:
            correction = Correction(answer.correction.flatten(0, 1).to(target.dtype), head.out)
    batch = Batch(
        teacher_hidden=features.last.flatten(0, 1),
        teacher_rows=blocks.teacher_rows.flatten(0, 1),
        labels=labels,
        weights=weights,
        head=rows_of(drafter, target),
        config=config.objective,
        scale=target.scale,
        top_k=0 if head is None else head.top_k,
        overlap=confidence is not None,
        plan=plan,
    )
    result = divergence(drafted, batch, head_weight(drafter, target), correction)
    if confidence is None:
        return result
    logits = confidence(states, answer)  # (G, L)
    entropy = F.binary_cross_entropy_with_logits(logits, result.overlap.to(logits), reduction="none")
    return result._replace(loss=result.loss + (entropy * counted).sum())


def train_step(engine, target: Target, drawn: StepRows, config: TrainConfig) -> StepMetrics:
    """Take one optimiser step over the rows that `Prefetch` read. The loss is divided by the weights of
    all blocks of all passes and processes, so that it depends neither on their number nor on how the
    blocks fell among them. A loss that is not finite in one process makes the gradients of all
    processes so, and all skip the step."""
    world, passes = dist.get_world_size(), len(drawn)
    device, length = target.device, config.drafter.block_size - 1
    micro = [laid.to(device) for laid in drawn]
    weights = position_weights(config.objective, length).to(device, non_blocking=True)
    supervised = sum(laid.blocks.supervised.sum((0, 1)) for laid in micro).float()  # (L,)
    dist.all_reduce(supervised)
    total = (supervised * weights).sum().clamp(min=1e-6)

    loss_sum, agree_sum = torch.zeros((), device=device), torch.zeros(length, device=device)
    prefix_sum = torch.zeros(2, device=device)
    for laid in micro:
        blocks = laid.blocks
        result = block_loss(engine, target, laid.rows, blocks, config, laid.plan)
        loss = result.loss
        poison = torch.where(loss.detach().isfinite(), 1.0, float("nan"))
        engine.backward(poison * loss * (world * passes / total))  # DeepSpeed averages over both
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


def train(config: TrainConfig) -> Path:
    """Train a drafter from a checked configuration; return the run's folder.

    Raises ValueError or FileNotFoundError with a sentence for what the user can mend before anything is
    begun, Stopped for what ends a run that was begun.
    """
    device = own_device(config.target.device)
    start_processes(device)
    micro_batch(config, dist.get_world_size())  # raises if the rows cannot be shared evenly
    config = settled(config, device)
    with ExitStack() as held:
        folder = first_only(lambda: held.enter_context(open_run(config)))
        run = prepare_run(config, device, folder)
        held.callback(StallWatch(config.stall_minutes).over.set)
        held.callback(release_signals)
        return run_steps(run)


def prepare_run(asked: TrainConfig, device: torch.device, folder: Path) -> RunState:
    """Load everything into memory, from the folder's newest undamaged checkpoint if there is one."""
    stored = StoredRows(asked.features) if asked.features else None
    target = load_frozen(asked, device, target_dtype(asked, device), stored)
    prepared = None if stored is not None else prepared_rows(asked, target)
    dataset = stored if prepared is None else prepared.rows
    config, memory = completed(asked, target, dataset, device)
    size = config.drafter.vocabulary
    drafter = initial_drafter(config, target, frequent_tokens(dataset, size, target) if size else None)
    if stored is not None:
        stored.check(dependencies(config, target, drafter.layer_ids))
    few = first_only(lambda: note_few_prompts(config, target))
    first_only(lambda: begin_run(folder, asked, sources(config.target.path, target, dataset)))
    said = first_only(lambda: overview(config, target, dataset, drafter.vocabulary.tokens, device))
    said[2:2] = prepared.counts.lines() if prepared is not None else []  # behind the line about data
    if dist.get_rank() == 0:  # before the work of the self-check, which takes a while for a large model
        print(*said, memory, sep="\n", flush=True)
    if config.target.shard:
        spread(target, device)
    if stored is not None:
        target.body.layers.to("meta")
    checkpoint, notes = newest(folder)
    if config.anchors < asked.anchors:
        notes.append(f"anchors={asked.anchors}: no row has room for more than {config.anchors}")
    state, done = load(checkpoint), step_of(checkpoint) if checkpoint else 0
    if state:
        take_weights(drafter, state, checkpoint)
    HEARTBEAT.at("checking a step against a plain computation")
    check = SelfCheck(drafter.to(device), target, dataset, config) if config.self_check else None
    parameters = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    engine = build_engine(drafter, config, device)
    if check is not None:
        notes.append(check(block_loss(engine, target, check.rows, check.blocks, config)))
    if state:
        restore(engine, state)
    notes.append(
        f"{config.name}: {parameters:,} trainable parameters, "
        f"{len(dataset):,} packed rows of {config.data.length} tokens, {length_of(config, len(dataset))}"
        + named_mask(drafter.mask_token_id, target.tokenizer)
        + (f"; going on after step {done}" if done else "")
    )
    if few:
        notes.append(few)
    if config.ngrams:
        first_only(lambda: count_rows(dataset, target, folder, drafter.ngrams))
    dist.barrier()  # every process has looked for checkpoints
    first_only(lambda: (trim_log(folder / METRICS, done), tidy(folder, done)))
    course = first_only(lambda: course_of(config, len(dataset), folder, done))
    return RunState(config, folder, device, target, dataset, engine, course, notes)


def run_steps(run: RunState) -> Path:
    """Take the remaining steps, with their log, checkpoints and evaluations; return the run's
    folder."""
    course = run.course
    log = RunLog(run.config, run.folder, course.step, course.total)
    for line in run.notes:
        log.say(line)
    here = checkpoint_folder(run.folder, course.step)
    if here.exists() and not (here / "evaluation/evaluation.json").exists():
        evaluate(run, log)  # the run was stopped between saving and evaluating
    stopping = catch_signals()  # until here Ctrl-C ends the run at once
    steps = range(course.step, course.total) if course.optim.minutes is None else count(course.step)
    ahead = Prefetch(run.dataset, run.config, steps, pinned=run.device.type == "cuda")
    saved_at = time.perf_counter()
    skipped = 0
    stop = False
    with closing(ahead) as prefetch:
        while not course.over:
            metrics = take_one(run, prefetch, log)
            step = metrics["step"]
            skipped = count_skipped(run, step, metrics, skipped, log)
            minutes = (time.perf_counter() - saved_at) / 60
            due = run.config.save_minutes is not None and minutes > run.config.save_minutes
            stop, save_due, spent = agreed([stopping.number is not None, due, metrics["seconds"]], run.device)
            whole = course.advance(spent)
            if whole or stop or save_due:
                HEARTBEAT.at(f"training: step {step}, saving")
                saved = save(run.folder, step, run.engine, run.dtype if whole else None)
                if whole and not stop:  # else the same command evaluates it
                    with stopped_at_once(f"{saved} is whole, and the same command evaluates it and goes on from there"):
                        evaluate(run, log)
                saved_at = time.perf_counter()
            if stop:
                how = f"saved {saved}; the same command goes on from there"
                log.say(f"stopped by {stopping.name} after step {step}; {how}")
                break
    finish(run, log)
    if stop:  # a sweep ends with it
        raise SystemExit(INTERRUPTED if stopping.number == signal.SIGINT else 0)
    return run.folder


def take_one(run: RunState, prefetch: Prefetch, log: RunLog) -> dict:
    """Take a step, counted from 1, and write its line; return that."""
    began, config, engine, course, step = time.perf_counter(), run.config, run.engine, run.course, run.course.step + 1
    processor_time = run.device.type == "cpu" and config.optim.clock == "processor"
    clock = time.thread_time if processor_time else time.perf_counter
    before = clock()
    HEARTBEAT.at(f"training: step {step}, reading its rows")
    rows = prefetch()
    HEARTBEAT.at(f"training: step {step}")
    rate = set_rate(engine.optimizer, course.rate)
    numbers = train_step(engine, run.target, rows, config).numbers()
    speed = config.optim.batch * config.data.length / (time.perf_counter() - began)
    cost = {"tokens_per_second": speed, "peak_gb": peak_memory(run.device) / 1e9}
    line = {"step": step, "seconds": course.seconds + clock() - before, "lr": rate, **cost, **numbers}
    log.total = course.total
    log.step(line)
    return line


def count_skipped(run: RunState, step: int, line: dict, before: int, log: RunLog) -> int:
    """Return how many steps were skipped in a row, `before` up to the last one, and name the rows of
    this one if it was. Raises Stopped after too many."""
    if line["grad_norm"] is not None:
        return 0
    first, count = (step - 1) * run.config.optim.batch, run.config.optim.batch
    shown = [str(row_index(first + i, len(run.dataset), run.config.seed)) for i in range(min(count, 16))]
    which = "loss and gradient are" if line["loss"] is None else "gradient is"
    what = f"step {step} is skipped: its {which} not finite; its rows of the training set are {', '.join(shown)}"
    if before + 1 == MOST_SKIPPED:
        raise Stopped(
            f"{what}. That were {MOST_SKIPPED} in a row; weights and moments are as they were before the first of "
            "them: optim.precision=float32, a lower optim.lr or other data may help"
        )
    log.say(what)
    return before + 1


def evaluate(run: RunState, log: RunLog) -> None:
    """Decode held-out prompts with the checkpoint of the step that was taken, and update the report."""
    step, over = run.course.step, run.course.over
    if not run.config.evaluation.prompts:
        return
    HEARTBEAT.at(f"evaluating step {step}")
    evaluate_checkpoint(run, checkpoint_folder(run.folder, step), log, last=over)
    if over:
        evaluate_best(run, log)


def finish(run: RunState, log: RunLog) -> None:
    """Report skipped steps and write the last report."""
    log.progress.close()
    lost = sum(line["grad_norm"] is None for line in read_log(run.folder)) if dist.get_rank() == 0 else 0
    if lost:
        log.say(f"{lost} of {run.course.step} steps were skipped, as their loss or gradient was not finite")
    first_only(lambda: finish_report(run.folder, log))
    dist.barrier()
