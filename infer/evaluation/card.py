"""The card of an exported drafter: README.md, with the hub's front matter on top; card.md.j2 is its
text.

Every number comes from the checkpoint's evaluation/evaluation.json, every word about training from
a list of known keys of its run's config.json: paths, names of runs and all else in those files are
not published.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

from infer.drafters.config_keys import ConfigReading
from infer.evaluation.acceptance import FILE, find_reference
from infer.evaluation.charts import budget_charts, picture
from infer.evaluation.pages import render
from infer.evaluation.results import Evaluation, read_result, write_result
from infer.evaluation.tables import headline, method_table
from infer.formats.compatibility import check_folder
from infer.formats.folders import find_folder, open_folder
from infer.formats.layouts import read as read_layout
from infer.utils.files import atomic_write
from infer.utils.renamed_options import translate_saved_config

PICTURE = "acceptance.svg"
RECIPE = {
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
SOURCES = {
    "embedded": "what the target itself wrote after prompts from Python's standard library",
    "stdlib": "source files of Python's standard library",
    "jsonl": "files of the publisher's own",
}


def write_card(checkpoint: str | Path, out: Path, license: str | None, base_model: str) -> Path:
    """Write README.md, and the picture that it shows, into the exported drafter's folder `out`;
    return its path.

    checkpoint: where the drafter was exported from, a training checkpoint or anything else.
        license:
    the publisher's word for it; None says nothing. base_model: the target's name on the hub; a
    local path is not shown. Raises ValueError where `out` holds no drafter.
    """
    reading = read_layout(open_folder(out))
    if reading.problems or not reading.options:
        raise ValueError(
            f"{out} is no drafter: {'; '.join(reading.problems) or 'config.json cannot be read'}"
        )
    step = find_folder(checkpoint).resolve()  # best is a link to a step
    step = step.parent if step.name == "drafter" else step
    numbers = step / "evaluation" / "evaluation.json"
    recipe = step.parent.parent / "config.json"
    evaluation = without_ngrams(read_result(numbers, Evaluation)) if numbers.is_file() else None
    reference = find_reference(checkpoint)
    if reference is not None:
        write_result(out / FILE, reference)
    if evaluation is not None:
        atomic_write(out / PICTURE, picture(budget_charts({"": evaluation})))
    run = (
        translate_saved_config(json.loads(recipe.read_text()))
        if step.parent.name == "checkpoints" and recipe.is_file()
        else None
    )
    engines = [verdict.engine for verdict in check_folder(out) if not verdict.problems]
    base = hub_name(base_model)
    card = render(
        "card.md.j2",
        front_matter=front_matter(reading, run, license, base),
        reading=reading,
        family=reading.family.title,
        base=base,
        drafted=reading.options["block_size"] - (not reading.own.get("sample_from_anchor")),
        block_size=reading.options["block_size"],
        evaluation=evaluation,
        headline=evaluation and headline(evaluation),
        methods=evaluation and method_table(evaluation),
        picture=PICTURE,
        reference=reference,
        file=FILE,
        told=json.dumps(reading.options.get("chat_template_kwargs", {})),
        run=run,
        sources=run and "; ".join(dict.fromkeys(described_data(run["data"]))),
        init=run
        and run["drafter"].get("init")
        and (hub_name(run["drafter"]["init"]) or "another drafter"),
        recipe=run
        and recipe_of(run)
        + [("steps taken", int(number)) for number in re.findall(r"^step-(\d+)$", step.name)],
        engines=" ".join([*engines, *["llama.cpp"] * any(out.glob("*.gguf"))]),
        method="dspark"
        if reading.own.get("markov_rank")
        else "dflash",  # vLLM's and SGLang's names
        license=license,
    )
    atomic_write(out / "README.md", card)
    return out / "README.md"


def without_ngrams(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation of what an exported folder can do: an n-gram file, which is made of the
    training texts, is no part of it."""
    beside = [without_ngrams(one) for one in evaluation.beside or ()]
    return replace(
        evaluation,
        beside=beside,
        methods=[one for one in evaluation.methods if not one.tree.ngrams],
    )


def front_matter(
    reading: ConfigReading, run: dict | None, license: str | None, base: str | None
) -> str:
    """Return the YAML that the hub reads, without the keys whose values are not known."""
    from huggingface_hub import ModelCardData

    data = run["data"] if run else {"source": None}
    parts = (
        data["datasets"]
        if data["source"] == "mixture"
        else [data]
        if data["source"] == "hub"
        else []
    )
    return ModelCardData(
        base_model=base,
        datasets=[name for part in parts if (name := hub_name(part["path"]))] or None,
        # its AutoModel loads no other
        library_name="transformers" if reading.layout == "transformers" else None,
        license=license and license.lower(),
        pipeline_tag="text-generation",
        tags=[
            "speculative-decoding",
            "block-diffusion",
            "draft-model",
            reading.family.title.lower(),
        ],
    ).to_yaml()


def recipe_of(run: dict) -> list[tuple[str, object]]:
    """Return the options of RECIPE that a run's config.json has, by their whole names; of those
    that set the run's length, the one that did."""
    rows = []
    for part, keys in RECIPE.items():
        known = run.get(part, {}) if part else run
        if known.get("max_minutes") is not None:
            known = known | {"epochs": None, "steps": None}
        elif known.get("steps") is not None:
            known = known | {"epochs": None}
        rows += [
            (f"{part}.{key}".lstrip("."), known[key])
            for key in keys
            if known.get(key) not in (None, {})
        ]
    return rows


def described_data(data: dict) -> list[str]:
    """Return the data sets in words; names of the hub, never paths."""
    if data["source"] == "mixture":
        return [
            f"{hub_name(part['path']) or SOURCES['jsonl']} (weight {part['weight']:g})"
            for part in data["datasets"]
        ]
    return [SOURCES.get(data["source"]) or hub_name(data["path"]) or SOURCES["jsonl"]]


def hub_name(text: str) -> str | None:
    """Return the text if it is a name on the hub, owner/name, and no path on this machine."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and not text.endswith(
        (".jsonl", ".gz", ".json", ".parquet")
    )
    return text if named and not Path(text).exists() else None
