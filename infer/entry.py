"""From the command line to a checked dataclass: Hydra composes, types are enforced, and no DictConfig survives.

Used by the `main.py` stubs only; the rest of `infer` needs no Hydra.
"""

import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

from infer.redact import redact_text

CONF = str(Path(__file__).resolve().parent.parent / "conf")
_HYDRA_FLAGS = (
    "--cfg",
    "-c",
    "--help",
    "-h",
    "--hydra-help",
    "--info",
    "-i",
    "--version",
    "--resolve",
    "--package",
    "-p",
)


STOPPED = 3  # exit code of what was begun and could not go on


class Stopped(Exception):
    """What was begun has to end, for the reason that the message says in one sentence."""


def entry(name: str, schema: type, run: Callable[[object], object], arguments: list[str] | None = None) -> None:
    """Composes conf/<name>.yaml with the overrides, checks it against the dataclass `schema`, and calls `run(config)`.

    `schema` has a `check()` that raises ValueError for impossible combinations. Whatever the user got wrong is
    one sentence on stderr and exit code 2, before anything heavy is imported; the same goes for a ValueError or
    FileNotFoundError out of `run` (a missing model, say), and with exit code 3 for a Stopped. Hydra's own flags
    (`--cfg job`, `--help`) work as usual.
    """
    import hydra
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    arguments = sys.argv[1:] if arguments is None else arguments
    ConfigStore.instance().store(name=f"{name}_schema", node=schema)
    if any(argument.split("=")[0] in _HYDRA_FLAGS for argument in arguments):
        hydra.main(version_base=None, config_path=CONF, config_name=name)(lambda cfg: None)()
        return
    try:
        with hydra.initialize_config_dir(version_base=None, config_dir=CONF):
            composed = hydra.compose(config_name=name, overrides=arguments)
        # once more, as plain values, onto the schema: `+optim.lrr=1` composes, and must not be silently useless
        plain = OmegaConf.to_container(composed, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
        config.check()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        fail(sentence(error))
    try:
        run(config)
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))
    except Stopped as error:
        fail(str(error), STOPPED)


def sentence(error: BaseException) -> str:
    """The first line of an error and of its cause as one sentence, with the choices there are."""
    lines = str(error).strip().splitlines()
    parts = [lines[0]]
    if error.__cause__ is not None and str(error.__cause__).strip():
        parts.append(str(error.__cause__).strip().splitlines()[0])
    for i, line in enumerate(lines):
        if line.startswith("Available options"):
            options = takewhile(lambda line: line.startswith("\t"), lines[i + 1 :])
            parts.append("there is " + ", ".join(option.strip() for option in options))
    return ": ".join(part.rstrip(". :") for part in parts)


def fail(message: str, code: int = 2) -> None:
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
