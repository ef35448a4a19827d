"""What a run begins with: a new drafter, or one that is there already (drafter.init)."""

from dataclasses import replace

import torch

from infer.config import DrafterConfig, TargetConfig
from infer.drafters.base import Drafter
from infer.drafters.families import CLASSES, new_drafter
from infer.formats.checkpoint import load_drafter
from infer.formats.export import drop_copies
from infer.formats.folders import open_folder
from infer.formats.layouts import problems_of, read
from infer.targets.target import Target, load_config
from train.config import TrainConfig
from train.run.checkpoints import seeded


def resolve_init(options: DrafterConfig, target: TargetConfig) -> DrafterConfig:
    """The drafter's options with what follows from `init`, whose weights are not loaded yet.

    Raises ValueError for options that contradict it, with those to give instead, and for a folder that is no drafter.
    """
    if options.init is None:
        return options
    layers = load_config(target.path, target.trust_remote_code).get_text_config().num_hidden_layers
    folder = open_folder(options.init)
    reading = read(folder, layers)
    problems = problems_of(folder, reading)
    if problems:
        raise ValueError(f"drafter.init={options.init}: {'; '.join(problems)}")
    with torch.device("meta"):
        drafter = CLASSES[reading.family](reading.config())
    if drafter.d2t is not None:
        raise ValueError(
            f"drafter.init={options.init}: it knows {len(drafter.d2t)} of {drafter.config.vocab_size} tokens, and "
            "cannot learn to follow a target that knows all: a drafter of a whole vocabulary can be trained"
        )
    known = {
        "family": reading.family,
        "layers": drafter.config.num_hidden_layers,
        "block_size": drafter.block_size,
        "target_layer_ids": list(drafter.layer_ids),
    }
    if reading.family == "dart":
        known["shifted"] = drafter.config.dart_config["shifted"]
    else:
        known["mask_token_id"] = drafter.mask_token_id
    given = {key: getattr(options, key) for key in known}
    wrong = [key for key, value in given.items() if value is not None and value != known[key]]
    if wrong:
        wanted = " ".join(f"drafter.{key}={known[key]}".replace(" ", "") for key in wrong)
        mine = " ".join(f"drafter.{key}={given[key]}".replace(" ", "") for key in wrong)
        raise ValueError(f"drafter.init={options.init} is no drafter of {mine}: give {wanted}")
    return replace(options, **known)


def initial_drafter(config: TrainConfig, target: Target) -> Drafter:
    """The drafter that the run begins with, float32, to be trained. Raises ValueError where it does not fit the
    target."""
    options = config.drafter
    if options.init is None:
        drafter = new_drafter(options, target)
        drafter.initialize(target, seeded(config.seed), options.warm_start)
        return drafter
    drafter = load_drafter(options.init, torch.float32, target_layers=target.config.num_hidden_layers)
    try:
        drafter.check_target(target)
        drop_copies(drafter, target)
    except ValueError as error:
        raise ValueError(f"drafter.init={options.init} cannot be trained here: {error}") from error
    return drafter.train().requires_grad_(True)
