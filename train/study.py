"""`study`: variants of a run, each trained as long as the others from the same base, and what each
is worth on the same texts.

A variant is the base with some options changed, and a run like any other. Texts are the target's
greedy answers to held-out prompts; what a drafter commits along them is found by replay, exactly
(infer/evaluation/replay.py).
"""

import json
import re
import shlex
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from infer.utils.checks import at_least
from infer.utils.errors import Stopped, errors_in_one_sentence, going_on
from infer.utils.files import atomic_write, write_json
from infer.utils.hydra_app import compose_options
from infer.utils.progress import HEARTBEAT
from train.config import TrainConfig

METHODS = ("chain", "ddtree")  # rows of TREES
NODES = 16  # of a tree
COLUMNS = (
    "",
    "variant",
    "seeds",
    "steps",
    "chain τ",
    "tokens/s",
    f"{NODES} nodes τ",
    "tokens/s",
    "to the base",
)
TEXTS = "texts.json"  # what drafters are measured on, and of which base
TIMED = 4  # prompts that are decoded for the time of a round


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
        """Raise ValueError for a variant that could not be trained, and for the folder of another
        study."""
        at_least(self, seeds=1)
        texts = Path(self.out, TEXTS)
        if texts.exists() and (known := json.loads(texts.read_text())["base"]) != self.base:
            raise ValueError(
                f"out={self.out} has a study of another base, {known}: choose another out="
            )
        for variant in self.variants:
            self.run_of(variant, 0)

    def run_of(self, variant: str, seed: int) -> TrainConfig:
        """Return the configuration of a variant's run, which decodes nothing. Raises ValueError,
        naming the variant, for options that do not go together."""
        name = re.sub(r"[^\w.,+-]+", "_", variant or "base")[:150]
        own = [
            f"seed={seed}",
            f"name={name}-{seed}",
            f"runs_dir={self.out}",
            "checkpoints=1",
            "evaluation.prompts=0",
        ]
        own.append("optim.clock=processor")  # other programs take nothing from any variant
        try:
            return compose_options("train", TrainConfig, [*self.base, *shlex.split(variant), *own])
        except ValueError as error:
            raise ValueError(f"variants: {variant or 'the base'}: {error}") from error


def study(config: StudyCommand) -> None:
    """Train and measure the runs that are new, time one of each variant, and write table and
    picture."""
    ruler = None
    found = {}
    timed = {}
    with going_on("the same command goes on from there"):
        for seed, variant in product(
            range(config.seeds), config.variants
        ):  # a seed's variants share an hour
            run = config.run_of(variant, seed)
            folder = Path(run.runs_dir, run.name)
            timed.setdefault(variant, folder)
            if not (folder / "study.json").exists():
                train_apart(run)
                ruler = ruler or Ruler(config)
                write_json(folder / "study.json", ruler.measure(folder))
            found.setdefault(variant, []).append(json.loads((folder / "study.json").read_text()))
        seconds = (ruler or Ruler(config)).seconds(timed)
    write_table(found, seconds, Path(config.out))


def train_alone(run: TrainConfig) -> None:
    """Train in this process, and end it."""
    from train.main import leave_process

    with leave_process(), errors_in_one_sentence():
        from train.loop import train

        train(run)


def train_apart(run: TrainConfig) -> None:
    """Train in a process of its own, which ends with all that it took. Raises Stopped if it
    failed."""
    from multiprocessing import get_context

    context = get_context("forkserver")
    context.set_forkserver_preload(["train.loop"])
    process = context.Process(target=train_alone, args=(run,))
    process.start()
    HEARTBEAT.at(None)  # that one speaks
    try:
        process.join()
    finally:
        process.join()  # behind Ctrl-C it saves
    if process.exitcode:
        raise Stopped(f"{run.name} ended with exit code {process.exitcode}, as it says above")


class Ruler:
    """The target's greedy answers to held-out prompts."""

    def __init__(self, config: StudyCommand) -> None:
        """Load the target, and let it write the answers unless the study has them."""
        from data.prompts import evaluation_prompts
        from infer.api import decode
        from infer.cli.models import load
        from infer.config import DecodeOptions
        from infer.engine.loops import LONGEST_PERIOD

        base = compose_options("train", TrainConfig, config.base)
        file = Path(config.out, TEXTS)
        options = base.evaluation
        length = base.evaluation.max_new_tokens
        self.quantization, (self.target, _) = base.target.quantization, load(base.target, None)
        self.plain = DecodeOptions(
            max_new_tokens=length,
            method="plain",
            loop_period=LONGEST_PERIOD,
            max_num_batched_tokens=None,
        )
        if not file.exists():
            prompts = evaluation_prompts(
                base.data, self.target.tokenizer, options.prompts, options.prompt_tokens
            )
            answers = decode(self.target, None, [prompt.ids for prompt in prompts], self.plain)
            texts = [(text.prompt, text.ids) for text in answers if len(text.ids) > 1]
            write_json(file, {"base": list(config.base), "texts": texts})
        self.texts = json.loads(file.read_text())["texts"]

    def measure(self, run: Path) -> dict:
        """Return what the drafter that a run ended with commits, text by text and round by round,
        by each of METHODS."""
        from infer.evaluation.replay import Order, replay
        from infer.formats.checkpoint import load_drafter
        from train.run.checkpoints import checkpoints, step_of

        last = checkpoints(run)[-1]
        drafter = load_drafter(last, dtype=self.target.dtype, device=self.target.device)
        orders = [Order("chain", drafter.block_size - 1), Order("ddtree", NODES)]
        texts = replay(self.target, drafter, self.texts, orders)
        commits = {order.method: [text.commits[order] for text in texts] for order in orders}
        return {"steps": step_of(last), "commits": commits}

    def seconds(self, runs: dict[str, Path]) -> dict[tuple[str, str], float]:
        """Return what a round takes by (variant, method), in seconds, the prompt's share included.
        The runs' drafters have the target's quantization, as in `eval`, and take turns on the same
        prompts."""
        from infer.evaluation.measuring import Variant, measure
        from infer.formats.checkpoint import load_drafter
        from train.run.checkpoints import checkpoints

        options = replace(self.plain, budget=NODES, ngrams="none")
        ways = []
        place = self.target.dtype, self.target.device
        for name, run in runs.items():
            drafter = load_drafter(checkpoints(run)[-1], *place, quantization=self.quantization)
            ways += [
                Variant(name, NODES, replace(options, method=method), drafter) for method in METHODS
            ]
        found = measure(self.target, None, ways, [prompt for prompt, _ in self.texts[:TIMED]])
        took = [one.seconds / sum(text.rounds for text in one.prompts) for one in found]
        return {
            (way.name, way.options.method): seconds for way, seconds in zip(ways, took, strict=True)
        }


def write_table(
    found: dict[str, list[dict]], seconds: dict[tuple[str, str], float], out: Path
) -> None:
    """Print a row a variant, the best trees first, and write it beside a picture. found: what the
    runs of each variant came to, the base's first; seconds: what a round took, by (variant,
    method)."""
    from infer.evaluation.charts import Chart, Line, picture
    from infer.evaluation.tables import markdown, span
    from infer.trees.methods import TREES

    rows = []
    base = next(iter(found.values()))
    lines = {method: Line(method, [], TREES[method].colour, []) for method in METHODS}
    ranks = sorted(found.items(), key=lambda pair: -figure(pair[1], "ddtree")[0])
    for number, (variant, runs) in enumerate(ranks, 1):
        steps = sum(run["steps"] for run in runs) // len(runs)
        cells = [str(number), variant or "the base", str(len(runs)), str(steps)]
        for method in METHODS:
            tau, interval = figure(runs, method)
            lines[method].points.append((number, tau))
            lines[method].intervals.append(interval)
            cells += [f"{tau:.3f}{span(interval)}", f"{tau / seconds[variant, method]:.1f}"]
        ratio, interval = figure(runs, "ddtree", base)
        rows.append([*cells, f"{ratio:.3f}{span(interval)}"])
    chart = Chart("τ by variant", "row of the table", "τ, tokens a round", list(lines.values()))
    text = markdown(COLUMNS, rows)
    atomic_write(out / "study.md", f"{text}\n")
    atomic_write(out / "study.svg", picture([chart]))
    print(f"{text}\n\ntable    {out / 'study.md'}\npicture  {out / 'study.svg'}")


def figure(
    runs: list[dict], method: str, base: list[dict] | None = None
) -> tuple[float, list[float] | None]:
    """Return the acceptance length of a variant's runs together, or its ratio to the base's, and
    the interval over texts."""
    import numpy as np

    from infer.evaluation.ruler import acceptance_length, counted

    sides = (
        [counted(run["commits"][method]) for run in side]
        for side in (runs, base)
        if side is not None
    )
    return acceptance_length(*(np.sum(side, 0) for side in sides))
