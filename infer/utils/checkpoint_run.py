"""Reads default options from a training run: a command that loads a checkpoint uses, by default,
the target and the data of the training run that saved the checkpoint.
"""

import json
from pathlib import Path
from typing import Any

from infer.utils.files import read_small_regular_file
from infer.utils.renamed_options import rename_old_options

# Options that are copied from the training run that saved a checkpoint. Keys are sections of
# options, values are the names of the copied options. The device is not copied, because this
# machine may have another one. trust_remote_code is not copied, because only the user may allow a
# model to run its own code.
OPTIONS_TAKEN_FROM_CHECKPOINT_RUN = {
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
MAX_RUN_CONFIG_BYTES = 1 << 20


def load_run_options(config: Any, chosen: set[str], options_class: type) -> dict[str, dict]:
    """Return the options that a command copies from the training run that saved its checkpoint.

    config: the configuration that Hydra has composed for the command
    chosen: names of the options and option groups that the user gave; these are never replaced
    options_class: the command's dataclass; its attribute OPTION_SECTIONS_TAKEN_FROM_RUN names the
        sections to copy, for example "target"

    Returns a dictionary of options for each section. A section is left out if the user has chosen
    it or one of its options path, source and datasets. The section "data" is also left out if the
    user has chosen a suite.
    """
    section_names = getattr(options_class, "OPTION_SECTIONS_TAKEN_FROM_RUN", ())
    checkpoints = [config.checkpoint] if "checkpoint" in config else config.get("checkpoints")
    if not (section_names and checkpoints and checkpoints[0]):
        return {}

    run_config = read_run_config(checkpoints[0])
    options = {}
    for section in section_names:
        deciding_keys = {section, *(f"{section}.{key}" for key in ("path", "source", "datasets"))}
        if section == "data":
            deciding_keys.add("suite")
        if section not in run_config or deciding_keys & chosen:
            continue
        options[section] = {
            key: run_config[section][key]
            for key in OPTIONS_TAKEN_FROM_CHECKPOINT_RUN[section]
            if key in run_config[section] and f"{section}.{key}" not in chosen
        }
    return options


def read_run_config(checkpoint: str) -> dict:
    """Read the configuration of the training run to whose folder a checkpoint belongs.

    checkpoint: path of the run, of a checkpoint in the run, or of the checkpoint's drafter folder.
    Returns an empty dictionary if the path is not inside a run's folder.
    """
    path = Path(checkpoint).resolve()  # "best" is a symbolic link to the checkpoint of a step
    if not path.exists():
        return {}
    for folder in (path, *path.parents[:3]):
        if (folder / "checkpoints").is_dir() and (folder / "config.json").is_file():
            text = read_small_regular_file(folder / "config.json", MAX_RUN_CONFIG_BYTES)
            # Escape expressions such as ${oc.env:HOME}, so that OmegaConf does not resolve them:
            # the file may come from someone else.
            return rename_old_options(json.loads(text.replace("${", r"\\${")))
    return {}
