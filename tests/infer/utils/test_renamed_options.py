"""Old names of options: refused on the command line with the new name, translated in saved
configurations."""

import json
from dataclasses import fields, is_dataclass

import pytest

from infer.main import INSTALLED_COMMANDS
from infer.utils.hydra_app import run_command
from infer.utils.renamed_options import RENAMED_OPTIONS, rename_old_options

# Commands that have the options without a section, and the values that the others take.
COMMAND_OF_OPTION = {
    "store": "features",
    "at_once": "regenerate",
    "capacity": "regenerate",
    "threshold": "ngram",
    "start": "diffusion",
    "batch": "diffusion",
}
COMMAND_OF_SECTION = {
    "decoding": "generate",
    "masked": "generate",
    "suite": "eval",
    "server": "serve",
    "questions": "regenerate",
}


def command_of(old_name: str) -> str:
    """Return a command that had the option."""
    section = old_name.partition(".")[0]
    return COMMAND_OF_OPTION.get(old_name) or COMMAND_OF_SECTION.get(section, "train")


def option_names(options_class: type, prefix: str = "") -> set[str]:
    """Return the full names of a command's options."""
    names = set()
    for field in fields(options_class):
        names.add(prefix + field.name)
        if is_dataclass(field.type):
            names |= option_names(field.type, f"{prefix}{field.name}.")
    return names


@pytest.mark.parametrize("old_name", RENAMED_OPTIONS)
@pytest.mark.parametrize("plus", ["", "+"])
def test_an_old_name_is_refused_with_the_new_one(old_name, plus, capsys):
    new_name = RENAMED_OPTIONS[old_name]
    command = command_of(old_name)
    options_class = INSTALLED_COMMANDS[command].import_options_class()
    assert new_name in option_names(options_class)
    assert old_name not in option_names(options_class)

    with pytest.raises(SystemExit) as end:
        run_command(command, options_class, None, [f"{plus}{old_name}=1"])

    assert end.value.code == 2
    assert f"{old_name} has been renamed; use {new_name}\n" in capsys.readouterr().err


def test_an_old_name_in_a_file_of_the_users_own_is_refused_too(tmp_path, capsys):
    (tmp_path / "experiment").mkdir()
    experiment = "# @package _global_\noptim:\n  batch: 3\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(experiment)
    arguments = ["--config-dir", str(tmp_path), "+experiment=mine"]
    with pytest.raises(SystemExit):
        run_command("train", INSTALLED_COMMANDS["train"].import_options_class(), None, arguments)
    assert "optim.batch has been renamed; use optim.batch_size" in capsys.readouterr().err


def test_a_saved_configuration_is_translated(repo):
    """What 4e0af7d wrote has, translated, only names that options have today, or that options had
    which are gone."""
    removed = {"data.bad_rows"}
    known = option_names(INSTALLED_COMMANDS["train"].import_options_class())
    saved = json.loads((repo / "tests" / "golden" / "models.json").read_text())
    for config in saved.values():
        translated = rename_old_options(config)
        names = set(translated)
        for section, options in translated.items():
            if isinstance(options, dict):
                names |= {f"{section}.{name}" for name in options}
        assert names - removed <= known
        assert translated["optim"]["batch_size"] == config["optim"]["batch"]
        assert translated["drafter"]["head"]["hidden_size"] == config["drafter"]["head"]["hidden"]
        assert rename_old_options(translated) == translated
