"""What happens at a checkpoint: decode held-out prompts, leave numbers and pictures, mark the best.

An evaluation that fails, for want of memory or of a hub, or by a defect, does not end the training: the reason stands
in evaluation/failed.txt and in the report, and the same command tries the newest one again. Outputs that are not those
of plain decoding are no such failure: they are reported at once, and are the run's result.
"""

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from data.prompts import held_out_prompts
from infer.drafters.base import Drafter
from infer.evaluation.evaluate import Measured, best_tau, decode_all, same_output, summary
from infer.evaluation.report import table, write_report
from infer.formats.checkpoint import load_drafter
from infer.targets.target import Target
from infer.utils.entry import Stopped
from infer.utils.files import atomic_write
from infer.utils.redact import redact_text
from train.config import TrainConfig
from train.run.checkpoints import checkpoints, mark_best, step_of
from train.run.progress import Progress
from train.run.tracking import Tracker
from train.safety.processes import disk, first_only

Shares = tuple[list[list[int]], dict[tuple[str, int], Measured]]  # the prompts, and what was measured on them


def evaluate_checkpoint(
    run: Path,
    folder: Path,
    target: Callable[[], Target],
    config: TrainConfig,
    progress: Progress,
    tracker: Tracker,
    alive: Callable[[], None],
) -> None:
    """Decodes with the drafter as it lies on disk, the way a user would, and updates the run's report. All processes
    call it; each decodes its share of the prompts, the first one writes. `alive` is called after every few prompts."""
    try:
        model = target()
        drafter = load_drafter(folder, dtype=model.dtype, device=model.device)
        prompts, measured = decode_share(model, drafter, step_of(folder), config, progress, alive)
        problem = None
    except Exception as error:  # noqa: BLE001
        prompts, measured, problem = [], None, why(error)
    if problem is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()  # what the evaluation had before memory ran out
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
                    failed(out, problems, progress)
                else:
                    result = written(out, model, drafter, prompts, [measured for measured, _ in shares], config)
                    (out / "failed.txt").unlink(missing_ok=True)
                    say(result, out, progress)
                    tracker.summary(result)
                show(run)
            except OSError:
                raise  # the disk's
            except Exception as error:  # noqa: BLE001
                failed(out, [why(error)], progress)

    first_only(write)


def decode_share(
    target: Target, drafter: Drafter, step: int, config: TrainConfig, progress: Progress, alive: Callable[[], None]
) -> Shares:
    """All prompts, and what this process measured on its share of them."""
    options = config.evaluation
    prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)
    rank, world = dist.get_rank(), dist.get_world_size()
    if config.target.shard:  # a pass takes all processes: all decode everything, in step
        rank, world, options = 0, 1, replace(options, compile=False)
    with progress.counting(f"evaluating step {step}", len(prompts[rank::world])) as advance:

        def onwards(done: int, total: int) -> None:
            alive()
            advance(done, total)

        return prompts, decode_all(target, drafter, prompts[rank::world], options, onwards)


def written(
    out: Path, target: Target, drafter: Drafter, prompts: list, shares: list[dict], config: TrainConfig
) -> dict:
    """Joins what the processes measured; writes and returns the evaluation."""
    if config.target.shard:
        shares = shares[:1]  # all measured the same
    results = {method: Measured.joined([share[method] for share in shares]) for method in shares[0]}
    result = summary(target, drafter, prompts, results, config.evaluation)
    result |= {"step": step_of(out.parent), "checkpoint": str(out.parent), "drafter": config.name}
    atomic_write(out / "evaluation.json", json.dumps(result, indent=1) + "\n")
    return result


def say(result: dict, out: Path, progress: Progress) -> None:
    """The evaluation in a line; in another one, if outputs are wrong."""
    taus = ", ".join(
        f"{method['name']}{method['budget'] or ''} τ {method['tau']:.2f} ({method['speedup']:.2f}x)"
        for method in result["methods"][1:]
    )
    progress.say(f"step {result['step']}: {taus}")
    if is_wrong(result):
        progress.say(
            f"!!! NOT LOSSLESS at step {result['step']}: greedy outputs differ from plain decoding's in float32, which "
            f"is a defect of this program or machine, not of the drafter: see {out}/evaluation.json"
        )


def is_wrong(result: dict) -> bool:
    """Whether outputs differ where rounding is no excuse."""
    return result["temperature"] == 0 and result["dtype"] == "float32" and not same_output(result)


def why(error: BaseException) -> str:
    """An error's kind and first line, and below it where it came from."""
    lines = str(error).strip().splitlines() or [""]
    trace = "".join(traceback.format_exception(error))
    return redact_text(f"{type(error).__name__}: {lines[0]}\n\n{trace}")


def failed(out: Path, problems: list[str], progress: Progress) -> None:
    """Writes down why there is no evaluation."""
    (out / "evaluation.json").unlink(missing_ok=True)
    atomic_write(out / "failed.txt", "\n".join(problems))
    progress.say(f"evaluating step {step_of(out.parent)} failed, training goes on: {problems[0].splitlines()[0]}")


def failures_of(run: Path) -> list[str]:
    """A sentence about every evaluation that failed, by step."""
    files = [folder / "evaluation" / "failed.txt" for folder in checkpoints(run)]
    return [
        f"The evaluation at step {step_of(file.parent.parent)} failed: {file.read_text().splitlines()[0]}"
        for file in files
        if file.exists()
    ]


def show(run: Path) -> Path | None:
    """Marks the best checkpoint and writes the report; returns its page, if anything was evaluated."""
    evaluations = evaluations_of(run)
    if not evaluations:
        return None
    best = max(evaluations, key=best_tau)
    mark_best(run, run / "checkpoints" / Path(best["checkpoint"]).name)
    return write_report(run / "report", evaluations, failures_of(run))


def evaluations_of(run: Path) -> list[dict]:
    """All evaluations of a run, by step."""
    files = (folder / "evaluation" / "evaluation.json" for folder in checkpoints(run))
    return [json.loads(file.read_text()) for file in files if file.exists()]


def finish_report(run: Path, tracker: Tracker) -> None:
    """The end of a run: the best checkpoint's table and where everything lies. Raises Stopped if outputs were wrong."""
    with disk(str(run / "report")):
        page = show(run)
    for line in failures_of(run):
        print(line)
    if page is None:
        for folder in checkpoints(run)[-1:]:
            print(f"No checkpoint could be evaluated.\ndrafter     {folder / 'drafter'}", flush=True)
        return
    evaluations = evaluations_of(run)
    best = max(evaluations, key=best_tau)
    tracker.pictures(page.parent)
    tracker.artifact(run / "checkpoints" / Path(best["checkpoint"]).name / "drafter", best)
    print(f"\nBest checkpoint: step {best['step']}, greedy on {best['prompts']} held-out prompts, {best['device']}\n")
    print(table(best))
    print(f"\nreport      {page}")
    print(f"pictures    {', '.join(str(path) for path in sorted(page.parent.glob('*.png')))}")
    print(f"drafter     {run / 'checkpoints' / 'best' / 'drafter'}")
    print(f"metrics     {run / 'metrics.jsonl'}", flush=True)
    wrong = [str(result["step"]) for result in evaluations if is_wrong(result)]
    if wrong:
        raise Stopped(
            f"greedy outputs differ from plain decoding's in float32 (step {', '.join(wrong)}): a defect, see "
            f"evaluation.json there and {page}"
        )
