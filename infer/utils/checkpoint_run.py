"""What a checkpoint brings to a command: the target and the data of its own run."""

import json
from pathlib import Path

from infer.utils.files import read_text
from infer.utils.renamed_options import translate_saved_config

# What a command whose class says FROM_RUN takes of its checkpoint's run: not the device, which is
# this machine's, and not the permission to run a model's own code, which only the user gives.
KEYS_FROM_RUN = {
    "target": ("path", "dtype", "chat_template_kwargs"),
    "data": (
        "source",
        "path",
        "split",
        "datasets",
        "length",
        "max_examples",
        "max_invalid_fraction",
    ),
}


def options_of_run(config, chosen: set[str], options_class: type) -> dict[str, dict]:
    """Return the target and the data of the checkpoint's own run, of a command that takes them from
    there (`FROM_RUN`), where the user chose neither. `config`: the command's; `chosen`: the keys
    and groups that the user gave."""
    sections = getattr(options_class, "FROM_RUN", ())
    checkpoints = [config.checkpoint] if "checkpoint" in config else config.get("checkpoints")
    if not (sections and checkpoints and checkpoints[0]):
        return {}
    run = run_of(checkpoints[0])
    options = {}
    for section in sections:
        deciding = {section, *(f"{section}.{key}" for key in ("path", "source", "datasets"))}
        if section == "data":
            deciding.add("suite")
        if section in run and not deciding & chosen:
            keys = [
                key
                for key in KEYS_FROM_RUN[section]
                if key in run[section] and f"{section}.{key}" not in chosen
            ]
            options[section] = {key: run[section][key] for key in keys}
    return options


def run_of(checkpoint: str) -> dict:
    """Return the configuration of the run that a checkpoint is part of; nothing for anything
    else."""
    place = Path(checkpoint).resolve()  # best is a link to a step
    for folder in (place, *place.parents[:3]) if place.exists() else ():
        if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
            # the file may come from someone else: ${oc.env:HOME} stays a text
            config = json.loads(read_text(folder / "config.json", 1 << 20).replace("${", r"\\${"))
            return translate_saved_config(config)
    return {}
