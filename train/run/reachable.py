"""Whether target and data can be read from here, in seconds and before torch loads."""

import os
from pathlib import Path

from data.rows import single
from infer.utils.hub import hub_answers
from train.config import TrainConfig


def check_reachable(config: TrainConfig) -> None:
    """Raise ValueError, saying what to give instead, where target or data are on the hub, not on this machine, and the
    hub does not answer."""
    from huggingface_hub import constants, try_to_load_from_cache

    missing, path = [], config.target.path
    kept_rows = Path(os.environ.get("HF_DATASETS_CACHE") or Path(constants.HF_HOME) / "datasets")
    here = path == "embedded" or Path(path).exists()
    if not here and not isinstance(try_to_load_from_cache(path, "config.json"), str):
        missing.append((f"target.path={config.target.path}", "target.path=<the model's folder>"))
    for part, _ in single(config.data) if config.features is None else ():
        kept = kept_rows / str(part.path).replace("/", "___")
        if part.source == "hub" and not Path(part.path).exists() and not kept.exists():
            missing.append((f"data.path={part.path}", "data=jsonl data.path=<its chats, answered by the target>"))
    if missing and not hub_answers():
        names, instead = zip(*missing, strict=True)
        raise ValueError(
            f"{' and '.join(names)}: not on this machine, and the model hub does not answer from here: give "
            f"{' and '.join(instead)}, or fetch them where there is a network"
        )
