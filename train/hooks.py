"""What happens at a checkpoint: decode held-out prompts, leave numbers and pictures, mark the best."""

import json
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist

from data.prompts import held_out_prompts
from infer.checkpoint import load_drafter
from infer.evaluate import Measured, best_tau, decode_all, same_output, summary
from infer.report import table, write_report
from infer.target import Target
from train.config import TrainConfig
from train.progress import Progress
from train.state import checkpoints, mark_best, step_of, write_aside
from train.tracking import Tracker


def evaluate_checkpoint(
    run: Path, folder: Path, target: Target, config: TrainConfig, progress: Progress, tracker: Tracker
) -> None:
    """Decodes with the drafter as it lies on disk, the way a user would, and updates the run's report. All processes
    call it; each decodes its share of the prompts, the first one writes."""
    drafter = load_drafter(folder, dtype=target.dtype, device=target.device)
    options = config.evaluation
    prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)
    rank, world = dist.get_rank(), dist.get_world_size()
    if config.target.shard:  # a pass takes all processes: all decode everything, in step
        rank, world, options = 0, 1, replace(options, compile=False)
    with progress.counting(f"evaluating step {step_of(folder)}", len(prompts[rank::world])) as advance:
        measured = decode_all(target, drafter, prompts[rank::world], options, advance)
    shares = [measured]
    if world > 1:
        shares = [None] * world
        dist.all_gather_object(shares, measured)
    if dist.get_rank() > 0:
        return
    results = {method: Measured.joined([share[method] for share in shares]) for method in measured}
    result = summary(target, drafter, prompts, results, options)
    result |= {"step": step_of(folder), "checkpoint": str(folder), "drafter": config.name}
    out = folder / "evaluation"
    out.mkdir(exist_ok=True)
    write_aside(out / "evaluation.json", json.dumps(result, indent=1) + "\n")
    if options.temperature == 0 and str(target.dtype) == "torch.float32" and not same_output(result):
        raise AssertionError(f"greedy outputs differ from plain decoding in float32: see {out}/evaluation.json")
    evaluations = evaluations_of(run)
    best = max(evaluations, key=best_tau)
    mark_best(run, folder.with_name(Path(best["checkpoint"]).name))
    write_report(run / "report", evaluations)
    taus = ", ".join(
        f"{method['name']}{method['budget'] or ''} τ {method['tau']:.2f} ({method['speedup']:.2f}x)"
        for method in result["methods"][1:]
    )
    progress.say(f"step {result['step']}: {taus}")
    tracker.summary(result)


def evaluations_of(run: Path) -> list[dict]:
    """All evaluations of a run, by step."""
    files = (folder / "evaluation" / "evaluation.json" for folder in checkpoints(run))
    return [json.loads(file.read_text()) for file in files if file.exists()]


def finish_report(run: Path, tracker: Tracker) -> None:
    """The end of a run: the best checkpoint's table and where everything lies."""
    evaluations = evaluations_of(run)
    if not evaluations:
        return
    best = max(evaluations, key=best_tau)
    page = write_report(run / "report", evaluations)
    tracker.pictures(run / "report")
    tracker.artifact(run / "checkpoints" / Path(best["checkpoint"]).name / "drafter", best)
    print(f"\nBest checkpoint: step {best['step']}, greedy on {best['prompts']} held-out prompts, {best['device']}\n")
    print(table(best))
    print(f"\nreport      {page}")
    print(f"pictures    {', '.join(str(path) for path in sorted(page.parent.glob('*.png')))}")
    print(f"drafter     {run / 'checkpoints' / 'best' / 'drafter'}")
    print(f"metrics     {run / 'metrics.jsonl'}", flush=True)
