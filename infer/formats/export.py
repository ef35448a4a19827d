"""Drafters for other engines: written in the layouts of the drafter's family, and uploaded to the model hub.

A drafter that an engine would read in another way than it was trained is refused.
"""

from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from transformers import PretrainedConfig

from infer.drafters.base import Drafter
from infer.drafters.families import check_format
from infer.formats.checkpoint import write_folder
from infer.formats.folders import open_folder
from infer.formats.layouts import read
from infer.targets.loading import load_config
from infer.targets.target import Target


def export_drafter(drafter: Drafter, format: str, target: Target | None, out: Path) -> None:
    """Write a drafter in a layout that its family has (`infer.drafters.families.FORMATS`). `target` is needed where the
    layout stores its embedding and head, and for a drafter that has copies of them.

    Raises ValueError for drafters that the layout has no words for.
    """
    check_format(drafter.family, format, drafter.head_row, bool(drafter.own.get("conv_kernel_size")))
    config, weights = drafter.writers[format](drafter, target)
    write_folder(config, weights, out)


def check_folder_format(folder: str | Path, format: str) -> None:
    """Raise ValueError, before weights are loaded, for a drafter's folder that the layout has no words for. A folder
    that cannot be read passes: loading it says why."""
    reading = read(open_folder(folder))
    if reading.family is None or reading.problems:
        return
    with torch.device("meta"):
        drafter = reading.family.load()(reading.config())
    check_format(reading.family, format, drafter.head_row, bool(drafter.own.get("conv_kernel_size")))


def check_base_model(name: str, drafter: Drafter) -> str | None:
    """Raise ValueError unless the model `name` has the sizes of the drafter's target, whose figures the card presents
    as that model's. Return a sentence where its config.json cannot be read from here, so that nobody knows; for a
    drafter of the embedded target, which is no published model, that is refused too."""
    sizes = target_sizes(drafter.config)
    try:
        found = target_sizes(load_config(name).get_text_config())
    except FileNotFoundError:
        if all(size in (None, target_sizes(load_config().get_text_config())[key]) for key, size in sizes.items()):
            raise ValueError(
                f"base_model={name}: its config.json could not be read from here, and the drafter is one of the "
                "embedded target, whose figures the card would present as that model's: leave base_model away"
            ) from None
        return f"base_model={name}: its config.json could not be read from here, and was not compared with the drafter"
    wrong = [f"{key} {found[key]}, expected {size}" for key, size in sizes.items() if size not in (None, found[key])]
    if wrong:
        raise ValueError(f"base_model={name} is not the target of this drafter: it has {'; '.join(wrong)}")
    return None


def target_sizes(config: PretrainedConfig) -> dict[str, int | None]:
    """Return a target's sizes, from its own config or from a drafter's."""
    layers = vars(config).get("num_target_layers", config.num_hidden_layers)
    return {"hidden_size": config.hidden_size, "layers": layers, "vocab_size": config.vocab_size}


def push(folder: Path, name: str) -> str:
    """Upload a folder to the model hub as `name`, user/name, with the token that the user is logged in with; return its
    address. Raises ValueError where there is no token, or the hub refuses."""
    check_token()
    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="A drafter exported by blockdraft")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"the hub answered {status}" if status else type(error).__name__
        raise ValueError(f"push_to_hub={name}: {reason}; the export lies in {folder}") from error
    return str(address)


def check_token() -> None:
    """Raise ValueError unless the user is logged in at the model hub."""
    if get_token() is None:
        raise ValueError("push_to_hub needs your token for the hub: log in with `hf auth login`, or set HF_TOKEN")
