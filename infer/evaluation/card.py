"""Writes the model card of an exported drafter: README.md with metadata for the Hugging Face hub.

The template card.md.j2 contains the text. All results come from evaluation/evaluation.json of the
checkpoint. Training options come from config.json of the training run, and only those in
RUN_OPTIONS_SHOWN_ON_CARD are shown. Paths, run names and other values are not published.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from infer.drafters.config_keys import ParsedConfig
from infer.evaluation.acceptance import ACCEPTANCE_REFERENCE_FILE_NAME, load_stored_reference
from infer.evaluation.charts import build_budget_charts, render_charts
from infer.evaluation.results import Evaluation, read_result, write_result
from infer.evaluation.tables import format_findings, format_method_table
from infer.evaluation.templates import render_template
from infer.formats.compatibility import check_engines
from infer.formats.folders import find_drafter_folder, open_drafter_folder
from infer.formats.layouts import parse_drafter_config
from infer.utils.files import atomic_write
from infer.utils.renamed_options import rename_old_options

CHART_FILE_NAME = "acceptance.svg"
# Options of a training run that the card shows.
# Key: section of the run's config.json, "" for its top level. Value: options in that section.
RUN_OPTIONS_SHOWN_ON_CARD = {
    "target": ("chat_template_kwargs",),
    "drafter": ("layers", "block_size", "warm_start"),
    "objective": ("divergence", "position_weights", "gamma"),
    "optim": (
        "name",
        "lr",
        "betas",
        "warmup_ratio",
        "max_grad_norm",
        "batch_size",
        "epochs",
        "steps",
        "max_minutes",
        "precision",
    ),
    "data": ("length",),
    "": ("anchors_per_sequence", "anchors_per_document", "seed"),
}
# Key: value of the option data.source. Value: how the card describes the data.
DATA_SOURCE_DESCRIPTIONS = {
    "embedded": "what the target itself wrote after prompts from Python's standard library",
    "stdlib": "source files of Python's standard library",
    "jsonl": "files of the publisher's own",
}
NON_HUB_NAME_SUFFIXES = (".jsonl", ".gz", ".json", ".parquet")


def write_card(checkpoint: str | Path, out: Path, license: str | None, base_model: str) -> Path:
    """Write the model card README.md and its chart into the folder of an exported drafter.

    checkpoint: the checkpoint that was exported. If it was evaluated, the card shows the results
    out: the folder of the exported drafter
    license: the license of the drafter; None means that the card names no license
    base_model: the target's name on the hub. A local path is not shown in the card

    Returns the path of README.md. Raises ValueError if `out` contains no drafter.
    """
    reading = read_exported_config(out)
    # The checkpoint "best" is a link to the folder of a training step, so links are resolved.
    step_folder = find_drafter_folder(checkpoint).resolve()
    if step_folder.name == "drafter":
        step_folder = step_folder.parent
    evaluation = read_evaluation_without_ngrams(step_folder)
    run_config = read_run_config(step_folder)
    reference = load_stored_reference(checkpoint)
    if reference is not None:
        write_result(out / ACCEPTANCE_REFERENCE_FILE_NAME, reference)
    if evaluation is not None:
        atomic_write(out / CHART_FILE_NAME, render_charts(build_budget_charts({"": evaluation})))

    base = parse_hub_name(base_model)
    block_size = reading.config_kwargs["block_size"]
    starts_at_anchor = bool(reading.family_config.get("sample_from_anchor"))
    card = render_template(
        "card.md.j2",
        front_matter=build_front_matter(reading, run_config, license, base),
        reading=reading,
        family=reading.family and reading.family.title,
        base=base,
        drafted=block_size if starts_at_anchor else block_size - 1,
        block_size=block_size,
        evaluation=evaluation,
        headline=evaluation and format_findings(evaluation),
        methods=evaluation and format_method_table(evaluation),
        picture=CHART_FILE_NAME,
        reference=reference,
        reference_file=ACCEPTANCE_REFERENCE_FILE_NAME,
        chat_template_kwargs=json.dumps(reading.config_kwargs.get("chat_template_kwargs", {})),
        run=run_config,
        sources=run_config and "; ".join(dict.fromkeys(describe_data(run_config["data"]))),
        init=run_config and get_public_initial_drafter_name(run_config),
        recipe=run_config and list_training_options(run_config, step_folder),
        engines=" ".join(list_compatible_engines(out)),
        method="dspark"
        if reading.family_config.get("markov_rank")
        else "dflash",  # names of the methods in vLLM and SGLang
        license=license,
    )
    atomic_write(out / "README.md", card)
    return out / "README.md"


def read_exported_config(out: Path) -> ParsedConfig:
    """Return the parsed config.json of an exported drafter's folder.

    Raises ValueError if it cannot be read.
    """
    reading = parse_drafter_config(open_drafter_folder(out))
    if reading.problems or not reading.config_kwargs:
        problems = "; ".join(reading.problems) or "config.json cannot be read"
        raise ValueError(f"{out} contains no readable drafter ({problems}): export it again")
    return reading


def read_evaluation_without_ngrams(step_folder: Path) -> Evaluation | None:
    """Return the results of a checkpoint's evaluation, except those of decoding methods that use
    n-gram files.

    Returns None if the checkpoint was not evaluated.
    """
    file = step_folder / "evaluation" / "evaluation.json"
    if not file.is_file():
        return None
    return remove_ngram_methods(read_result(file, Evaluation))


def read_run_config(step_folder: Path) -> dict | None:
    """Return the options (config.json) of the training run that wrote a checkpoint.

    Returns None if the folder does not belong to a training run.
    """
    file = step_folder.parent.parent / "config.json"
    if step_folder.parent.name != "checkpoints" or not file.is_file():
        return None
    return rename_old_options(json.loads(file.read_text()))


def remove_ngram_methods(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation without methods that use n-gram files.

    n-gram files are not exported, because they are made from the training data. An exported folder
    can therefore not reproduce the results of these methods.
    """
    others = [remove_ngram_methods(other) for other in evaluation.other_evaluations or ()]
    methods = [method for method in evaluation.methods if not method.tree_method.needs_ngrams]
    return replace(evaluation, other_evaluations=others, methods=methods)


def build_front_matter(
    reading: ParsedConfig, run_config: dict | None, license: str | None, base: str | None
) -> str:
    """Return the front matter of the card, which is YAML metadata that the hub reads.

    reading: the parsed config.json of the drafter
    run_config: the options of the training run; None if they are unknown
    base: the target's name on the hub; None if it is unknown
    """
    from huggingface_hub import ModelCardData

    datasets = []
    if run_config is not None:
        data = run_config["data"]
        sources = []
        if data["source"] == "mixture":
            sources = data["datasets"]
        elif data["source"] == "hub":
            sources = [data]
        names = [parse_hub_name(source["path"]) for source in sources]
        datasets = [name for name in names if name is not None]

    assert reading.family is not None
    family = reading.family.title.lower()
    return ModelCardData(
        base_model=base,
        datasets=datasets or None,
        # AutoModel of transformers can load a drafter only in the format of transformers.
        library_name="transformers" if reading.layout_name == "transformers" else None,
        license=license and license.lower(),
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "block-diffusion", "draft-model", family],
    ).to_yaml()


def list_training_options(run_config: dict, step_folder: Path) -> list[tuple[str, object]]:
    """Return pairs (name, value) for the card: the training options that it shows, and the number
    of training steps.

    The length of a run is set by one of the options max_minutes, steps and epochs. If several are
    set, max_minutes takes effect, else steps. Of these three options, only the one that took effect
    is returned.
    """
    rows = []
    for section, keys in RUN_OPTIONS_SHOWN_ON_CARD.items():
        options = run_config.get(section, {}) if section else run_config
        if options.get("max_minutes") is not None:
            options = options | {"epochs": None, "steps": None}
        elif options.get("steps") is not None:
            options = options | {"epochs": None}
        for key in keys:
            if options.get(key) not in (None, {}):
                name = f"{section}.{key}" if section else key
                rows.append((name, options[key]))

    step = re.fullmatch(r"step-(\d+)", step_folder.name)
    if step is not None:
        rows.append(("steps taken", int(step[1])))
    return rows


def list_compatible_engines(out: Path) -> list[str]:
    """Return the names of the engines that can load an exported drafter's folder."""
    engines = [verdict.engine for verdict in check_engines(out) if not verdict.problems]
    if any(out.glob("*.gguf")):
        engines.append("llama.cpp")
    return engines


def get_public_initial_drafter_name(run_config: dict) -> str | None:
    """Return the hub name of the drafter whose weights training started from.

    Returns "another drafter" if these weights came from a local path, and None if training started
    from a newly initialised drafter.
    """
    init = run_config["drafter"].get("init")
    if not init:
        return None
    return parse_hub_name(init) or "another drafter"


def describe_data(data: dict) -> list[str]:
    """Return, for the card, a description of each data set of the training, without local paths.

    A data set from the hub is described by its name there.

    data: the section "data" of the run's config.json
    """
    if data["source"] == "mixture":
        descriptions = []
        for source in data["datasets"]:
            name = parse_hub_name(source["path"]) or DATA_SOURCE_DESCRIPTIONS["jsonl"]
            descriptions.append(f"{name} (weight {source['weight']:g})")
        return descriptions
    if data["source"] in DATA_SOURCE_DESCRIPTIONS:
        return [DATA_SOURCE_DESCRIPTIONS[data["source"]]]
    return [parse_hub_name(data["path"]) or DATA_SOURCE_DESCRIPTIONS["jsonl"]]


def parse_hub_name(text: str) -> str | None:
    """Return `text` if it is a name on the hub (owner/name), else None."""
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) or text.endswith(NON_HUB_NAME_SUFFIXES):
        return None
    return None if Path(text).exists() else text
