"""From the command line to a checked dataclass: Hydra composes, types are enforced, and no DictConfig survives.

Used by the `main.py` stubs only; the rest of `infer` needs no Hydra.
"""

import math
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache, reduce
from itertools import takewhile
from pathlib import Path

from infer.utils import overrides as typed
from infer.utils.help import help_text
from infer.utils.hub import refrain_from_silent_hub
from infer.utils.interrupts import INTERRUPTS, interrupted
from infer.utils.progress import HEARTBEAT
from infer.utils.redact import redact_text

# Before torch is imported: its threads (GNU OpenMP's) spin while they wait, and two commands side by side take three
# times as much processor time for it.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

CONF = Path(__file__).resolve().parent.parent.parent / "conf"
# By group the option that has the dataclass's own defaults, and so no file.
OWN_DEFAULTS = {
    "decoding": "ddtree",
    "deepspeed": "zero0",
    "drafter": "dflash-small",
    "evaluation": "default",
    "objective": "annealed-kl",
    "target": "embedded",
}
LONGEST_SENTENCE = 500  # characters
LARGEST = 2**62  # of a whole number: seeds and counts are 64 bits
STOPPED = 3  # exit code of what was begun and could not go on


class Stopped(Exception):
    """Raised to end what has begun; the message is one sentence that says why."""


def command_line() -> str:
    """Return this process's command as it was typed, for a report; without secrets."""
    programs = {"main.py": "", "infer.main": "", "train.main": "train", "blockdraft": ""}
    words = sys.orig_argv
    at = next((i for i, word in enumerate(words) if Path(word).name in programs), 0)
    command = "train" if Path(words[at]).parent.name == "train" else programs.get(Path(words[at]).name, "")
    return redact_text(shlex.join(["./launch.sh", *filter(None, [command]), *words[at + 1 :]]))


def entry(name: str, schema: type, run: Callable[[object], object], arguments: list[str] | None = None) -> None:
    """Compose conf/<name>.yaml with the overrides, check it against the dataclass `schema`, and call `run(config)`.

    Whatever the user got wrong is one sentence on stderr and exit code 2, before anything heavy is imported; the same
    goes for a ValueError or FileNotFoundError out of `run` (a missing model, say), and with exit code 3 for a Stopped
    and for other errors of files.
    Ctrl-C is one sentence and exit code 130, see `going_on`.
    `--help` explains every key, `--cfg job` prints the configuration.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if {"--help", "-h"} & set(arguments):
            return explain(name, schema, [argument for argument in arguments if not argument.startswith("-")])
        if any(argument.split("=")[0] in ("--cfg", "-c") for argument in arguments):
            return show(name, schema, arguments)
        config = composed(name, schema, arguments)
        HEARTBEAT.begin()
        INTERRUPTS.begin()
        refrain_from_silent_hub(values(config))
        run(config)
    except (ValueError, FileNotFoundError) as error:
        fail(str(error))
    except Stopped as error:
        fail(str(error), STOPPED)
    except OSError as error:  # of a disk that is full or read-only, say
        fail(f"{error.strerror or sentence(error)}" + (f": {error.filename}" if error.filename else ""), STOPPED)
    except KeyboardInterrupt as error:
        interrupted(error)
    finally:
        HEARTBEAT.at(None)


def explain(name: str, schema: type, arguments: list[str]) -> None:
    """Print the help of a command, with the defaults that the arguments, a bundle of settings say, give."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    try:
        defaults = composed(name, schema, arguments)
    except ValueError:  # a key that has no default: there is nothing to refuse yet
        defaults = schema()
    prepare(name, schema)
    with initialize_config_dir(version_base=None, config_dir=str(CONF)):
        loader = GlobalHydra.instance().config_loader()
        options = {group: loader.get_group_options(group) for group in sorted(groups_of_conf())}
    print(help_text(name, schema, defaults, options))


def show(name: str, schema: type, arguments: list[str]) -> None:
    """Print the configuration that the arguments stand for."""
    from omegaconf import OmegaConf

    arguments = [argument for argument in arguments if "=" in argument and not argument.startswith("-")]
    refuse_hydra_settings(arguments)
    typed.check_keys(schema, arguments, groups_of_conf())
    settings = typed.run_overrides(schema, merged(name, schema, arguments), arguments)
    print(OmegaConf.to_yaml(composition(name, schema, [*settings, *arguments])))


def groups_of_conf() -> set[str]:
    """Return the groups that an option may be chosen from."""
    return {"model", *OWN_DEFAULTS, *(folder.name for folder in CONF.iterdir() if folder.is_dir())}


@contextmanager
def going_on(how: str) -> Iterator[None]:
    """Give Ctrl-C within the block a sentence that says what is kept and how to go on."""
    try:
        yield
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt(how) from error


@contextmanager
def disk(what: str) -> Iterator[None]:
    """Raise Stopped, one sentence, for an error of writing: a disk that is full, read-only or gone."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        where = f" ({error.filename})" if getattr(error, "filename", None) else ""
        why = getattr(error, "strerror", None) or str(error)
        raise Stopped(
            f"{what} could not be written: {why}{where}; what was saved before is whole, and the same command goes on "
            "from there"
        ) from error


def refuse_hydra_settings(arguments: list[str]) -> None:
    """Raise ValueError for `hydra.run.dir`, `hydra/launcher` and the like, which nothing here reads."""
    for argument in arguments:
        if argument.lstrip("+~").startswith(("hydra.", "hydra/")):
            raise ValueError(f"{argument.split('=')[0]}: Hydra's own settings have no effect here, leave it out")


@cache
def prepare(name: str, schema: type) -> None:
    """Tell Hydra what has no file: the schema, the options with its defaults, and model=NAME for every target, which is
    the bundle conf/model/hf.yaml with that target. Hide the environment: it holds keys, and configurations are logged.
    """
    from hydra.core.config_store import ConfigStore
    from omegaconf import OmegaConf

    def closed(*names: str) -> None:
        raise ValueError("a configuration does not read the environment: give the value itself")

    store = ConfigStore.instance()
    store.store(name=f"{name}_schema", node=schema)
    if not (CONF / f"{name}.yaml").exists():
        store.store(name=name, node={"defaults": [f"{name}_schema"]})
    for group, option in OWN_DEFAULTS.items():
        store.store(group=group, name=option, node={})
    for target in {file.stem for file in (CONF / "target").glob("*.yaml")} - {"hf"}:
        bundle = {"defaults": ["hf", {"override /target": target}], "name": target + "-${drafter.family}"}
        store.store(group="model", name=target, node=bundle, package="_global_")
    OmegaConf.register_new_resolver("oc.env", closed, replace=True)


def composed(name: str, schema: type, arguments: list[str]):
    """Return conf/<name>.yaml with the overrides as a checked `schema`, whose `check()` raises ValueError for
    impossible combinations. Raises ValueError, one sentence, for whatever is wrong."""
    refuse_hydra_settings(arguments)
    typed.check_keys(schema, arguments, groups_of_conf())
    config = merged(name, schema, arguments)
    if settings := typed.run_overrides(schema, config, arguments):
        config = merged(name, schema, [*settings, *arguments])
    try:
        check_values(config)
        config.check()
    except (ValueError, OSError) as error:
        raise ValueError(sentence(error)) from error
    return config


def composition(name: str, schema: type, arguments: list[str]):
    """Return conf/<name>.yaml with the overrides as Hydra composes it."""
    import hydra

    prepare(name, schema)
    with hydra.initialize_config_dir(version_base=None, config_dir=str(CONF)):
        return hydra.compose(config_name=name, overrides=typed.hydra_overrides(schema, arguments))


def merged(name: str, schema: type, arguments: list[str]):
    """Return conf/<name>.yaml with the overrides as a `schema`, its values not yet checked. Raises ValueError."""
    from omegaconf import OmegaConf

    texts = typed.free_texts(schema, arguments)  # they never enter the configuration, where ${x} would be looked up
    rest = [argument for argument in arguments if argument.partition("=")[0].lstrip("+") not in texts]
    try:
        config = composition(name, schema, rest)
        # once more, as plain values, onto the schema: `+optim.lrr=1` composes, and must not be silently useless
        plain = OmegaConf.to_container(config, resolve=True)
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(schema), plain))
    except Exception as error:  # of any kind: OmegaConf lets its own AttributeErrors and the like through
        raise ValueError(sentence(error)) from error
    for key, text in texts.items():
        *parts, last = key.split(".")
        setattr(reduce(getattr, parts, config), last, text)
    typed.expand_home(config)
    return config


def check_values(config: object) -> None:
    """Raise ValueError for a value that makes no sense for any key: nan, infinity, a number beyond 64 bits, a text that
    is not UTF-8 or holds a null byte."""
    for name, value in values(config):
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: a finite number")
        if isinstance(value, int) and not -LARGEST < value < LARGEST:
            raise ValueError(f"{name}: a whole number of at most 62 bits")
        if isinstance(value, str):
            try:
                value.encode()
            except UnicodeEncodeError:
                raise ValueError(f"{name}={ascii(value)}: not UTF-8") from None
            if "\0" in value:
                raise ValueError(f"{name}={ascii(value)}: holds a null byte")


def values(config: object, name: str = "") -> Iterator[tuple[str, object]]:
    """Yield (key, value) of all values in a dataclass, its lists and dictionaries. ValueError for nested lists."""
    if is_dataclass(config):
        inside = ((field.name, getattr(config, field.name)) for field in fields(config))
    elif isinstance(config, dict):
        inside = config.items()
    elif isinstance(config, (list, tuple)):
        if any(isinstance(value, (list, tuple, dict)) for value in config):  # OmegaConf lets them through
            raise ValueError(f"{name}={config}: a list of single values")
        inside = enumerate(config)
    else:
        yield name, config
        return
    for key, value in inside:
        yield from values(value, f"{name}.{key}" if name else str(key))


def sentence(error: BaseException) -> str:
    """Return the first line of an error and of its cause as one sentence, with the available choices."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if type(error) is ValueError:  # ours: lines of a value, not of the message
        lines = [" ".join(lines)]
    keys = [line.split(":", 1)[1].strip() for line in lines if line.strip().startswith("full_key:")]
    parts = [key for key in keys if key and key not in lines[0]] + [lines[0]]
    if error.__cause__ is not None and str(error.__cause__).strip():
        parts.append(str(error.__cause__).strip().splitlines()[0])
    for i, line in enumerate(lines):
        if line.startswith("Available options"):
            options = takewhile(lambda line: line.startswith("\t"), lines[i + 1 :])
            parts.append("there is " + ", ".join(option.strip() for option in options))
    whole = ": ".join(part.rstrip(". :") for part in parts)
    return whole if len(whole) <= LONGEST_SENTENCE else f"{whole[: LONGEST_SENTENCE // 2]} ... {whole[-100:]}"


def fail(message: str, code: int = 2) -> None:
    print(f"error: {redact_text(message)}", file=sys.stderr)
    raise SystemExit(code)
