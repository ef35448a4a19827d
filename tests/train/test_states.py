"""Hidden states that an engine wrote: files of vLLM's layout give the features that our own pass gives."""

import json

import pytest
import torch
from safetensors.torch import save_file

from data.packing import packed_rows
from data.rows import DataConfig
from infer import load_target
from train.config import FeaturesConfig
from train.features import StoredRows, write_features
from train.states import EngineStates, compare, write_documents

LAYERS = (3, 8, 20)


@pytest.fixture(scope="module")
def dataset(embedded):
    config = DataConfig(source="stdlib", length=64, limit=6)
    rows = packed_rows(config, embedded.tokenizer, embedded.tokenizer_digest)
    short = [i for i in range(len(rows)) if rows[i]["documents"].max() > 0]  # of several documents, or with padding
    return rows.select([0, 1, *short[:2]])


def engine_files(target, documents, folder, shift: int = 0) -> None:
    """Write what vLLM writes, from transformers' own outputs: its layer k + 1 is our layer k."""
    folder.mkdir()
    for number, line in enumerate(documents.read_text().splitlines()):
        ids, raw = torch.tensor(json.loads(line)["prompt_token_ids"]), []
        hook = target.body.layers[-1].register_forward_hook(lambda *call, raw=raw: raw.append(call[2]))
        with torch.no_grad():
            found = list(target.model(ids[None], output_hidden_states=True).hidden_states)
        hook.remove()
        found[-1] = raw[0] if isinstance(raw[0], torch.Tensor) else raw[0][0]  # before the final norm
        chosen = [found[layer + 1 - shift][0] for layer in LAYERS] + [found[len(found) - 1][0]]
        tensors = {"hidden_states": torch.stack(chosen, 1).contiguous(), "token_ids": ids}
        save_file(tensors, folder / f"{number}.safetensors")


def test_an_engines_states_are_the_features_of_our_own_pass(embedded, dataset, tmp_path):
    documents = tmp_path / "documents.jsonl"
    count = write_documents(dataset, documents)
    assert count == len(set(documents.read_text().splitlines())) > len(dataset)
    engine_files(embedded, documents, tmp_path / "states")
    states = EngineStates(tmp_path / "states")
    assert compare(states, embedded, LAYERS, [dataset[0], dataset[2]]) < 1e-4

    ends = load_target("embedded", "float32", "cpu", only_layers=())  # the norm alone is ours
    config = DataConfig(source="stdlib", length=64, limit=6)
    folders = []
    for name, target, read in (
        ("own", embedded, None),
        ("engine", ends, lambda row: states.features(ends, LAYERS, row)),
    ):
        options = FeaturesConfig(out=str(tmp_path / name), data=config)
        folders.append(write_features(options, target, LAYERS, dataset, lambda done, total: None, read))
    own, engine = (StoredRows(folder)[list(range(len(dataset)))] for folder in folders)
    real = (own["documents"] >= 0)[..., None]
    for name in ("context", "last"):
        kept = real if name == "last" else real[..., None]
        assert torch.allclose(own[name].float() * kept, engine[name].float() * kept, rtol=0.02, atol=0.02), name
    assert all(torch.equal(own[name], engine[name]) for name in ("ids", "positions", "documents", "loss"))


def test_states_of_other_layers_and_missing_documents_are_named(embedded, dataset, tmp_path):
    documents = tmp_path / "documents.jsonl"
    write_documents(dataset.select([0]), documents)
    engine_files(embedded, documents, tmp_path / "shifted", shift=1)
    shifted = EngineStates(tmp_path / "shifted")
    with pytest.raises(ValueError, match="outputs of layer 3 is nearest to those of layer 2.*layers 3,8,20"):
        compare(shifted, embedded, LAYERS, [dataset[0]])
    with pytest.raises(ValueError, match="lacks a document of .* let the engine run"):
        shifted.features(embedded, LAYERS, dataset[1])
    with pytest.raises(ValueError, match="hidden_states are .* this drafter needs"):
        shifted.features(embedded, LAYERS[:2], dataset[0])
    with pytest.raises(ValueError, match="no .safetensors files there"):
        EngineStates(tmp_path)
