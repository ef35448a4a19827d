"""Every configuration composes, is checked before torch loads, and gives clear errors."""

import json
import subprocess
import sys
from dataclasses import asdict
from itertools import zip_longest

import pytest
from omegaconf import OmegaConf

from infer.config import TargetConfig
from infer.main import INSTALLED_COMMANDS
from infer.utils.hydra_app import CONFIG_FOLDER, compose_checked_options, run_command
from infer.utils.renamed_options import rename_old_options
from train.config import TrainConfig


def composed(name: str, overrides: list[str]):
    """Return the checked options of a command."""
    return compose_checked_options(name, INSTALLED_COMMANDS[name].import_options_class(), overrides)


def group_choices(group: str) -> list[str]:
    """Return the names of the files in a group of conf/."""
    return sorted(file.stem for file in (CONFIG_FOLDER / group).glob("*.yaml"))


@pytest.mark.parametrize(
    "name",  # "study" composes every variant, which is slow
    [
        pytest.param(name, marks=[pytest.mark.robustness] if name == "study" else [])
        for name in INSTALLED_COMMANDS
    ],
)
def test_entry_configs_compose(name):
    composed(name, [])


@pytest.mark.robustness
def test_every_group_option_composes(repo):
    targets = group_choices("target")
    for target in targets:
        config = OmegaConf.merge(
            TargetConfig, OmegaConf.load(CONFIG_FOLDER / "target" / f"{target}.yaml")
        )
        assert target == "hf" or config.path.split("/")[-1].lower().startswith(target[:8])
    assert len(targets) >= 20
    losses, others = (
        [f"{group}={option}" for group in groups for option in group_choices(group)]
        for groups in (("objective", "head"), ("drafter", "deepspeed", "optim", "evaluation"))
    )
    assert len(losses) >= 17 and len(others) >= 13
    for loss, other in zip_longest(losses, others, fillvalue="seed=1"):
        head = ["head=selector"][: loss.endswith("=dflash2")]  # this loss needs a head
        composed("train", ["data=stdlib", "optim=dflash", loss, *head, other])
    composed("data", ["data=jsonl", f"data.path={repo / 'README.md'}"])
    for data in ("ultrachat", "sharegpt"):
        assert composed("data", [f"data={data}"]).data.source == "hub"
    mixture = composed(
        "data", ["data=mixture", "data.datasets=[{path: a.jsonl, weight: 2}, {path: b, split: x}]"]
    )
    assert [(part.path, part.split, part.weight) for part in mixture.data.datasets] == [
        ("a.jsonl", "train", 2),
        ("b", "x", 1),
    ]
    for option in group_choices("decoding"):
        composed("generate", [f"decoding={option}"])
    for suite in group_choices("suite"):
        folder = [] if suite != "files" else [f"suite.folder={repo / 'data' / 'embedded'}"]
        composed("eval", [f"suite={suite}", *folder])


def test_a_suite_has_the_papers_settings_and_they_can_be_overridden():
    config = composed("eval", ["suite=ddtree"])
    assert config.evaluation.max_new_tokens == 2048 and config.evaluation.budgets[-1] == 1024
    assert list(config.suite.temperatures) == [0.0, 1.0] and not config.suite.thinking
    config = composed(
        "eval", ["suite=ddtree", "evaluation.max_new_tokens=64", "suite.max_questions=3"]
    )
    assert (config.evaluation.max_new_tokens, config.suite.max_questions) == (64, 3)
    assert composed("eval", []).suite.name is None


@pytest.mark.parametrize("model", ["default", "qwen3-4b"])
def test_a_model_preset_matches_the_committed_file(repo, model, capsys):
    """A change shows in review. Update the file with the output of --cfg job."""
    overrides = [] if model == "default" else [f"+model={model}"]
    composed("train", overrides)
    run_command("train", TrainConfig, None, [*overrides, "--cfg", "job"])
    assert capsys.readouterr().out == (repo / "tests" / "golden" / f"{model}.yaml").read_text()


def test_every_model_is_composed_as_before_hydras_own_command_line(repo):
    """tests/golden/models.json is what the code of 4e0af7d composed: every file of conf/model, and
    Qwen3 4B by both recipes. Options that were renamed since are translated. Since then,
    evaluation.budgets of large models became 15 to 255, because of the tiles of GPU kernels."""
    expected = json.loads((repo / "tests" / "golden" / "models.json").read_text())
    assert {name for name in expected if " " not in name} == {"default", *group_choices("model")}
    for name, options in expected.items():
        model, *recipes = name.split()
        if not {*recipes} <= {*group_choices("recipe")}:  # of an optional package that was deleted
            continue
        overrides = [f"+recipe={recipe}" for recipe in recipes]
        if model != "default":
            overrides.append(f"+model={model}")
        if model in ("hf", "smollm2"):  # these presets need a target or data
            overrides += {"hf": ["target.path=/model"], "smollm2": [f"data.path={__file__}"]}[model]
            options["target" if model == "hf" else "data"]["path"] = overrides[-1].partition("=")[2]
        options = rename_old_options(options)
        del options["data"]["bad_rows"]
        options["data"]["max_invalid_fraction"] = 0.05
        options["optim"]["clock"] = "wall"
        assert json.loads(json.dumps(asdict(composed("train", overrides)))) == options, name


def test_every_experiment_composes_alone_and_over_a_model(tmp_path):
    """It overrides the model's preset, and arguments override it, in any order."""
    (tmp_path / "answers.jsonl").write_text('{"text": "x"}\n')
    required = ["target=./model", f"data={tmp_path}/answers.jsonl", "drafter.init=embedded"]
    assert group_choices("experiment") == ["fine-tune", "objectives"]
    for experiment in group_choices("experiment"):
        composed("train", [f"+experiment={experiment}"])
        config = composed(
            "train", ["optim.epochs=3", f"+experiment={experiment}", "+model=hf", *required]
        )
        assert (config.name, config.anchors_per_document) == (f"{experiment}-dflash", 512)
        assert config.optim.epochs == 3 and config.target.path == "./model"


def test_the_preset_of_any_model_asks_for_its_target():
    assert composed("train", ["+model=hf", "target.path=/some/folder"]).anchors_per_document == 512
    with pytest.raises(ValueError, match=r"target\.path"):
        composed("train", ["+model=hf"])


@pytest.mark.robustness
@pytest.mark.parametrize("model", ["qwen3-4b", "smollm2"])
def test_every_objective_composes_with_every_bundle(model):
    """`gamma` belongs to the objective: a preset's value for one does not affect another."""
    for objective in group_choices("objective"):
        head = ["head=selector"] * (objective == "dflash2")
        arguments = ["data=stdlib", f"objective={objective}", *head]
        with_preset = composed("train", [f"+model={model}", *arguments])
        alone = composed("train", arguments)
        assert with_preset.objective == alone.objective
    assert (
        composed("train", ["+model=smollm2", "data=stdlib"]).objective.gamma == 4.0
    )  # blocks of 8


def test_a_recipe_changes_what_a_models_bundle_says():
    """In any order; arguments override both."""

    def compose(*arguments: str) -> TrainConfig:
        return composed("train", [*arguments])

    dspark = compose("optim.epochs=2", "+recipe=dspark", "+model=qwen3-4b")
    assert dspark == compose("+model=qwen3-4b", "+recipe=dspark", "optim.epochs=2")
    assert (dspark.target.path, dspark.anchors_per_document) == ("Qwen/Qwen3-4B", 512)
    drafter = dspark.drafter
    objective = dspark.objective
    assert (drafter.layers, drafter.block_size, drafter.sample_from_anchor, drafter.head.rank) == (
        5,
        8,
        True,
        256,
    )
    assert (
        drafter.head.name == "markov" and drafter.head.confidence_head and dspark.optim.epochs == 2
    )
    assert (objective.divergence, objective.position_weights, objective.gamma) == (
        "ce_l1",
        "exponential",
        4.0,
    )


def test_the_recipe_of_dart():
    dart = composed("train", ["+model=qwen3-4b", "+recipe=dart"])
    assert (dart.drafter.family, dart.drafter.layers, dart.data.length, dart.optim.lr) == (
        "dart",
        1,
        6400,
        2e-5,
    )
    assert (
        composed("train", ["+model=smollm2", "+recipe=dart", "data=stdlib"]).objective.gamma == 0.6
    )
    assert (dart.objective.position_weights, dart.objective.gamma, dart.optim.epochs) == (
        "gamma",
        0.6,
        3.0,
    )


@pytest.mark.parametrize(
    "bundle, millions",
    [
        ("qwen3-1.7b", 1_721),
        ("qwen3-8b", 8_191),
        ("qwen3-32b", 32_762),
        ("qwen3-coder-30b-a3b", 30_532),
    ],
)
def test_sizes_for_planning_match_the_models(bundle, millions):
    """Compared with the published parameter counts."""
    from train.plan import StepSizes, load_target_config

    target = OmegaConf.to_container(OmegaConf.load(CONFIG_FOLDER / "target" / f"{bundle}.yaml"))
    config = TrainConfig(target=TargetConfig(**target))
    shape = StepSizes(config, load_target_config(config))
    assert round(shape.target_parameters / 1e6) == millions


def test_wrong_configuration_is_one_sentence_and_exit_2(start_command):
    output = start_command("train/main.py", ["optim.lr=-1"]).finish(code=2)
    assert output == "error: optim.lr=-1.0: must be above 0\n"


def test_composing_and_checking_load_no_torch(repo):
    code = (
        "import sys\n"
        "from infer.utils.hydra_app import run_command\n"
        "from train.config import TrainConfig\n"
        "run = lambda options: print('torch' in sys.modules, options.drafter.layers)\n"
        "run_command('plan', TrainConfig, run, ['+model=qwen3-4b'])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=repo, capture_output=True, text=True, timeout=60
    )
    assert result.stdout.split() == ["False", "5"], result.stderr


def test_without_the_hub_the_error_names_the_model_and_the_option(start_command, tmp_path):
    output = start_command("train/main.py", ["+model=qwen3-4b", f"runs_dir={tmp_path}"]).finish(
        code=2
    )
    sentence = [line for line in output.splitlines() if line.startswith("error: ")]
    assert len(sentence) == 1
    assert "Qwen/Qwen3-4B" in sentence[0]
    assert "target.path=" in sentence[0]
    assert "Traceback" not in output
    assert not list(tmp_path.iterdir())
