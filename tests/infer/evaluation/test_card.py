"""The card of an exported drafter: what the hub reads, the measured numbers and no others, nothing
private."""

import json
import re
import shutil
from dataclasses import asdict, replace
from xml.etree import ElementTree

import pytest
import torch
from huggingface_hub import ModelCard
from huggingface_hub.utils import validate_repo_id

from data.prompts import Prompt
from infer import save_drafter
from infer.cli.export import ExportCommand, run as run_export
from infer.config import DrafterConfig, EvaluationConfig
from infer.drafters.build import create_drafter
from infer.evaluation.card import CHART_FILE_NAME, list_training_options, write_card
from infer.evaluation.evaluate import evaluate
from infer.evaluation.results import write_result
from train.config import TrainConfig

SECRET_FOLDER = "/home/secret/folder"


@pytest.fixture(scope="module")
def checkpoint(make_tiny, tmp_path_factory):
    """A run's best checkpoint, as training leaves it, in folders and under names that are nobody's
    business."""
    target, drafter = make_tiny(block_size=4)
    target.name = f"{SECRET_FOLDER}/Qwen3-4B"
    run = tmp_path_factory.mktemp("secret-run")
    step = run / "checkpoints" / "step-00000007"
    save_drafter(drafter.config, drafter.state_dict(), step / "drafter")
    (run / "checkpoints" / "best").symlink_to(step.name)
    prompts = torch.randint(90, (3, 6), generator=torch.Generator().manual_seed(0)).tolist()
    options = EvaluationConfig(max_new_tokens=12, budgets=[4, 9])
    result = evaluate(target, drafter, [Prompt(prompt, "any") for prompt in prompts], options)
    (step / "evaluation").mkdir()
    result = replace(result, step=7, checkpoint=str(step), drafter="secret-run")
    write_result(step / "evaluation" / "evaluation.json", result)
    config = TrainConfig(
        name="secret-run", runs_dir=SECRET_FOLDER, features=f"{SECRET_FOLDER}/features"
    )
    config.target.path = f"{SECRET_FOLDER}/Qwen3-4B"
    config.target.chat_template_kwargs = {"enable_thinking": False}
    config.data.source = "jsonl"
    config.data.path = f"{SECRET_FOLDER}/secret.jsonl"
    config.evaluation.ngrams = f"{SECRET_FOLDER}/secret.ngrams"
    config.drafter.init = f"{SECRET_FOLDER}/drafter"
    (run / "config.json").write_text(json.dumps(asdict(config)))
    return run / "checkpoints" / "best"


def exported(checkpoint, folder):
    """The drafter in a folder of its own, as an export leaves it."""
    shutil.copytree(checkpoint / "drafter", folder, dirs_exist_ok=True)
    return folder


def test_the_card_holds_the_evaluations_numbers_and_what_the_hub_wants(checkpoint, tmp_path):
    path = write_card(
        checkpoint, exported(checkpoint, tmp_path / "new"), "Apache-2.0", "Qwen/Qwen3-4B"
    )
    assert path == tmp_path / "new" / "README.md"
    assert ElementTree.parse(path.parent / CHART_FILE_NAME).getroot().tag.endswith("svg")
    card = ModelCard.load(path)
    validate_repo_id(card.data.base_model)
    assert card.data.to_dict() == {
        "base_model": "Qwen/Qwen3-4B",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["speculative-decoding", "block-diffusion", "draft-model", "dflash"],
    }
    evaluation = json.loads((checkpoint / "evaluation" / "evaluation.json").read_text())
    table = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in card.text.split("\n")
        if line.endswith("yes |")
    ]
    assert table == [
        [
            name,
            f"{m['tau']:.2f}",
            f"{m['tokens_per_second']:.1f}",
            f"{m['speedup']:.2f}x{'~' * (m['name'] not in ('plain', 'generate'))}",
            "yes",
        ]
        for name, m in zip(
            ("plain", "transformers", "chain", "DDTree 4", "DDTree 9"),
            evaluation["methods"][:-1],
            strict=True,
        )
    ]
    assert evaluation["methods"][-1]["name"] == "n-grams alone"  # an exported folder has none
    assert f"({CHART_FILE_NAME})" in card.text
    assert "used 3 held-out prompts, one at a time, with at most 12 new tokens" in card.text
    assert (
        "has 2 layers and block size 4. It reads the outputs of the target's layers 1, 3"
        in card.text
        and "the checkpoint of step 7." in card.text
    )
    assert "| optim.lr | 0.0006 |" in card.text and "| anchors_per_sequence | 64 |" in card.text
    assert "| steps taken | 7 |" in card.text and "optim.steps" not in card.text
    assert "| target.chat_template_kwargs | {'enable_thinking': False} |" in card.text
    served = re.search(r"vllm serve Qwen/Qwen3-4B --speculative-config '(.*)'", card.text)
    assert json.loads(served[1])["num_speculative_tokens"] == 3
    assert (
        "--speculative-algorithm DFLASH" in card.text
        and "--speculative-num-draft-tokens 4" in card.text
    )
    assert "./launch.sh serve target.path=Qwen/Qwen3-4B" in card.text


@pytest.mark.parametrize(
    "options, expected",
    [
        ({}, "epochs"),
        ({"steps": 1600}, "steps"),
        ({"steps": 1600, "max_minutes": 4.0}, "max_minutes"),
    ],
)
def test_a_card_says_what_set_the_runs_length_and_the_steps_taken(checkpoint, options, expected):
    config = json.loads((checkpoint.resolve().parent.parent / "config.json").read_text())
    config["optim"] |= options
    names = [name for name, _ in list_training_options(config, checkpoint.resolve())]
    assert [name for name in ("epochs", "steps", "max_minutes") if f"optim.{name}" in names] == [
        expected
    ]


def test_no_path_and_no_private_name_is_in_it(checkpoint, tmp_path):
    for base in ("Qwen/Qwen3-4B", f"{SECRET_FOLDER}/Qwen3-4B", "embedded"):
        text = write_card(checkpoint, exported(checkpoint, tmp_path), None, base).read_text()
        assert "secret" not in text and str(checkpoint.resolve()) not in text
        assert not re.search(r"(?<![\w:/.)])/\w", text), "an absolute path"
        assert "Training data: files of the publisher's own." in text
        if base != "Qwen/Qwen3-4B":
            assert ModelCard(text).data.base_model is None and "its target model" in text


def test_a_licence_is_what_the_publisher_says(checkpoint, tmp_path):
    text = write_card(checkpoint, exported(checkpoint, tmp_path), None, "Qwen/Qwen3-4B").read_text()
    assert ModelCard(text).data.license is None and "stated no licence" in text


def test_what_is_not_known_is_not_claimed(checkpoint, tmp_path):
    """A drafter folder alone: no evaluation, no run."""
    alone = exported(checkpoint, tmp_path / "alone")
    text = write_card(
        alone, exported(checkpoint, tmp_path / "out"), "mit", "Qwen/Qwen3-4B"
    ).read_text()
    assert "This checkpoint was not measured." in text
    assert "does not record how it was trained" in text
    assert (
        not (tmp_path / "out" / CHART_FILE_NAME).exists()
        and "speedup" not in text
        and ".svg" not in text
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="contains no readable drafter"):
        write_card(checkpoint, tmp_path / "empty", None, "Qwen/Qwen3-4B")


def test_only_engines_that_would_load_it_are_named(checkpoint, tmp_path):
    folder = exported(checkpoint, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    del config["num_target_layers"]  # SGLang would guess it, and guess wrong
    (folder / "config.json").write_text(json.dumps(config))
    text = write_card(checkpoint, folder, None, "Qwen/Qwen3-4B").read_text()
    assert "sglang" not in text and "vllm serve" in text


def test_an_export_has_a_card(embedded, tmp_path, monkeypatch):
    """`./launch.sh export`, with the licence and the name that the publisher gives to the
    target."""
    monkeypatch.setattr("infer.formats.export.load_config", lambda name: embedded.model.config)
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), embedded)
    drafter.init_weights(torch.Generator().manual_seed(0))
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "drafter")
    command = ExportCommand(
        str(tmp_path), out=str(tmp_path / "out"), license="mit", base_model="someone/target"
    )
    command.check()
    run_export(command)
    card = ModelCard.load(tmp_path / "out" / "README.md")
    assert (card.data.license, card.data.base_model) == ("mit", "someone/target")
    command = ExportCommand(str(tmp_path), "speculators", out=str(tmp_path / "other"))
    run_export(command)
    card = ModelCard.load(tmp_path / "other" / "README.md")
    assert (
        card.data.base_model is None
        and "vllm serve path/to/target" in card.text
        and "sglang" not in card.text
    )


def test_data_sets_of_the_hub_are_named(checkpoint, tmp_path):
    run = checkpoint.resolve().parent.parent / "config.json"
    before = run.read_text()
    config = json.loads(before)
    sources = [
        {"path": "someone/chats", "split": "train", "weight": 2.0},
        {"path": "mine.jsonl", "weight": 1.0},
    ]
    config["data"] |= {"source": "mixture", "parts": sources}
    config["drafter"]["init"] = "someone/first"
    try:
        run.write_text(json.dumps(config))
        card = ModelCard.load(
            write_card(checkpoint, exported(checkpoint, tmp_path), None, "Qwen/Qwen3-4B")
        )
    finally:
        run.write_text(before)
    assert card.data.datasets == ["someone/chats"]
    assert (
        "someone/chats (weight 2); files of the publisher's own (weight 1). Training started from "
        "the weights of someone/first."
    ) in card.text


def test_dart_is_served_by_those_who_read_it(make_tiny, tmp_path):
    _, drafter = make_tiny(family="dart")
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    card = ModelCard.load(write_card(tmp_path, tmp_path, None, "Qwen/Qwen3-4B"))
    assert (
        "vllm" not in card.text and "sglang" not in card.text and "./launch.sh serve" in card.text
    )
    assert "dart" in card.data.tags
