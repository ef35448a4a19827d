"""Evaluate checkpoints during training: decode held-out prompts with the saved drafter, write the
results and the report, and link the best checkpoint.

An evaluation that fails, for example because memory ran out, does not end the training. The reason
is written to evaluation/failed.txt and to the report. If the training command is run again, it
evaluates the newest checkpoint again.

If outputs differ from baseline decoding, the evaluation does not count as failed. A message reports
the difference at once, and the results are kept.
"""

import json
import statistics
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist

from data.prompts import describe_prompt_shortage, select_evaluation_prompts
from infer.drafters.base import Drafter
from infer.evaluation.evaluate import (
    build_prompt_sets,
    measure_prompt_sets,
    subsample_prompt_set,
    summarise_evaluation,
)
from infer.evaluation.measurement import PromptSet, VariantMeasurement, merge_measurements
from infer.evaluation.metrics import describe_too_few_prompts, select_best_checkpoint
from infer.evaluation.report import RunDescription, write_report
from infer.evaluation.results import Evaluation, read_result, write_result
from infer.evaluation.tables import format_findings, format_method_table
from infer.formats.checkpoint import load_drafter
from infer.targets.target import Target
from infer.utils.errors import RunAborted, abort_on_write_error, redacted_command_line
from infer.utils.files import atomic_write
from infer.utils.progress import HEARTBEAT, Progress
from infer.utils.redact import redact_text
from infer.utils.renamed_options import rename_old_options
from train.config import TrainConfig
from train.processes import run_on_first_process
from train.run.checkpoints import link_best_checkpoint, list_checkpoints, parse_step
from train.run.log import RunLog, read_step_metrics
from train.run.state import RunState

EVALUATION_FAILURE_FILE = "failed.txt"
FIRST_BATCHES_FOR_TAU = 10


def evaluate_checkpoint(
    run: RunState, folder: Path, log: RunLog, use_all_prompt_sets: bool
) -> None:
    """Decode held-out prompts with a checkpoint's saved drafter, and write the results.

    folder: the checkpoint's folder. use_all_prompt_sets: if true, all prompt sets are evaluated. If
    false, only a part of the first prompt set is evaluated, and the run's report is updated.

    All processes must call this function together. Each process decodes a share of the prompts, and
    the first process writes the results.
    """
    start_time = time.monotonic()
    target = drafter = prompt_sets = measured = error_text = None
    try:
        target = run.load_decoding_target()
        drafter = cast(Drafter, load_drafter(folder, dtype=target.dtype, device=target.device))
        prompt_sets = select_prompt_sets(run.config, target, use_all_prompt_sets)
        measured = decode_prompt_share(
            target, drafter, prompt_sets, run.config, f"evaluating step {parse_step(folder)}"
        )
    except Exception as error:  # noqa: BLE001
        error_text = format_redacted_traceback(error)
        torch.cuda.empty_cache()  # the evaluation may have run out of memory; training needs it
    gathered: list = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, (measured, error_text))
    errors = [error for _, error in gathered if error]
    shares = [share for share, _ in gathered]
    if run.config.target.shard:
        shares = shares[:1]  # with a sharded target, each process decoded all prompts

    def write_results() -> None:
        out = folder / "evaluation"
        with abort_on_write_error(str(out)):
            out.mkdir(exist_ok=True)
            try:
                if errors:
                    write_evaluation_failure(out, errors, log)
                else:
                    assert target is not None
                    assert drafter is not None
                    assert prompt_sets is not None
                    merge_and_write_evaluation(folder, target, drafter, prompt_sets, shares, log)
                    (out / EVALUATION_FAILURE_FILE).unlink(missing_ok=True)
                if (
                    not use_all_prompt_sets
                ):  # after the last evaluation, `write_and_print_final_report` updates the report
                    update_best_link_and_report(run.folder)
            except OSError:
                raise  # `abort_on_write_error` converts write errors to RunAborted
            except Exception as error:  # noqa: BLE001
                write_evaluation_failure(out, [format_redacted_traceback(error)], log)

    run_on_first_process(write_results)
    # The progress line shows the time per training step, which must not include this evaluation.
    log.progress.start_time += time.monotonic() - start_time


def evaluate_best_checkpoint_fully(run: RunState, log: RunLog) -> None:
    """Evaluate the best checkpoint on all prompt sets, unless this was already done.

    The run's last checkpoint has already been evaluated on all prompt sets. If these results show
    that another checkpoint is better than the one that was evaluated, that checkpoint is evaluated
    on all prompt sets as well. The report, the model card and the `doctor` command use the results.
    """
    fully_evaluated = {list_checkpoints(run.folder)[-1].name}
    while True:
        best = run_on_first_process(lambda: find_best_checkpoint(run.folder))
        if best is None or best.name in fully_evaluated:
            return
        fully_evaluated.add(best.name)
        evaluate_checkpoint(run, best, log, use_all_prompt_sets=True)


def find_best_checkpoint(run: Path) -> Path | None:
    """Return the folder of the run's best checkpoint by its evaluation (`select_best_checkpoint`).
    Return None if no evaluation succeeded."""
    evaluations = read_evaluations(run)
    if not evaluations:
        return None
    checkpoint = select_best_checkpoint(evaluations).checkpoint
    assert checkpoint is not None
    return run / "checkpoints" / Path(checkpoint).name


def describe_held_out_prompt_shortage(config: TrainConfig, target: Target) -> str | None:
    """Return a warning for the user if the data have fewer held-out prompts than the option
    evaluation.prompts requests, else None.

    Raises ValueError if the data have no held-out prompt.
    """
    num_prompts = config.evaluation.prompts
    # These two data sources have thousands of held-out prompts, which is always enough.
    if not num_prompts or config.data.source in ("embedded", "stdlib"):
        return None
    assert target.tokenizer is not None
    prompts = select_evaluation_prompts(
        config.data, target.tokenizer, num_prompts, config.evaluation.max_prompt_tokens
    )
    return describe_prompt_shortage(len(prompts), num_prompts)


def select_prompt_sets(
    config: TrainConfig, target: Target, use_all_prompt_sets: bool
) -> list[PromptSet]:
    """Return the prompt sets on which a checkpoint is evaluated. They are not yet divided among
    the processes.

    use_all_prompt_sets: if true, all prompt sets are returned. If false, only the first prompt set
    is returned, with fewer prompts.
    """
    options = config.evaluation
    outside = options.external_prompts if use_all_prompt_sets else 0
    assert target.tokenizer is not None
    prompts = select_evaluation_prompts(
        config.data, target.tokenizer, options.prompts, options.max_prompt_tokens, outside
    )
    prompt_sets = build_prompt_sets(prompts, options)
    return prompt_sets if use_all_prompt_sets else [subsample_prompt_set(prompt_sets[0])]


def decode_prompt_share(
    target: Target,
    drafter: Drafter,
    prompt_sets: list[PromptSet],
    config: TrainConfig,
    activity: str,
) -> list[list[VariantMeasurement]]:
    """Decode this process's share of every prompt set with every decoding method.

    activity: text of the progress line, for example 'evaluating step 300'. Returns one list per
    prompt set, which contains one measurement per decoding method.
    """
    rank = dist.get_rank()
    # With a sharded target, each process decodes all prompts, because every forward pass of the
    # target needs all processes.
    if not config.target.shard:
        share = slice(rank, None, dist.get_world_size())
        prompt_sets = [
            replace(
                prompt_set,
                prompts=prompt_set.prompts[share],
                prompt_numbers=prompt_set.prompt_numbers[share],
            )
            for prompt_set in prompt_sets
        ]
    progress = Progress(
        activity, "prompts", quiet=rank > 0, minutes=prompt_sets[0].config.max_minutes
    )

    def report_progress(done: int, total: int) -> None:
        # The watchdog of each process ends the process if no progress is reported for too long.
        HEARTBEAT.set_activity(activity)
        progress(done, total)

    return measure_prompt_sets(target, drafter, prompt_sets, report_progress)


def merge_and_write_evaluation(
    folder: Path,
    target: Target,
    drafter: Drafter,
    prompt_sets: list[PromptSet],
    measurements_by_process: list[list[list[VariantMeasurement]]],
    log: RunLog,
) -> None:
    """Merge the measurements of all processes, write them to the checkpoint's evaluation.json, and
    print one line with the results. Print a second line if outputs differ from baseline decoding.

    folder: the checkpoint's folder. measurements_by_process: for each process, its result of
    `decode_prompt_share`.
    """
    measured = [
        merge_measurements(set_shares) for set_shares in zip(*measurements_by_process, strict=True)
    ]
    result = summarise_evaluation(target, drafter, prompt_sets, measured)
    result = replace(result, step=parse_step(folder), checkpoint=str(folder), drafter=log.name)
    write_result(folder / "evaluation" / "evaluation.json", result)
    log.log_evaluation_to_wandb(result)
    taus = ", ".join(f"{m.label} τ {m.tau:.2f} ({m.speedup:.2f}x)" for m in result.drafting_methods)
    log.print_line(f"step {result.step}: {taus}")
    if breaks_losslessness(result):
        log.print_line(
            f"!!! NOT LOSSLESS at step {result.step}: greedy outputs differ from baseline "
            "decoding in float32. This is a bug of this program or a fault of the machine, not "
            f"of the drafter. See {folder}/evaluation/evaluation.json"
        )


def breaks_losslessness(result: Evaluation) -> bool:
    """Return whether greedy float32 outputs differ from those of baseline decoding. Rounding cannot
    explain such a difference, so it is a bug. Return False for other temperatures and dtypes."""
    return result.temperature == 0 and result.dtype == "float32" and not result.same_output


def format_redacted_traceback(error: BaseException) -> str:
    """Return an error's type and first line, an empty line, and the traceback, without secrets."""
    first_line = str(error).strip().partition("\n")[0]
    stack_trace = "".join(traceback.format_exception(error))
    return redact_text(f"{type(error).__name__}: {first_line}\n\n{stack_trace}")


def write_evaluation_failure(out: Path, errors: list[str], log: RunLog) -> None:
    """Record that an evaluation failed: write the errors to failed.txt, print the first one, and
    remove older results.

    out: the folder <checkpoint>/evaluation. errors: texts from `format_redacted_traceback`, one per
    failed process.
    """
    (out / "evaluation.json").unlink(missing_ok=True)
    atomic_write(out / EVALUATION_FAILURE_FILE, "\n".join(errors))
    log.print_line(
        f"The evaluation at step {parse_step(out.parent)} failed, and training continues. The "
        f"error is {errors[0].splitlines()[0]}"
    )


def describe_failed_evaluations(run: Path) -> list[str]:
    """Return one sentence for every failed evaluation, sorted by step."""
    sentences = []
    for folder in list_checkpoints(run):
        file = folder / "evaluation" / EVALUATION_FAILURE_FILE
        if file.exists():
            reason = file.read_text().splitlines()[0]
            sentences.append(f"The evaluation at step {parse_step(folder)} failed: {reason}")
    return sentences


def read_evaluations(run: Path) -> list[Evaluation]:
    """Read the results of all successful evaluations of a run, sorted by step."""
    files = [folder / "evaluation" / "evaluation.json" for folder in list_checkpoints(run)]
    return [read_result(file, Evaluation) for file in files if file.exists()]


def update_best_link_and_report(run: Path) -> Path | None:
    """Update the link to the best checkpoint, and write the run's report. Return the path of the
    report's HTML page, or None if no evaluation succeeded."""
    best = find_best_checkpoint(run)
    if best is None:
        return None
    link_best_checkpoint(run, best)

    evaluations = read_evaluations(run)
    lines = read_step_metrics(run)
    config = rename_old_options(json.loads((run / "config.json").read_text()))
    tokens_per_step = config["optim"]["batch_size"] * config["data"]["length"]
    seconds = None
    if lines:
        seconds = sum(tokens_per_step / line["tokens_per_second"] for line in lines)
    data_values = [config["data"][key] for key in ("source", "path")]
    facts = RunDescription(
        command=redacted_command_line(),
        config=config,
        data=" ".join(str(value) for value in data_values if value),
        losses=[(line["step"], line["loss"]) for line in lines if line["loss"] is not None],
        seconds=seconds,
    )
    notes = describe_failed_evaluations(run)
    if too_few_prompts := describe_too_few_prompts(evaluations):
        notes.append(too_few_prompts)
    return write_report(run / "report", evaluations, notes, facts)


def write_and_print_final_report(run: Path, log: RunLog) -> None:
    """Write the final report, and print the best checkpoint's results and the paths of all results.
    Raises RunAborted if greedy float32 outputs differed from baseline decoding."""
    with abort_on_write_error(str(run / "report")):
        page = update_best_link_and_report(run)
    log.finish_wandb_run(page)
    for line in describe_failed_evaluations(run):
        print(line)
    if page is None:
        for folder in list_checkpoints(run)[-1:]:
            print(f"No checkpoint was evaluated.\ndrafter     {folder / 'drafter'}", flush=True)
        return

    evaluations = read_evaluations(run)
    print_best_result(evaluations, read_step_metrics(run))
    print(
        f"\nreport      {page} (also shows the results on the other prompt sets and with sampling, "
        "and the speedup of draft trees)"
    )
    print(f"drafter     {run / 'checkpoints' / 'best' / 'drafter'}")
    print(f"metrics     {run / 'metrics.jsonl'}", flush=True)
    wrong_steps = [str(result.step) for result in evaluations if breaks_losslessness(result)]
    if wrong_steps:
        raise RunAborted(
            "greedy outputs differ from baseline decoding in float32 (step "
            f"{', '.join(wrong_steps)}). This is a bug of this program or a fault of the machine. "
            f"See evaluation.json of these checkpoints and {page}, and report the bug"
        )


def describe_first_batches(step_metrics: list[dict]) -> str:
    """Return a sentence with the τ of the drafter on its first training batches, followed by a
    space. Return "" if no step was logged."""
    first_lines = step_metrics[:FIRST_BATCHES_FOR_TAU]
    if not first_lines:
        return ""
    tau = statistics.mean(line["prefix"] for line in first_lines)
    return (
        f"In the first {len(first_lines)} steps of training, the drafter's τ with a chain was "
        f"{tau:.2f} tokens per pass of the target (1.00: no draft is accepted). After training: "
    )


def print_best_result(evaluations: list[Evaluation], step_metrics: list[dict]) -> None:
    """Print a table of the best checkpoint's results, a paragraph that explains them, and notes
    about too few prompts and about prompt sets that reached their time limit.

    step_metrics: the lines of metrics.jsonl
    """
    best = select_best_checkpoint(evaluations)
    too_few_prompts = describe_too_few_prompts(evaluations)
    print(f"\n{too_few_prompts}" if too_few_prompts else "")
    print(
        f"Best checkpoint: step {best.step} (measured with greedy decoding of {best.prompts} "
        f"held-out prompts on {best.device})\n"
    )
    findings = describe_first_batches(step_metrics) + format_findings(best)
    print(f"{format_method_table(best)}\n\n{findings}")
    for result in (best, *(best.other_evaluations or ())):
        if result.time_limit_note:
            print(f"{result.prompt_set_name or 'held-out prompts'}: {result.time_limit_note}")
