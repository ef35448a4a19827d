"""What happens at a checkpoint: decode held-out prompts, write numbers and pictures, mark the best.

An evaluation that fails (no memory, no hub, a defect) does not end the training: the reason is written to
evaluation/failed.txt and to the report, and the same command tries the newest one again. Outputs that differ from plain
decoding's are not such a failure: they are reported at once, and are the run's result.
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from data.prompts import evaluation_prompts, few_prompts
from infer.drafters.base import Drafter
from infer.evaluation.cost import fit, limits_of
from infer.evaluation.evaluate import brief, decode_all, parts_of, summarise
from infer.evaluation.measuring import Measured, PromptSet, join
from infer.evaluation.report import RunFacts, write_report
from infer.evaluation.results import Evaluation, read_result, write_result
from infer.evaluation.ruler import best_of, too_few
from infer.evaluation.tables import headline, table
from infer.formats.checkpoint import load_drafter
from infer.formats.folders import drafter_beside
from infer.targets.target import Target
from infer.utils.entry import Stopped, command_line, disk
from infer.utils.files import atomic_write
from infer.utils.redact import redact_text
from infer.utils.together import agreed
from train.config import TrainConfig
from train.run.checkpoints import checkpoints, mark_best, step_of
from train.run.log import read_log
from train.run.progress import Progress
from train.run.tracking import Tracker
from train.safety.processes import first_only


def evaluate_checkpoint(
    run: Path,
    folder: Path,
    target: Callable[[], Target],
    config: TrainConfig,
    progress: Progress,
    tracker: Tracker,
    alive: Callable[[], None],
    last: bool,
) -> None:
    """Decode with the drafter as it is on disk, the way a user would, and update the run's report. All processes call
    it; each decodes its share of the prompts, the first one writes. `alive` is called after every few prompts; only the
    `last` checkpoint is evaluated in full."""
    try:
        model = target()
        drafter = load_drafter(folder, dtype=model.dtype, device=model.device)
        parts = parts_to_decode(model, config, last, progress.say)
        parts = within_minutes(model, drafter, parts, config, progress)
        alive()
        measured, problem = decode_share(model, drafter, step_of(folder), config, parts, progress, alive), None
    except Exception as error:  # noqa: BLE001
        measured, problem = None, describe_error(error)
    if problem is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # the evaluation's, if memory ran out
    shares = [(measured, problem)]
    if dist.get_world_size() > 1:
        shares = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (measured, problem))
    problems = [problem for _, problem in shares if problem]

    def write() -> None:
        out = folder / "evaluation"
        with disk(str(out)):
            out.mkdir(exist_ok=True)
            try:
                if problems:
                    write_failure(out, problems, progress)
                else:
                    result = write_evaluation(out, model, drafter, parts, [one for one, _ in shares], config)
                    (out / "failed.txt").unlink(missing_ok=True)
                    print_evaluation(result, out, progress)
                    tracker.summary(result)
                if not last:  # behind the last one comes `finish_report`
                    update_report(run)
            except OSError:
                raise  # the disk's
            except Exception as error:  # noqa: BLE001
                write_failure(out, [describe_error(error)], progress)

    first_only(write)


def evaluate_best(
    run: Path,
    target: Callable[[], Target],
    config: TrainConfig,
    progress: Progress,
    tracker: Tracker,
    alive: Callable[[], None],
) -> None:
    """Where an earlier checkpoint than the last is the best, evaluate it in full too: its report, its card and what
    doctor compares with come from that."""
    full = {checkpoints(run)[-1].name}
    while (best := first_only(lambda: best_checkpoint(run))) is not None and best.name not in full:
        full.add(best.name)
        evaluate_checkpoint(run, best, target, config, progress, tracker, alive, last=True)


def best_checkpoint(run: Path) -> Path | None:
    """Return the folder of the best checkpoint, None where no evaluation worked."""
    evaluations = evaluations_of(run)
    return run / "checkpoints" / Path(best_of(evaluations).checkpoint).name if evaluations else None


def note_few_prompts(config: TrainConfig, target: Target) -> str | None:
    """Return a sentence where the user's own data give fewer held-out prompts than evaluations want. Raises ValueError,
    before the first step, where they give none."""
    if config.data.source in ("embedded", "stdlib"):  # the library has thousands
        return None
    options = config.evaluation
    return few_prompts(
        len(evaluation_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)), options.prompts
    )


def parts_to_decode(target: Target, config: TrainConfig, last: bool, say: Callable[[str], None]) -> list[PromptSet]:
    """Return the prompts of an evaluation, all processes' together: of the last checkpoint all parts, also with the
    drafter that lies in the target's folder, if there is one; of others a quarter of the first."""
    options = config.evaluation
    if config.target.shard:
        options = replace(options, compile=False)
    prompts = evaluation_prompts(
        config.data, target.tokenizer, options.prompts, options.prompt_tokens, options.outside if last else 0
    )
    if not last:
        return [brief(parts_of(prompts, options)[0])]
    return parts_of(prompts, options, own_drafter(target, config.target.path, say))


def within_minutes(
    target: Target, drafter: Drafter, parts: list[PromptSet], config: TrainConfig, progress: Progress
) -> list[PromptSet]:
    """Return what `evaluation.minutes` have room for on the first process's machine, the same in all."""
    limits, problem = None, None
    try:
        processes = 1 if config.target.shard else dist.get_world_size()  # a sharded target's all decode everything
        limits = limits_of(target, drafter, parts, processes=processes)
    except Exception as error:  # noqa: BLE001  raised when the others have what they wait for
        problem = error
    limits = agreed(limits)
    if problem is not None:
        raise problem
    return fit(parts, limits, progress.say)


def own_drafter(target: Target, path: str, say: Callable[[str], None]) -> Drafter | None:
    """Return the drafter that lies in the target's folder, None where there is none, or none that fits."""
    folder = drafter_beside(path)
    if folder is None:
        return None
    try:
        drafter = load_drafter(folder, dtype=target.dtype, device=target.device)
        drafter.check_target(target)
        return drafter
    except ValueError as error:
        say(f"{folder} is not evaluated beside the new drafter: {error}")
        return None


def decode_share(
    target: Target,
    drafter: Drafter,
    step: int,
    config: TrainConfig,
    parts: list[PromptSet],
    progress: Progress,
    alive: Callable[[], None],
) -> list[list[Measured]]:
    """Decode this process's share of the prompts of every part with every method."""
    if not config.target.shard:  # a pass through a sharded target takes all processes: all decode everything, in step
        mine = slice(dist.get_rank(), None, dist.get_world_size())
        parts = [replace(part, prompts=part.prompts[mine], numbers=part.numbers[mine]) for part in parts]
    total = sum(len(part.prompts) * part.config.repeats for part in parts)
    with progress.counting(f"evaluating step {step}", total) as advance:

        def onwards(done: int, total: int) -> None:
            alive()
            advance(done, total)

        return decode_all(target, drafter, parts, onwards)


def write_evaluation(
    out: Path,
    target: Target,
    drafter: Drafter,
    parts: list[PromptSet],
    shares: list[list[list[Measured]]],
    config: TrainConfig,
) -> Evaluation:
    """Join what the processes measured; write and return the evaluation."""
    if config.target.shard:
        shares = shares[:1]  # all measured the same
    measured = [join(of_part) for of_part in zip(*shares, strict=True)]
    result = summarise(target, drafter, parts, measured)
    result = replace(result, step=step_of(out.parent), checkpoint=str(out.parent), drafter=config.name)
    write_result(out / "evaluation.json", result)
    return result


def print_evaluation(result: Evaluation, out: Path, progress: Progress) -> None:
    """Print the evaluation in a line; in a second one, that outputs are wrong."""
    taus = ", ".join(f"{m.label} τ {m.tau:.2f} ({m.speedup:.2f}x)" for m in result.drafting)
    progress.say(f"step {result.step}: {taus}")
    if is_wrong(result):
        progress.say(
            f"!!! NOT LOSSLESS at step {result.step}: greedy outputs differ from plain decoding's in float32, which "
            f"is a defect of this program or machine, not of the drafter: see {out}/evaluation.json"
        )


def is_wrong(result: Evaluation) -> bool:
    """Return whether outputs differ where rounding cannot be the cause."""
    return result.temperature == 0 and result.dtype == "float32" and not result.same_output


def describe_error(error: BaseException) -> str:
    """Return an error's kind and first line, and below it the traceback, without secrets."""
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return redact_text(f"{type(error).__name__}: {lines[0]}\n\n{trace}")


def write_failure(out: Path, problems: list[str], progress: Progress) -> None:
    """Write down why there is no evaluation."""
    (out / "evaluation.json").unlink(missing_ok=True)
    atomic_write(out / "failed.txt", "\n".join(problems))
    progress.say(f"evaluating step {step_of(out.parent)} failed, training goes on: {problems[0].splitlines()[0]}")


def failures_of(run: Path) -> list[str]:
    """Return a sentence about every evaluation that failed, by step."""
    files = [folder / "evaluation" / "failed.txt" for folder in checkpoints(run)]
    return [
        f"The evaluation at step {step_of(file.parent.parent)} failed: {file.read_text().splitlines()[0]}"
        for file in files
        if file.exists()
    ]


def evaluations_of(run: Path) -> list[Evaluation]:
    """Return all evaluations of a run, by step."""
    files = (folder / "evaluation" / "evaluation.json" for folder in checkpoints(run))
    return [read_result(file, Evaluation) for file in files if file.exists()]


def update_report(run: Path) -> Path | None:
    """Mark the best checkpoint and write the report; return its page, None if nothing was evaluated."""
    best = best_checkpoint(run)
    if best is None:
        return None
    mark_best(run, best)
    evaluations = evaluations_of(run)
    notes = [*failures_of(run), *filter(None, [too_few(evaluations)])]
    return write_report(run / "report", evaluations, notes, story_of(run))


def story_of(run: Path) -> RunFacts:
    """Return what the report tells of the run: its command as it was given last, its configuration, losses and time."""
    file = run / "config.json"
    config = json.loads(file.read_text()) if file.exists() else {}
    lines = read_log(run)
    tokens = config["optim"]["batch"] * config["data"]["length"] if config else 0
    return RunFacts(
        command=command_line(),
        config=config,
        data=" ".join(str(config["data"][key]) for key in ("source", "path") if config["data"][key])
        if config
        else None,
        losses=[(line["step"], line["loss"]) for line in lines if line["loss"] is not None],
        seconds=sum(tokens / line["tokens_per_second"] for line in lines) if lines else None,
    )


def finish_report(run: Path, tracker: Tracker) -> None:
    """Print the best checkpoint's table and where everything is. Raises Stopped if outputs were wrong."""
    with disk(str(run / "report")):
        page = update_report(run)
    for line in failures_of(run):
        print(line)
    if page is None:
        for folder in checkpoints(run)[-1:]:
            print(f"No checkpoint could be evaluated.\ndrafter     {folder / 'drafter'}", flush=True)
        return
    evaluations = evaluations_of(run)
    best = best_of(evaluations)
    tracker.report(page.parent, best)
    print(f"\n{why}" if (why := too_few(evaluations)) else "")
    print(f"Best checkpoint: step {best.step}, greedy on {best.prompts} held-out prompts, {best.device}\n")
    print(f"{table(best)}\n\n{headline(best)}")
    print(f"\nreport      {page}")
    print(f"drafter     {run / 'checkpoints' / 'best' / 'drafter'}")
    print(f"metrics     {run / 'metrics.jsonl'}", flush=True)
    wrong = [str(result.step) for result in evaluations if is_wrong(result)]
    if wrong:
        raise Stopped(
            f"greedy outputs differ from plain decoding's in float32 (step {', '.join(wrong)}): a defect, see "
            f"evaluation.json there and {page}"
        )
