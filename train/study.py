"""The `study` command: train variants of a run for the same time, and compare their drafters on the
same texts.

A variant is the base configuration with some options changed; each of its runs is an ordinary
training run. The texts are the target's greedy answers to held-out prompts. How many tokens a
drafter commits per round on them is computed exactly by replay (infer/evaluation/replay.py).
"""

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

from infer.utils.checks import require_at_least
from infer.utils.errors import RunAborted, explain_interrupt, report_errors_and_exit
from infer.utils.files import atomic_write, write_json
from infer.utils.hydra_app import compose_options
from infer.utils.progress import HEARTBEAT
from train.config import TrainConfig

if TYPE_CHECKING:
    from infer.drafters.base import Drafter

STUDY_METHODS = ("chain", "ddtree")  # names in infer.trees.methods.TREES
STUDY_NODE_BUDGET = 16
STUDY_TABLE_COLUMNS = (
    "",
    "variant",
    "seeds",
    "steps",
    "chain τ",
    "tokens/s",
    f"{STUDY_NODE_BUDGET} nodes τ",
    "tokens/s",
    "to the base",
)
STUDY_TEXTS_FILE = "texts.json"  # the texts, and the base options that they depend on
STUDY_RESULT_FILE = "study.json"  # in the folder of each run
NUM_TIMED_PROMPTS = 4  # decoded to measure the duration of a round
MAX_RUN_NAME_CHARACTERS = 150  # of a run's name, without the seed


@dataclass
class StudyCommand:
    """Train variants of one run and compare their drafters. The same command resumes a study that
    was stopped, and adds new variants and seeds.

    base: options of every run; its target, data and evaluation decide which prompts are used for
        the comparison
    variants: what each run changes, as options separated by spaces; "" is the base itself
    seeds: number of runs per variant, with seeds 0, 1, 2, ...
    out: folder of the runs, the table and the figure
    """

    base: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=lambda: [""])
    seeds: int = 1
    out: str = "runs/study"

    def check(self) -> None:
        """Raise ValueError for a variant that cannot be trained, and if `out` holds a study with
        another base."""
        require_at_least(self, seeds=1)
        texts_file = Path(self.out, STUDY_TEXTS_FILE)
        if texts_file.exists():
            existing_base = json.loads(texts_file.read_text())["base"]
            if existing_base != self.base:
                raise ValueError(
                    f"out={self.out} has a study of another base, {existing_base}: choose another "
                    "out="
                )
        for variant in self.variants:
            self.compose_run(variant, 0)

    def compose_run(self, variant: str, seed: int) -> TrainConfig:
        """Return the configuration of a variant's run, without evaluations. Raises ValueError,
        naming the variant, for options that contradict each other."""
        name = re.sub(r"[^\w.,+-]+", "_", variant or "base")[:MAX_RUN_NAME_CHARACTERS]
        run_options = [
            f"seed={seed}",
            f"name={name}-{seed}",
            f"runs_dir={self.out}",
            "checkpoints=1",
            "evaluation.prompts=0",
            # so that other programs take no training time from a variant
            "optim.clock=processor",
        ]
        overrides = [*self.base, *shlex.split(variant), *run_options]
        try:
            return compose_options("train", TrainConfig, overrides)
        except ValueError as error:
            raise ValueError(f"variants: {variant or 'the base'}: {error}") from error


def run_study(config: StudyCommand) -> None:
    """Train and measure the runs that do not exist yet, time one run of each variant, and write
    table and picture."""
    evaluator = None
    results: dict[str, list[dict]] = {}
    timed_runs: dict[str, Path] = {}
    with explain_interrupt("the same command continues from there"):
        # all variants of one seed are trained in turn, under similar conditions
        for seed, variant in product(range(config.seeds), config.variants):
            run = config.compose_run(variant, seed)
            folder = Path(run.runs_dir, run.name)
            timed_runs.setdefault(variant, folder)
            result_file = folder / STUDY_RESULT_FILE
            if not result_file.exists():
                train_in_subprocess(run)
                if evaluator is None:
                    evaluator = DrafterComparison(config)
                write_json(result_file, evaluator.replay_run(folder))
            results.setdefault(variant, []).append(json.loads(result_file.read_text()))
        if evaluator is None:
            evaluator = DrafterComparison(config)
        round_seconds = evaluator.time_rounds(timed_runs)
    write_study_table(results, round_seconds, Path(config.out))


def train_and_exit(run: TrainConfig) -> None:
    """Train in this process and end it."""
    from train.main import leave_process

    with leave_process(), report_errors_and_exit():
        from train.loop import train

        train(run)


def train_in_subprocess(run: TrainConfig) -> None:
    """Train in a new process, so that all its memory is freed at the end. Raises Stopped if it
    fails."""
    from multiprocessing import get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["train.loop"])
    process = context.Process(target=train_and_exit, args=(run,))
    process.start()
    HEARTBEAT.set_activity(None)  # the new process reports its own progress
    try:
        process.join()
    finally:
        process.join()  # after Ctrl-C the process saves before it ends
    if process.exitcode:
        raise RunAborted(
            f"{run.name} ended with exit code {process.exitcode}; its error is printed above"
        )


class DrafterComparison:
    """Measures drafters on the target's greedy answers to held-out prompts."""

    def __init__(self, config: StudyCommand) -> None:
        """Load the target, and generate the answers unless the study has them."""
        from data.prompts import select_evaluation_prompts
        from infer.api import decode_prompts
        from infer.cli.models import load_target_and_drafter
        from infer.config import DecodeOptions
        from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS

        base = compose_options("train", TrainConfig, config.base)
        options = base.evaluation
        self.quantization = base.target.quantization
        self.target, _ = load_target_and_drafter(base.target, None)
        self.baseline_options = DecodeOptions(
            max_new_tokens=options.max_new_tokens,
            method="plain",
            loop_period=MAX_LOOP_PERIOD_TOKENS,
            max_num_batched_tokens=None,
        )
        texts_file = Path(config.out, STUDY_TEXTS_FILE)
        if not texts_file.exists():
            prompts = select_evaluation_prompts(
                base.data, self.target.tokenizer, options.prompts, options.prompt_tokens
            )
            prompt_ids = [prompt.ids for prompt in prompts]
            answers = decode_prompts(self.target, None, prompt_ids, self.baseline_options)
            texts = [(answer.prompt, answer.ids) for answer in answers if len(answer.ids) > 1]
            write_json(texts_file, {"base": list(config.base), "texts": texts})
        # (prompt ids, answer ids) of each text
        self.texts = json.loads(texts_file.read_text())["texts"]

    def replay_run(self, run: Path) -> dict:
        """Return the tokens that the run's final drafter commits on each text, round by round, for
        each of STUDY_METHODS."""
        from infer.evaluation.replay import ReplayVariant, replay_sequences
        from infer.formats.checkpoint import load_drafter
        from train.run.checkpoints import list_checkpoints, parse_step

        checkpoint = list_checkpoints(run)[-1]
        target = self.target
        drafter = cast(
            "Drafter", load_drafter(checkpoint, dtype=target.dtype, device=target.device)
        )
        orders = [
            ReplayVariant("chain", drafter.block_size - 1),
            ReplayVariant("ddtree", STUDY_NODE_BUDGET),
        ]
        replayed_texts = replay_sequences(target, drafter, self.texts, orders)
        commits = {}
        for order in orders:
            commits[order.method] = [text.commits[order] for text in replayed_texts]
        return {"steps": parse_step(checkpoint), "commits": commits}

    def time_rounds(self, runs: dict[str, Path]) -> dict[tuple[str, str], float]:
        """Return the seconds of a round by (variant, method), including a share of the prefill.

        runs: one run of each variant. As in `eval`, their drafters have the target's quantization.
        All variants decode the same prompts in turn.
        """
        from infer.evaluation.measurement import DecodingVariant, measure_variants
        from infer.formats.checkpoint import load_drafter
        from train.run.checkpoints import list_checkpoints

        options = replace(self.baseline_options, budget=STUDY_NODE_BUDGET, ngrams="none")
        variants = []
        for name, run in runs.items():
            loaded = load_drafter(
                list_checkpoints(run)[-1],
                self.target.dtype,
                self.target.device,
                quantization=self.quantization,
            )
            drafter = cast("Drafter", loaded)
            for method in STUDY_METHODS:
                method_options = replace(options, method=method)
                variants.append(DecodingVariant(name, STUDY_NODE_BUDGET, method_options, drafter))
        prompts = [prompt for prompt, _ in self.texts[:NUM_TIMED_PROMPTS]]
        measurements = measure_variants(self.target, None, variants, prompts)

        round_seconds = {}
        for variant, measured in zip(variants, measurements, strict=True):
            num_rounds = sum(text.rounds for text in measured.prompt_results)
            round_seconds[variant.name, variant.options.method] = measured.seconds / num_rounds
        return round_seconds


def write_study_table(
    results: dict[str, list[dict]], round_seconds: dict[tuple[str, str], float], out: Path
) -> None:
    """Print and write a table with one line per variant, the best acceptance length of trees first,
    and write a picture.

    results: for each variant the results of its runs (`DrafterComparison.replay_run`), the base
    first. round_seconds: by (variant, method).
    """
    from infer.evaluation.charts import Chart, ChartLine, render_charts
    from infer.evaluation.tables import format_interval, format_markdown_table
    from infer.trees.methods import TREE_METHODS

    table = []
    base_runs = next(iter(results.values()))
    points: dict[str, list] = {method: [] for method in STUDY_METHODS}
    intervals: dict[str, list] = {method: [] for method in STUDY_METHODS}
    ranking = sorted(results, key=lambda variant: -pool_acceptance(results[variant], "ddtree")[0])
    for rank, variant in enumerate(ranking, 1):
        runs = results[variant]
        mean_steps = sum(run["steps"] for run in runs) // len(runs)
        cells = [str(rank), variant or "the base", str(len(runs)), str(mean_steps)]
        for method in STUDY_METHODS:
            tau, interval = pool_acceptance(runs, method)
            points[method].append((rank, tau))
            intervals[method].append(interval)
            tokens_per_second = tau / round_seconds[variant, method]
            cells += [f"{tau:.3f}{format_interval(interval)}", f"{tokens_per_second:.1f}"]
        ratio, interval = pool_acceptance(runs, "ddtree", base_runs)
        table.append([*cells, f"{ratio:.3f}{format_interval(interval)}"])

    lines = []
    for method in STUDY_METHODS:
        lines.append(
            ChartLine(method, points[method], TREE_METHODS[method].colour, intervals[method])
        )
    chart = Chart("τ by variant", "row of the table", "τ, tokens a round", lines)
    text = format_markdown_table(STUDY_TABLE_COLUMNS, table)
    atomic_write(out / "study.md", f"{text}\n")
    atomic_write(out / "study.svg", render_charts([chart]))
    print(f"{text}\n\ntable    {out / 'study.md'}\npicture  {out / 'study.svg'}")


def pool_acceptance(
    runs: list[dict], method: str, base_runs: list[dict] | None = None
) -> tuple[float, list[float] | None]:
    """Return the acceptance length of all runs together and its confidence interval over texts, or
    its ratio to that of `base_runs`."""
    import numpy as np

    from infer.evaluation.metrics import acceptance_length, count_tokens_and_rounds

    counts = []
    for group in (runs, base_runs):
        if group is not None:
            run_counts = [count_tokens_and_rounds(run["commits"][method]) for run in group]
            counts.append(np.sum(run_counts, 0))
    return acceptance_length(*counts)
