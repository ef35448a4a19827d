"""What happens at a checkpoint: decode held-out prompts, write numbers and pictures, mark the best.

An evaluation that fails (no memory, no hub, a defect) does not end the training: the reason is
written to evaluation/failed.txt and to the report, and the same command tries the newest one again.
Outputs that differ from plain decoding's are not such a failure: they are reported at once, and are
the run's result.
"""

import json
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from data.prompts import evaluation_prompts, few_prompts
from infer.drafters.base import Drafter
from infer.evaluation.evaluate import brief, decode_all, parts_of, summarise
from infer.evaluation.measuring import Measured, PromptSet, join
from infer.evaluation.report import RunFacts, write_report
from infer.evaluation.results import Evaluation, read_result, write_result
from infer.evaluation.ruler import best_of, too_few
from infer.evaluation.tables import headline, method_table
from infer.formats.checkpoint import load_drafter
from infer.targets.target import Target
from infer.utils.errors import Stopped, command_line, disk
from infer.utils.files import atomic_write
from infer.utils.progress import HEARTBEAT, Progress
from infer.utils.redact import redact_text
from infer.utils.renamed_options import translate_saved_config
from train.config import TrainConfig
from train.processes import first_only
from train.run.checkpoints import checkpoints, mark_best, step_of
from train.run.log import RunLog, read_log
from train.run.state import RunState


def evaluate_checkpoint(run: RunState, folder: Path, log: RunLog, last: bool) -> None:
    """Decode with the drafter as it is on disk, the way a user would, and update the run's report.
    All processes call it; each decodes its share of the prompts, the first one writes. Only the
    `last` checkpoint is evaluated in full."""
    began = time.monotonic()
    target = drafter = parts = measured = problem = None
    try:
        target = run.whole_target()
        drafter = load_drafter(folder, dtype=target.dtype, device=target.device)
        parts = parts_to_decode(run.config, target, last)
        measured = decode_share(
            target, drafter, parts, run.config, f"evaluating step {step_of(folder)}"
        )
    except Exception as error:  # noqa: BLE001
        problem = describe_error(error)
        torch.cuda.empty_cache()  # the evaluation's, if memory ran out
    shares = [None] * dist.get_world_size()
    dist.all_gather_object(shares, (measured, problem))
    problems = [problem for _, problem in shares if problem]

    def write() -> None:
        out = folder / "evaluation"
        with disk(str(out)):
            out.mkdir(exist_ok=True)
            try:
                if problems:
                    write_failure(out, problems, log)
                else:
                    # where it is sharded all are the same
                    read = shares[:1] if run.config.target.shard else shares
                    write_evaluation(folder, target, drafter, parts, [one for one, _ in read], log)
                    (out / "failed.txt").unlink(missing_ok=True)
                if not last:  # behind the last one comes `finish_report`
                    update_report(run.folder)
            except OSError:
                raise  # the disk's
            except Exception as error:  # noqa: BLE001
                write_failure(out, [describe_error(error)], log)

    first_only(write)
    log.progress.start += time.monotonic() - began  # it is no part of the steps


def evaluate_best(run: RunState, log: RunLog) -> None:
    """Where an earlier checkpoint than the last is the best, evaluate it in full too: its report,
    its card and what doctor compares with come from that."""
    full = {checkpoints(run.folder)[-1].name}
    while (
        best := first_only(lambda: best_checkpoint(run.folder))
    ) is not None and best.name not in full:
        full.add(best.name)
        evaluate_checkpoint(run, best, log, last=True)


def best_checkpoint(run: Path) -> Path | None:
    """Return the folder of the best checkpoint, None where no evaluation worked."""
    evaluations = evaluations_of(run)
    return run / "checkpoints" / Path(best_of(evaluations).checkpoint).name if evaluations else None


def note_few_prompts(config: TrainConfig, target: Target) -> str | None:
    """Return a sentence where the user's own data give fewer held-out prompts than evaluations
    want. Raises ValueError, before the first step, where they give none."""
    wanted = config.evaluation.prompts
    if not wanted or config.data.source in ("embedded", "stdlib"):  # the library has thousands
        return None
    there = evaluation_prompts(
        config.data, target.tokenizer, wanted, config.evaluation.max_prompt_tokens
    )
    return few_prompts(len(there), wanted)


def parts_to_decode(config: TrainConfig, target: Target, last: bool) -> list[PromptSet]:
    """Return the prompts of an evaluation, all processes' together: of the last checkpoint all
    parts, of others a quarter of the first."""
    options = config.evaluation
    outside = options.external_prompts if last else 0
    prompts = evaluation_prompts(
        config.data, target.tokenizer, options.prompts, options.max_prompt_tokens, outside
    )
    parts = parts_of(prompts, options)
    return parts if last else [brief(parts[0])]


def decode_share(
    target: Target, drafter: Drafter, parts: list[PromptSet], config: TrainConfig, what: str
) -> list[list[Measured]]:
    """Decode this process's share of the prompts of every part with every method."""
    rank = dist.get_rank()
    world = dist.get_world_size()
    # a pass through a sharded target takes all processes: all decode everything, in step
    if not config.target.shard:
        mine = slice(rank, None, world)
        parts = [
            replace(part, prompts=part.prompts[mine], numbers=part.numbers[mine]) for part in parts
        ]
    progress = Progress(what, "prompts", quiet=rank > 0, minutes=parts[0].config.max_minutes)

    def onwards(done: int, total: int) -> None:
        HEARTBEAT.at(what)  # in the other processes, too: they are not stalled
        progress(done, total)

    return decode_all(target, drafter, parts, onwards)


def write_evaluation(
    folder: Path,
    target: Target,
    drafter: Drafter,
    parts: list[PromptSet],
    shares: list,
    log: RunLog,
) -> None:
    """Join what the processes measured of a checkpoint, write it, and print it in a line; in a
    second one, that outputs are wrong."""
    measured = [join(of_part) for of_part in zip(*shares, strict=True)]
    result = summarise(target, drafter, parts, measured)
    result = replace(result, step=step_of(folder), checkpoint=str(folder), drafter=log.name)
    write_result(folder / "evaluation" / "evaluation.json", result)
    log.summary(result)
    taus = ", ".join(f"{m.label} τ {m.tau:.2f} ({m.speedup:.2f}x)" for m in result.drafting)
    log.say(f"step {result.step}: {taus}")
    if is_wrong(result):
        log.say(
            f"!!! NOT LOSSLESS at step {result.step}: greedy outputs differ from plain decoding's in float32, which is "
            f"a defect of this program or machine, not of the drafter: see {folder}/evaluation/evaluation.json"
        )


def is_wrong(result: Evaluation) -> bool:
    """Return whether outputs differ where rounding cannot be the cause."""
    return result.temperature == 0 and result.dtype == "float32" and not result.same_output


def describe_error(error: BaseException) -> str:
    """Return an error's kind and first line, and below it the traceback, without secrets."""
    first = str(error).strip().partition("\n")[0]
    return redact_text(
        f"{type(error).__name__}: {first}\n\n{''.join(traceback.format_exception(error))}"
    )


def write_failure(out: Path, problems: list[str], log: RunLog) -> None:
    """Write down why there is no evaluation."""
    (out / "evaluation.json").unlink(missing_ok=True)
    atomic_write(out / "failed.txt", "\n".join(problems))
    log.say(
        f"evaluating step {step_of(out.parent)} failed, training goes on: {problems[0].splitlines()[0]}"
    )


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
    """Mark the best checkpoint and write the report; return its page, None if nothing was
    evaluated."""
    best = best_checkpoint(run)
    if best is None:
        return None
    mark_best(run, best)
    evaluations = evaluations_of(run)
    lines = read_log(run)
    config = translate_saved_config(json.loads((run / "config.json").read_text()))
    tokens = config["optim"]["batch_size"] * config["data"]["length"]
    facts = RunFacts(
        command=command_line(),
        config=config,
        data=" ".join(
            str(config["data"][key]) for key in ("source", "path") if config["data"][key]
        ),
        losses=[(line["step"], line["loss"]) for line in lines if line["loss"] is not None],
        seconds=sum(tokens / line["tokens_per_second"] for line in lines) if lines else None,
    )
    notes = [*failures_of(run), *filter(None, [too_few(evaluations)])]
    return write_report(run / "report", evaluations, notes, facts)


def finish_report(run: Path, log: RunLog) -> None:
    """Print the best checkpoint's table and where everything is. Raises Stopped if outputs were
    wrong."""
    with disk(str(run / "report")):
        page = update_report(run)
    log.close(page)
    for line in failures_of(run):
        print(line)
    if page is None:
        for folder in checkpoints(run)[-1:]:
            print(f"No checkpoint was evaluated.\ndrafter     {folder / 'drafter'}", flush=True)
        return
    evaluations = evaluations_of(run)
    best = best_of(evaluations)
    print(f"\n{why}" if (why := too_few(evaluations)) else "")
    print(
        f"Best checkpoint: step {best.step}, greedy on {best.prompts} held-out prompts, {best.device}\n"
    )
    print(f"{method_table(best)}\n\n{headline(best)}")
    for part in (best, *(best.beside or ())):
        if part.cut:
            print(f"{part.what or 'held-out prompts'}: {part.cut}")
    print(f"\nreport      {page} (also other texts, sampling, what trees gain)")
    print(f"drafter     {run / 'checkpoints' / 'best' / 'drafter'}")
    print(f"metrics     {run / 'metrics.jsonl'}", flush=True)
    wrong = [str(result.step) for result in evaluations if is_wrong(result)]
    if wrong:
        raise Stopped(
            f"greedy outputs differ from plain decoding's in float32 (step {', '.join(wrong)}): a defect, see "
            f"evaluation.json there and {page}"
        )
