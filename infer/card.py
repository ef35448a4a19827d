"""The card of an exported drafter: README.md with what the hub wants to know on top.

Every number comes from the checkpoint's evaluation/evaluation.json, every word about training from a list of known
keys of its run's config.json: paths, names of runs and whatever else those files hold stay where they are.
"""

import json
import re
from pathlib import Path

from infer.report import budget_figure, headline, label

PICTURE = "acceptance.png"
FAMILIES = {"DFlashDraftModel": "DFlash", "DARTDraftModel": "DART"}

# Licences that the hub knows by these names; for it any other one is "other", with a name of its own.
LICENCES = (
    *("apache-2.0", "mit", "isc", "bsd-2-clause", "bsd-3-clause", "mpl-2.0", "gpl-3.0", "lgpl-3.0", "agpl-3.0"),
    *("cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0", "cc-by-nc-sa-4.0", "unlicense", "openrail"),
    *("gemma", "llama3", "llama3.1", "llama3.2", "llama3.3", "other", "unknown"),
)

RECIPE = {
    "drafter": ("layers", "block_size", "warm_start"),
    "objective": ("divergence", "weights", "gamma", "alpha"),
    "optim": ("name", "lr", "betas", "weight_decay", "warmup", "clip", "batch", "epochs", "steps", "precision"),
    "data": ("length",),
    "": ("anchors", "seed"),
}
SOURCES = {
    "embedded": "what the target itself wrote after prompts from Python's standard library",
    "stdlib": "source files of Python's standard library",
    "jsonl": "files of the publisher's own",
}


def write_card(checkpoint: Path, out: Path, license: str | None, base_model: str) -> Path:
    """Writes README.md, and the picture that it shows, into the exported drafter's folder `out`; returns its path.

    checkpoint: a training checkpoint, or its `drafter` folder. license: what the publisher says; None says nothing.
    base_model: the target's name on the hub; a local path is not shown. Raises FileNotFoundError without a drafter.
    """
    folder = Path(checkpoint).resolve()  # best is a link to a step
    drafter = folder / "drafter" if (folder / "drafter").is_dir() else folder
    if not (drafter / "config.json").is_file():
        raise FileNotFoundError(f"{checkpoint} is no drafter: config.json is missing")
    config = json.loads((drafter / "config.json").read_text())
    step = drafter.parent if drafter.name == "drafter" else None
    evaluation = read(step / "evaluation" / "evaluation.json") if step else None
    run = read(step.parent.parent / "config.json") if step and step.parent.name == "checkpoints" else None
    out.mkdir(parents=True, exist_ok=True)
    if evaluation is not None:
        budget_figure(evaluation).savefig(out / PICTURE)
    card = out / "README.md"
    card.write_text(model_card(config, run, evaluation, license, base_model), encoding="utf-8")
    return card


def read(file: Path) -> dict | None:
    """What a JSON file holds, None if there is none."""
    return json.loads(file.read_text()) if file.is_file() else None


def model_card(config: dict, run: dict | None, evaluation: dict | None, license: str | None, base_model: str) -> str:
    """README.md of a drafter. config: its config.json; run: its training run's; evaluation: what
    `infer.evaluate.evaluate` returned, None if nothing was measured."""
    family = FAMILIES[config["architectures"][0]]
    base = hub_name(base_model)
    target = f"[{base}](https://huggingface.co/{base})" if base else "its target model"
    parts = [
        front_matter(family, run, license, base),
        f"# {family} drafter for {base.rpartition('/')[2] if base else 'a target model'}",
        f"A block-diffusion drafter for {target}: it reads the target's hidden states and proposes "
        f"{config['block_size'] - 1} tokens in one pass, which the target then checks at once. The output is the "
        "target's own; only the time changes. It is of no use without that very target.",
        "## Measured\n\n" + measured(evaluation),
        "## Training\n\n" + training(config, run, evaluation),
        "## Use\n\n" + use(family, config["block_size"], base or "path/to/target"),
        "## Licence\n\n" + (license or "The publisher named no licence."),
    ]
    return "\n\n".join(parts) + "\n"


def front_matter(family: str, run: dict | None, license: str | None, base: str | None) -> str:
    """The YAML block that the hub reads. Keys that nobody can vouch for are left out."""
    from huggingface_hub import ModelCardData

    named = {}
    if license:
        known = re.sub(r"[^a-z0-9.+]+", "-", license.lower()).strip("-")
        named = {"license": known} if known in LICENCES else {"license": "other", "license_name": known}
    data = ModelCardData(
        base_model=base,
        datasets=[name for name in map(hub_name, data_names(run)) if name] or None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "block-diffusion", "draft-model", family.lower()],
        **named,
    )
    return f"---\n{data.to_yaml()}\n---"


def measured(evaluation: dict | None) -> str:
    """The evaluation's table, and how it came about."""
    if evaluation is None:
        return "Nothing was measured with this checkpoint."
    lines = [
        "| method | tokens per round (τ) | tokens/s | speedup | same output |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    lines += [
        f"| {label(method)} | {method['tau']:.2f} | {method['tokens_per_second']:.1f} | {method['speedup']:.2f}x "
        f"| {'yes' if method['identical'] else 'no'} |"
        for method in evaluation["methods"]
    ]
    return "\n\n".join(
        [
            headline(evaluation),
            "\n".join(lines),
            f"![Tokens per round and speed by node budget]({PICTURE})",
            f"{evaluation['prompts']} held-out prompts, {evaluation['rows']} at a time, at most "
            f"{evaluation['max_new_tokens']} new tokens each, temperature {evaluation['temperature']:g}, "
            f"{evaluation['dtype']}, {evaluation['device']}. Numbers after a method are drafted tokens that the target "
            "checks per round; a round's own token of the target counts in τ.",
        ]
    )


def training(config: dict, run: dict | None, evaluation: dict | None) -> str:
    """Data and recipe, as far as they are known."""
    shape = f"{config['num_hidden_layers']} layers, block size {config['block_size']}"
    layers = (config.get("dflash_config") or config.get("dart_config") or {}).get("target_layer_ids")
    shape += f", fed by the target's layers {', '.join(map(str, layers))} (counted from 0)" if layers else ""
    if run is None:
        return f"{shape}. How it was trained is not recorded here."
    rows = []
    for part, keys in RECIPE.items():
        known = run.get(part, {}) if part else run
        if known.get("steps") is not None:
            known = known | {"epochs": None}  # the steps decided
        rows += [f"| {part}{'.' * bool(part)}{key} | {known[key]} |" for key in keys if known.get(key) is not None]
    sources = "; ".join(dict.fromkeys(described_data(run["data"])))
    at = f", step {evaluation['step']}" if evaluation and evaluation.get("step") else ""
    return f"{shape}{at}. Data: {sources}.\n\n| option | value |\n| --- | --- |\n" + "\n".join(rows)


def described_data(data: dict) -> list[str]:
    """The data sets in words; names of the hub, never paths."""
    if data["source"] == "mixture":
        return [f"{hub_name(part['path']) or SOURCES['jsonl']} (weight {part['weight']:g})" for part in data["parts"]]
    return [SOURCES.get(data["source"]) or hub_name(data["path"]) or SOURCES["jsonl"]]


def data_names(run: dict | None) -> list[str]:
    """What may be names of data sets on the hub."""
    data = run["data"] if run else {"source": None}
    if data["source"] == "mixture":
        return [part["path"] for part in data["parts"]]
    return [data["path"]] if data["source"] == "hub" else []


def hub_name(text: str) -> str | None:
    """The text if it is a name on the hub, owner/name, and no path on this machine."""
    named = re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", text) and not text.endswith((".jsonl", ".gz", ".json", ".parquet"))
    return text if named and not Path(text).exists() else None


def use(family: str, block_size: int, target: str) -> str:
    """How to serve the target with this drafter."""
    ours = (
        "With blockdraft, which draws trees of drafts as well:\n\n"
        f"```\n./launch.sh serve target.path={target} checkpoint=path/to/this/folder\n```\n\n"
        "```python\nfrom infer import generate, load_drafter, load_target\n\n"
        f'target = load_target("{target}")\n'
        'drafter = load_drafter("path/to/this/folder").to(target.device, target.dtype)\n'
        'print(generate(target, drafter, [{"role": "user", "content": "Hello!"}]).text)\n```'
    )
    if family != "DFlash":
        return ours
    speculative = {"method": "dflash", "model": "path/to/this/folder", "num_speculative_tokens": block_size - 1}
    return (
        f"With vLLM:\n\n```\nvllm serve {target} --speculative-config '{json.dumps(speculative)}'\n```\n\n"
        f"With SGLang:\n\n```\npython -m sglang.launch_server --model-path {target} --speculative-algorithm DFLASH "
        f"--speculative-draft-model-path path/to/this/folder --speculative-num-draft-tokens {block_size}\n```\n\n{ours}"
    )
