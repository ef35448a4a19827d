"""The card of an exported drafter: README.md, with the hub's front matter on top.

Every number comes from the checkpoint's evaluation/evaluation.json, every word about training from a list of known
keys of its run's config.json: paths, names of runs and all else in those files are not published.
"""

import json
import re
from dataclasses import replace
from pathlib import Path
from string import Template

from infer.drafters.config_keys import ConfigReading
from infer.evaluation.acceptance import FILE, find_reference
from infer.evaluation.drawings import picture
from infer.evaluation.figures import budget_charts
from infer.evaluation.results import Evaluation, Reference, read_result, write_result
from infer.evaluation.tables import headline, method_table
from infer.formats.compatibility import check_folder
from infer.formats.folders import find_folder, open_folder
from infer.formats.layouts import read as read_layout
from infer.utils.files import atomic_write

PICTURE = "acceptance.svg"
CARD = Path(__file__).with_name("card.md")

# The hub's names of licences. Any other licence is "other" there, with a name of its own.
LICENCES = (
    *("apache-2.0", "mit", "isc", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "unlicense", "openrail"),
    *("gemma", "llama3", "llama3.1", "llama3.2", "llama3.3", "other", "unknown"),
)

RECIPE = {
    "target": ("chat_template_kwargs",),
    "drafter": ("layers", "block_size", "warm_start"),
    "objective": ("divergence", "weights", "gamma"),
    "optim": ("name", "lr", "betas", "weight_decay", "warmup", "clip", "batch", "epochs", "steps", "precision"),
    "data": ("length",),
    "": ("anchors", "document_anchors", "seed"),
}
SOURCES = {
    "embedded": "what the target itself wrote after prompts from Python's standard library",
    "stdlib": "source files of Python's standard library",
    "jsonl": "files of the publisher's own",
}


def write_card(checkpoint: str | Path, out: Path, license: str | None, base_model: str) -> Path:
    """Write README.md, and the picture that it shows, into the exported drafter's folder `out`; return its path.

    checkpoint: where the drafter was exported from, a training checkpoint or anything else. license: the publisher's
    word for it; None says nothing. base_model: the target's name on the hub; a local path is not shown. Raises
    ValueError where `out` holds no drafter.
    """
    reading = read_layout(open_folder(out))
    if reading.problems or not reading.options:
        raise ValueError(f"{out} is no drafter: {'; '.join(reading.problems) or 'config.json cannot be read'}")
    engines = [verdict.engine for verdict in check_folder(out) if not verdict.problems]
    step = find_folder(checkpoint).resolve()  # best is a link to a step
    step = step.parent if step.name == "drafter" else step
    numbers, recipe = step / "evaluation" / "evaluation.json", step.parent.parent / "config.json"
    evaluation = without_ngrams(read_result(numbers, Evaluation)) if numbers.is_file() else None
    reference = find_reference(checkpoint)
    if reference is not None:
        write_result(out / FILE, reference)
    run = json.loads(recipe.read_text()) if step.parent.name == "checkpoints" and recipe.is_file() else None
    if evaluation is not None:
        atomic_write(out / PICTURE, picture(budget_charts({"": evaluation})))
    card = out / "README.md"
    gguf = any(out.glob("*.gguf"))
    engines += ["llama.cpp"] * gguf
    atomic_write(card, model_card(reading, engines, run, evaluation, license, base_model, reference))
    return card


def without_ngrams(evaluation: Evaluation) -> Evaluation:
    """Return the evaluation of what an exported folder can do: an n-gram file, which is made of the training texts, is
    no part of it."""
    beside = [without_ngrams(one) for one in evaluation.beside or ()]
    return replace(evaluation, beside=beside, methods=[one for one in evaluation.methods if not one.tree.ngrams])


def model_card(
    reading: ConfigReading,
    engines: list[str],
    run: dict | None,
    evaluation: Evaluation | None,
    license: str | None,
    base_model: str,
    reference: Reference | None = None,
) -> str:
    """Return the README.md of a drafter. reading: its folder; engines: those of `infer.formats.compatibility` that
    would load it; run: its training run's config.json; evaluation, reference: None if nothing was measured."""
    base, drafted = hub_name(base_model), reading.options["block_size"] - (not reading.own.get("sample_from_anchor"))
    card = Template(CARD.read_text(encoding="utf-8")).substitute(
        family=reading.family.title,
        model=base.rpartition("/")[2] if base else "a target model",
        target=f"[{base}](https://huggingface.co/{base})" if base else "its target model",
        path=base or "path/to/target",
        drafted=drafted,
        measured=measured(evaluation),
        expected=expected(reference, reading) if reference else "",
        training=training(reading, run, evaluation),
        engines="\n\n".join(use(engines, reading, drafted, base or "path/to/target")),
        licence=license or "The publisher named no licence.",
    )
    return f"{front_matter(reading, run, license, base)}\n\n{card}"


def front_matter(reading: ConfigReading, run: dict | None, license: str | None, base: str | None) -> str:
    """Return the YAML block that the hub reads, without the keys whose values are not known."""
    from huggingface_hub import ModelCardData

    named = {}
    if license:
        known = re.sub(r"[^a-z0-9.+]+", "-", license.lower()).strip("-")
        named = {"license": known} if known in LICENCES else {"license": "other", "license_name": known}
    data = ModelCardData(
        base_model=base,
        datasets=[name for name in map(hub_name, data_names(run)) if name] or None,
        library_name="transformers" if reading.layout == "transformers" else None,  # its AutoModel loads no other
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "block-diffusion", "draft-model", reading.family.title.lower()],
        **named,
    )
    return f"---\n{data.to_yaml()}\n---"


def measured(evaluation: Evaluation | None) -> str:
    """Return the evaluation's table, and how it was measured."""
    if evaluation is None:
        return "Nothing was measured with this checkpoint."
    return "\n\n".join(
        [
            headline(evaluation),
            method_table(evaluation),
            f"![Tokens per round and speed by node budget]({PICTURE})",
            f"{evaluation.prompts} held-out prompts, {evaluation.rows} at a time, at most "
            f"{evaluation.max_new_tokens} new tokens each, temperature {evaluation.temperature:g}, "
            f"{evaluation.dtype}, {evaluation.device}. Numbers after a method are drafted tokens that the target "
            "checks per round; a round's own token of the target counts in τ. No figure has n-grams in it, which "
            "blockdraft's trees can ask beside a drafter: they are no part of this folder.",
        ]
    )


def expected(reference: Reference, reading: ConfigReading) -> str:
    """Return acceptance by position, how it was measured, and how to measure it in an engine."""
    counts = reference.acceptance
    positions = range(1, len(counts.accepted) + 1)
    chats = any(text.chat for text in reference.texts)
    told = json.dumps(reading.options.get("chat_template_kwargs", {}))
    asked = (
        f"as chats, with `chat_template_kwargs` {told}" if chats else "as the beginnings of texts, without a template"
    )
    return "\n\n".join(
        [
            "\n## What to expect of an engine",
            f"A greedy chain of {len(counts.accepted)} drafts a round commits {1 + counts.mean:.2f} tokens; so many "
            "rounds have their first, second, ... draft accepted:",
            f"| draft | {' | '.join(map(str, positions))} |\n| --- |{' --- |' * len(positions)}\n"
            f"| accepted | {' | '.join(f'{100 * share:.1f} %' for share in counts.shares)} |",
            f"{counts.rounds} rounds on the {len(reference.texts)} prompts of `{FILE}`, asked {asked}; target in "
            f"{reference.dtype}. An engine that is asked the same reaches the same: "
            "`./launch.sh doctor checkpoint=path/to/this/folder target.path=path/to/target url=http://...` compares, "
            "and says what is wrong where it does not.\n",
        ]
    )


def training(reading: ConfigReading, run: dict | None, evaluation: Evaluation | None) -> str:
    """Return data and recipe, as far as they are known."""
    options = reading.options
    shape = f"{options['num_hidden_layers']} layers, block size {options['block_size']}"
    layers = reading.own["target_layer_ids"]
    shape += f", fed by the target's layers {', '.join(map(str, layers))} (counted from 0)"
    if run is None:
        return f"{shape}. How it was trained is not recorded here."
    rows = []
    for part, keys in RECIPE.items():
        known = run.get(part, {}) if part else run
        if known.get("steps") is not None:
            known = known | {"epochs": None}  # the steps decided
        said = [key for key in keys if known.get(key) not in (None, {})]
        rows += [f"| {part}{'.' * bool(part)}{key} | {known[key]} |" for key in said]
    sources = "; ".join(dict.fromkeys(described_data(run["data"])))
    at = f", step {evaluation.step}" if evaluation and evaluation.step else ""
    init = run["drafter"].get("init")
    begun = f" It goes on from {hub_name(init) or 'another drafter'}." if init else ""
    return f"{shape}{at}. Data: {sources}.{begun}\n\n| option | value |\n| --- | --- |\n" + "\n".join(rows)


def described_data(data: dict) -> list[str]:
    """Return the data sets in words; names of the hub, never paths."""
    if data["source"] == "mixture":
        return [f"{hub_name(part['path']) or SOURCES['jsonl']} (weight {part['weight']:g})" for part in data["parts"]]
    return [SOURCES.get(data["source"]) or hub_name(data["path"]) or SOURCES["jsonl"]]


def data_names(run: dict | None) -> list[str]:
    """Return the paths that may be names of data sets on the hub."""
    data = run["data"] if run else {"source": None}
    if data["source"] == "mixture":
        return [part["path"] for part in data["parts"]]
    return [data["path"]] if data["source"] == "hub" else []


def hub_name(text: str) -> str | None:
    """Return the text if it is a name on the hub, owner/name, and no path on this machine."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and not text.endswith((".jsonl", ".gz", ".json", ".parquet"))
    return text if named and not Path(text).exists() else None


def use(engines: list[str], reading: ConfigReading, drafted: int, target: str) -> list[str]:
    """Return how each of the engines that would load this drafter, which drafts so many tokens a round, serves the
    target with it."""
    here, block = "path/to/this/folder", reading.options["block_size"]
    method = "dspark" if reading.own.get("markov_rank") else "dflash"  # vLLM's and SGLang's names
    told = json.dumps({"method": method, "model": here, "num_speculative_tokens": drafted})
    ways = {  # by a word of the engine's name
        "vLLM": f"With vLLM:\n\n```\nvllm serve {target} --speculative-config '{told}'\n```",
        "SGLang": f"With SGLang:\n\n```\npython -m sglang.launch_server --model-path {target} --speculative-algorithm "
        f"{method.upper()} --speculative-draft-model-path {here} --speculative-num-draft-tokens {block}\n```",
        "llama.cpp": "With llama.cpp, the target converted too:\n\n```\nllama-server --model target.gguf --model-draft "
        f"drafter.gguf --spec-type draft-{method} --spec-draft-n-max {drafted}\n```",
        "authors": f"With the DFlash authors' package: `DFlashDraftModel.from_pretrained(\"{here}\")`; transformers' "
        "`AutoModel` does not know this layout.",
        "transformers": "With transformers 5.23 or later:\n\n```python\nfrom transformers import AutoModel\n\n"
        f'assistant = AutoModel.from_pretrained("{here}")\n'
        'model.generate(**inputs, assistant_model=assistant, speculation_type="dflash")\n```',
    }
    return [way for word, way in ways.items() if any(word in engine for engine in engines)]
