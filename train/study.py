"""The `study` command: train several variants of a configuration for the same time, and compare the
trained drafters on the same texts.

A variant is the base configuration with some options changed. Each variant is trained once per
seed, in an ordinary training run. The texts are the target's greedy answers to held-out prompts.
For each drafter, infer/evaluation/replay.py computes how many tokens per round decoding would
commit if these texts were decoded with the drafter.
"""

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, cast

from infer.utils.checks import require_at_least
from infer.utils.errors import RunAborted, report_errors_and_exit, set_interrupt_message
from infer.utils.files import atomic_write, write_json
from infer.utils.hydra_app import compose_checked_options
from infer.utils.progress import HEARTBEAT
from train.config import TrainConfig

if TYPE_CHECKING:
    from infer.drafters.base import Drafter

STUDY_METHODS = ("chain", "ddtree")  # decoding methods, named as in infer.trees.methods
STUDY_NODE_BUDGET = 16
# Column titles. τ is the acceptance length. The last column is the ratio of two acceptance lengths
# with trees: that of the variant, divided by that of the base configuration.
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
# in the study's folder: the texts on which drafters are compared, and the base configuration
STUDY_TEXTS_FILE = "texts.json"
# in the folder of each run: the result of `DrafterMeasurer.replay_last_checkpoint`
STUDY_RESULT_FILE = "study.json"
NUM_TIMED_PROMPTS = 4  # number of prompts that are decoded to measure the duration of a round
MAX_VARIANT_NAME_CHARACTERS = 150  # maximum length of a run's name without the seed


@dataclass
class StudyCommand:
    """Train several variants of a base configuration and compare their drafters. If the command is
    run again, it continues a study that was stopped, and adds new variants and seeds.

    base: options of the base configuration, which all runs have. The options for target, data and
        evaluation decide on which prompts the drafters are compared
    variants: for each variant, the options that it changes, separated by spaces. "" is the base
        configuration itself
    seeds: number of runs per variant, with the seeds 0, 1, 2, ...
    out: folder of the runs, the table and the figure
    """

    base: list[str] = field(default_factory=list)
    variants: list[str] = field(default_factory=lambda: [""])
    seeds: int = 1
    out: str = "runs/study"

    def check(self) -> None:
        """Raise ValueError if the options of a variant are invalid, or if the folder `out` has a
        study with another base configuration."""
        require_at_least(self, seeds=1)
        texts_file = Path(self.out, STUDY_TEXTS_FILE)
        if texts_file.exists():
            existing_base = json.loads(texts_file.read_text())["base"]
            if existing_base != self.base:
                raise ValueError(
                    f"out={self.out} has a study with another base configuration, "
                    f"base={existing_base}; base={self.base} is given. Choose another folder with "
                    "out="
                )
        for variant in self.variants:
            self.compose_run(variant, 0)

    def compose_run(self, variant: str, seed: int) -> TrainConfig:
        """Return the configuration of the training run of a variant with a seed. The run has no
        evaluations.

        variant: the options that the variant changes, separated by spaces; "" for the base
        configuration. Raises ValueError, naming the variant, if the options are invalid.
        """
        name = re.sub(r"[^\w.,+-]+", "_", variant or "base")[:MAX_VARIANT_NAME_CHARACTERS]
        run_options = [
            f"seed={seed}",
            f"name={name}-{seed}",
            f"runs_dir={self.out}",
            "checkpoints=1",
            "evaluation.prompts=0",
            # Limit the CPU time, not the wall-clock time: other programs on this machine then do
            # not shorten a variant's training.
            "optim.clock=processor",
        ]
        overrides = [*self.base, *shlex.split(variant), *run_options]
        try:
            return compose_checked_options("train", TrainConfig, overrides)
        except ValueError as error:
            raise ValueError(
                f"variants: {f'the variant {variant}' if variant else 'the base configuration'} "
                f"is invalid: {error}"
            ) from error


def run_study(config: StudyCommand) -> None:
    """Run `./launch.sh study`: train and evaluate all runs that have no result yet, time a decoding
    round with one drafter of each variant, and write the table and the figure."""
    evaluator = None
    results: dict[str, list[dict]] = {}
    timed_runs: dict[str, Path] = {}
    with set_interrupt_message("the same command continues from there"):
        # Train all variants with one seed before the next seed, so that slow changes of the
        # machine's speed affect all variants alike.
        for seed, variant in product(range(config.seeds), config.variants):
            run = config.compose_run(variant, seed)
            folder = Path(run.runs_dir, run.name)
            timed_runs.setdefault(variant, folder)
            result_file = folder / STUDY_RESULT_FILE
            if not result_file.exists():
                train_in_subprocess(run)
                if evaluator is None:
                    evaluator = DrafterMeasurer(config)
                write_json(result_file, evaluator.replay_last_checkpoint(folder))
            results.setdefault(variant, []).append(json.loads(result_file.read_text()))
        if evaluator is None:
            evaluator = DrafterMeasurer(config)
        round_seconds = evaluator.time_rounds(timed_runs)
    print_and_write_study_results(results, round_seconds, Path(config.out))


def train_and_exit(run: TrainConfig) -> None:
    """Train a drafter with the configuration `run` in this process, and then end the process."""
    from train.main import exit_without_handlers

    with exit_without_handlers(), report_errors_and_exit():
        from train.loop import train

        train(run)


def train_in_subprocess(run: TrainConfig) -> None:
    """Train a drafter in a new process, so that all memory is freed after the training. Raises
    RunAborted if the training fails."""
    from multiprocessing import get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["train.loop"])
    process = context.Process(target=train_and_exit, args=(run,))
    process.start()
    HEARTBEAT.set_activity(None)  # only the new process reports its progress
    try:
        process.join()
    finally:
        process.join()  # after Ctrl-C, wait until the process has saved its run
    if process.exitcode:
        raise RunAborted(
            f"the training run {run.name} failed with exit code {process.exitcode}; see the error "
            "message above"
        )


class DrafterMeasurer:
    """Measures the tokens per round and the seconds per round of several drafters on the same
    texts. The texts are the target's greedy answers to held-out prompts."""

    def __init__(self, config: StudyCommand) -> None:
        """Load the target. If the study's folder has no texts yet, generate texts with the target
        and write them to this folder."""
        from data.prompts import select_evaluation_prompts
        from infer.api import decode_prompts
        from infer.cli.models import load_target_and_drafter
        from infer.config import DecodeOptions
        from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS

        base = compose_checked_options("train", TrainConfig, config.base)
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
                base.data, self.target.tokenizer, options.prompts, options.max_prompt_tokens
            )
            prompt_ids = [prompt.ids for prompt in prompts]
            answers = decode_prompts(self.target, None, prompt_ids, self.baseline_options)
            texts = [(answer.prompt, answer.ids) for answer in answers if len(answer.ids) > 1]
            write_json(texts_file, {"base": list(config.base), "texts": texts})
        # for each text, a pair: the token ids of the prompt, and the token ids of the answer
        self.texts = json.loads(texts_file.read_text())["texts"]

    def replay_last_checkpoint(self, run: Path) -> dict:
        """Compute how many tokens per round the drafter of a training run would commit if it
        decoded the study's texts.

        run: the folder of the run; its last checkpoint is used.

        The returned dictionary has two keys. The value of "steps" is the number of training steps.
        The value of "commits" is a dictionary: keys are STUDY_METHODS, values are lists with, for
        each text, the numbers of tokens that the prefill and each round commit.
        """
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
        """Measure the duration of a decoding round for each variant and decoding method.

        runs: keys are variants, values are the folder of one training run. The keys of the returned
        dictionary are (variant, method), the values are seconds per round. The time of the prefill
        is included and divided among the rounds.

        The drafters are quantized like the target. All variants and methods decode the same
        prompts, interleaved, so that slow changes of the machine's speed affect all alike.
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


def print_and_write_study_results(
    results: dict[str, list[dict]], round_seconds: dict[tuple[str, str], float], out: Path
) -> None:
    """Print a table with one line per variant, write it to study.md, and write the figure
    study.svg. The variant with the largest acceptance length with trees comes first.

    results: keys are variants, values are the results of their runs, from
        `DrafterMeasurer.replay_last_checkpoint`. All variants are compared with the first one.
    round_seconds: the result of `DrafterMeasurer.time_rounds`.
    out: the folder to write to.
    """
    from infer.evaluation.charts import Chart, ChartLine, render_charts
    from infer.evaluation.tables import format_interval, format_markdown_table
    from infer.trees.methods import TREE_METHODS

    table = []
    base_runs = next(iter(results.values()))
    points: dict[str, list] = {method: [] for method in STUDY_METHODS}
    intervals: dict[str, list] = {method: [] for method in STUDY_METHODS}
    ranking = sorted(
        results, key=lambda variant: -pool_acceptance_length(results[variant], "ddtree")[0]
    )
    for rank, variant in enumerate(ranking, 1):
        runs = results[variant]
        mean_steps = sum(run["steps"] for run in runs) // len(runs)
        cells = [str(rank), variant or "the base", str(len(runs)), str(mean_steps)]
        for method in STUDY_METHODS:
            tau, interval = pool_acceptance_length(runs, method)
            points[method].append((rank, tau))
            intervals[method].append(interval)
            tokens_per_second = tau / round_seconds[variant, method]
            cells += [f"{tau:.3f}{format_interval(interval)}", f"{tokens_per_second:.1f}"]
        ratio, interval = pool_acceptance_length(runs, "ddtree", base_runs)
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


def pool_acceptance_length(
    runs: list[dict], method: str, base_runs: list[dict] | None = None
) -> tuple[float, list[float] | None]:
    """Return the acceptance length over the texts of all runs, and its confidence interval [low,
    high]. The interval is None if there are too few texts to compute it.

    runs: results of `DrafterMeasurer.replay_last_checkpoint`. method: one of STUDY_METHODS. If
    `base_runs` is given, the ratio of the acceptance lengths of `runs` and `base_runs` and the
    confidence interval of this ratio are returned instead.
    """
    import numpy as np

    from infer.evaluation.metrics import compute_acceptance_length_or_ratio, count_tokens_and_rounds

    counts = []
    for group in (runs, base_runs):
        if group is not None:
            run_counts = [count_tokens_and_rounds(run["commits"][method]) for run in group]
            counts.append(np.sum(run_counts, 0))
    return compute_acceptance_length_or_ratio(*counts)
