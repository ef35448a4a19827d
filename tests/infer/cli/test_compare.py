"""The commands `ngram` and `compare`."""

import json
from collections import Counter

import numpy as np
import pytest
import torch

from data.rows import DataConfig
from infer import save_drafter
from infer.api import decode_prompts
from infer.cli.compare import CompareCommand, get_drafter_label, run as run_compare
from infer.cli.ngram import NgramCommand, run as run_ngram
from infer.config import DecodeOptions, DrafterConfig, EvaluationConfig, TargetConfig
from infer.drafters.build import create_drafter
from infer.ngrams.model import NGramModel, find_ngram_node, get_node_count
from infer.targets.loading import load_configured_target

HELD_OUT_TEXT = "one row in ten is held out for evaluation and not counted"
COUNTED_TEXTS = [
    "import os\n\ndef read(path):\n    return os.stat(path)\n",
    "class A:\n    def read(self): pass\n",
    "x = 1\n",
]


@pytest.fixture(scope="module")
def embedded(shallow_target):
    """The embedded target's first layers, which are enough for these tests."""
    return shallow_target


@pytest.fixture(scope="module")
def counted(tmp_path_factory, embedded):
    """An n-gram file of a few texts, written by the command."""
    folder = tmp_path_factory.mktemp("counted")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in [HELD_OUT_TEXT, *COUNTED_TEXTS])
    )
    data = DataConfig(source="jsonl", path=str(folder / "texts.jsonl"))
    run_ngram(NgramCommand(out=str(folder / "new" / "texts.ngrams"), order=4, data=data))
    return folder / "new" / "texts.ngrams"


def test_the_command_counts_the_training_data(counted, embedded):
    model = NGramModel.open(counted, embedded.tokenizer_digest)
    expected = Counter()
    for text in COUNTED_TEXTS:
        ids = [*embedded.tokenizer(text)["input_ids"], embedded.tokenizer.eos_token_id]
        for order in range(1, 5):
            expected.update(tuple(ids[i : i + order]) for i in range(len(ids) - order + 1))
    assert len(expected) > 100
    assert model.num_tokens == sum(count for ids, count in expected.items() if len(ids) == 1)
    for ids, count in expected.items():
        assert (
            get_node_count(
                model.trie, find_ngram_node(model.trie, np.array(ids, np.int64), 0, len(ids))
            )
            == count
        )
    assert (model.order, model.vocabulary) == (4, 512)


def test_an_ngram_file_of_another_tokenizer_is_refused_by_name(counted, embedded, shallow, ngrams):
    drafter = create_drafter(DrafterConfig(layers=1), embedded)
    drafter.init_weights(torch.Generator().manual_seed(0))
    options = DecodeOptions(4, ngrams=str(counted))
    assert len(decode_prompts(embedded, drafter, [[1, 2, 3]], options)[0].ids) == 4
    with pytest.raises(
        ValueError, match=r"tiny\.ngrams: these n-grams were counted with another tokenizer"
    ):
        decode_prompts(embedded, drafter, [[1, 2, 3]], DecodeOptions(4, ngrams=str(ngrams)))


@pytest.mark.robustness
def test_every_drafter_is_evaluated_with_every_tree_method(
    counted, shallow, embedded, tmp_path, monkeypatch, capsys
):
    checkpoints = []
    target = embedded
    loaded = []

    def record_and_open(target_config):
        loaded.append(target_config)
        return load_configured_target(target_config)

    monkeypatch.setattr("infer.targets.loading.load_configured_target", record_and_open)
    for family in ("dflash", "dart"):
        drafter = create_drafter(DrafterConfig(family=family, layers=1, block_size=5), target)
        drafter.initialize(target, torch.Generator().manual_seed(0), warm_start=True)
        folder = tmp_path / family / "checkpoints" / "best"
        save_drafter(drafter.config, drafter.state_dict(), folder / "drafter")
        checkpoints.append(str(folder))
    sizes = {
        "prompts": 1,
        "external_prompts": 0,
        "max_prompt_tokens": 16,
        "max_new_tokens": 8,
        "budgets": [4],
        "sampling_temperature": None,
    }
    evaluation = EvaluationConfig(**sizes, ngrams=str(counted))
    checkpoints.append("lookup")
    data = DataConfig(source="jsonl", path=str(counted.parent.parent / "texts.jsonl"))
    command = CompareCommand(
        checkpoints,
        str(tmp_path / "out"),
        target=TargetConfig(str(shallow)),
        data=data,
        evaluation=evaluation,
    )
    command.check()
    run_compare(command)
    assert len(loaded) == 1  # once for all drafters
    table = (tmp_path / "out" / "comparison.md").read_text().splitlines()
    assert table[0] in capsys.readouterr().out
    methods = [
        "plain",
        "transformers",
        "chain",
        "DDTree 4",
        "continuity 4",
        "DDTree + n-grams 4",
        "n-grams alone 4",
    ]
    assert [line.split("|")[1].strip() for line in table[2:9]] == methods
    assert all(line.count("|") == 11 for line in table[:9])
    assert (tmp_path / "out" / "comparison.svg").read_text().startswith("<svg xmlns")
    results = json.loads((tmp_path / "out" / "comparison.json").read_text())
    assert list(results) == ["dflash", "dart", "lookup"]
    for result in results.values():
        assert all(method["identical"] for method in result["methods"])


def test_checkpoints_have_the_names_of_their_runs():
    assert (
        get_drafter_label("runs/mine/checkpoints/best")
        == get_drafter_label("/a/mine/checkpoints/step-00000003")
        == "mine"
    )
    assert get_drafter_label("some/folder") == "folder"
    with pytest.raises(ValueError, match="same run name"):
        CompareCommand(["runs/a/checkpoints/best", "runs/a/checkpoints/step-1"]).check()
    with pytest.raises(ValueError, match="checkpoints is empty"):
        CompareCommand([]).check()
