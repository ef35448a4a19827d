"""Packed sequences contain every example once, unmixed, and without loss on prompts; the cache is
rebuilt only if something changed."""

import hashlib
import json
import math
from dataclasses import replace
from random import Random

import pytest
import torch

from data.chat import NO_ANSWER_EXCLUSION_REASON
from data.packing import (
    best_fit_decreasing,
    get_shuffled_index,
    load_mixed_examples,
    load_packed_dataset,
    prepare_packed_dataset,
    read_batch,
    tokenize_example,
)
from data.rows import (
    DATA_CACHE_FORMAT_VERSION,
    DataConfig,
    MixtureDataset,
    digest_data_options_and_file_stats,
    read_held_out_examples,
)
from infer.targets.target import tokenizer_digest

PACKED_COLUMNS = ("ids", "positions", "documents", "loss")


@pytest.fixture(scope="module")
def tokenizer(repo):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(repo / "data" / "embedded")


def text_example(prompt: str, text: str, cut: bool = False) -> dict:
    return {"prompt": prompt, "text": text, "cut": cut, "chat": None}


def write_jsonl(file, records: list[dict]) -> str:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


def packed_columns(config: DataConfig, tokenizer) -> dict[str, list]:
    dataset = load_packed_dataset(config, tokenizer, tokenizer_digest(tokenizer))
    return {name: dataset[name][:].tolist() for name in PACKED_COLUMNS}


def test_documents_come_back_out_of_packed_sequences(tokenizer, tmp_path):
    texts = ["def f(x):\n    return x\n" * n for n in (7, 9, 2, 30, 1, 4)]
    prompts = ["", "", "say: ", "", "", ""]
    records = [
        {"prompt": prompt, "response": text} for prompt, text in zip(prompts, texts, strict=True)
    ]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    config = DataConfig(source="jsonl", path=path, length=64)
    columns = packed_columns(config, tokenizer)

    expected_segments = []
    for example in map(text_example, prompts[1:], texts[1:]):
        expected_segments += tokenize_example(example, tokenizer, 64)

    segments = []
    for ids, positions, documents, loss in zip(*columns.values(), strict=True):
        assert len(ids) == len(positions) == len(documents) == len(loss) == 64
        for number in range(max(documents) + 1):
            indices = [i for i, document in enumerate(documents) if document == number]
            assert indices == list(range(indices[0], indices[0] + len(indices)))
            assert [positions[i] for i in indices] == list(range(len(indices)))
            segments.append(([ids[i] for i in indices], [loss[i] for i in indices]))
        padding = documents.count(-1)
        assert documents[64 - padding :] == [-1] * padding
        assert not any(loss[64 - padding :])
    assert sorted(segments) == sorted(expected_segments)

    joined_ids = [token for ids, _ in expected_segments for token in ids]
    joined_text = tokenizer.decode(joined_ids, skip_special_tokens=True)
    assert joined_text == texts[1] + "say: " + "".join(texts[2:])
    assert joined_ids.count(tokenizer.eos_token_id) == 5
    assert max(len(ids) for ids, _ in expected_segments) == 64


def test_a_prompt_carries_no_loss(tokenizer):
    [(ids, loss)] = tokenize_example(text_example("import os\n", "import sys\n"), tokenizer, 64)
    prompt_length = len(tokenizer("import os\n")["input_ids"])
    assert loss == [False] * prompt_length + [True] * (len(ids) - prompt_length)
    assert ids[-1] == tokenizer.eos_token_id

    cut_example = text_example("import os\n", "import sys\n", cut=True)
    [(cut_ids, _)] = tokenize_example(cut_example, tokenizer, 64)
    assert cut_ids == ids[:-1]

    segments = tokenize_example(text_example("import os\n" * 100, "x = 1\n"), tokenizer, 64)
    assert all(any(loss) for _, loss in segments)  # segments without loss are dropped


def test_draws_are_permutations_and_pure():
    for epoch in range(3):
        draws = [get_shuffled_index(epoch * 17 + i, 17, seed=5) for i in range(17)]
        assert sorted(draws) == list(range(17))

    def draw_indices(start: int, stop: int, seed: int) -> list[int]:
        return [get_shuffled_index(draw, 17, seed) for draw in range(start, stop)]

    assert draw_indices(0, 34, 5) == draw_indices(0, 34, 5)
    assert draw_indices(0, 17, 5) != draw_indices(17, 34, 5)
    assert draw_indices(0, 17, 5) != draw_indices(0, 17, 6)


def test_a_mixture_takes_examples_by_weight(tmp_path):
    """A file and a data set that `datasets` loads, here from a folder."""
    first_path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"alpha {i}"} for i in range(100)])
    write_jsonl(tmp_path / "hub" / "train.jsonl", [{"text": f"beta {i}"} for i in range(400)])
    parts = [
        MixtureDataset(path=first_path, weight=1.0),
        MixtureDataset(path=str(tmp_path / "hub"), weight=2.0),
    ]
    config = DataConfig(source="mixture", datasets=parts, length=32)
    mixed = load_mixed_examples(config)
    texts = [json.loads(row)["text"] for row in mixed.dataset["row"]]

    # One of ten is held out; the scarcer data set is used up.
    assert sum(text.startswith("alpha") for text in texts) == 90
    assert sum(text.startswith("beta") for text in texts) == 180
    assert len(set(texts)) == len(texts)
    assert len(load_mixed_examples(replace(config, max_examples=10)).dataset) < 11
    assert not {example["text"] for example in read_held_out_examples(config)} & set(texts)
    counts = mixed.counts
    assert (counts.used, counts.held_out, counts.not_taken, counts.total) == (270, 50, 180, 500)

    (tmp_path / "hub" / "README.md").write_text("A data set of the hub.")
    hub_config = DataConfig(source="hub", path=str(tmp_path / "hub"), length=32)
    assert hub_config.source == "hub"
    assert len(load_mixed_examples(hub_config).dataset) == 360
    with pytest.raises(ValueError, match="data.split=nothere could not be read"):
        load_mixed_examples(replace(hub_config, split="nothere"))


def test_examples_are_read_again_only_when_something_changed(tokenizer, tmp_path, monkeypatch):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": f"word {i} and more"} for i in range(60)])
    config = DataConfig(source="jsonl", path=path, length=32)
    columns = packed_columns(config, tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("data.packing.tokenize_example", None)
        assert packed_columns(config, tokenizer) == columns
    write_jsonl(tmp_path / "a.jsonl", [{"text": f"word {i} and less"} for i in range(60)])
    assert packed_columns(config, tokenizer) != columns


def test_a_change_of_the_packed_sequences_raises_the_format_version(tokenizer, tmp_path):
    """The cache key contains DATA_CACHE_FORMAT_VERSION, not the code. If this digest changes, raise
    the version and update the digest."""
    chat = [{"role": "user", "content": "why? "}, {"role": "assistant", "content": "because"}]
    records = [{"text": "def f(x):\n    return x\n" * n} for n in range(1, 9)]
    records += [{"prompt": "a = ", "response": "1\n"}, {"messages": chat}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    columns = packed_columns(DataConfig(source="jsonl", path=path, length=32), tokenizer)
    digest = hashlib.sha256(json.dumps(columns).encode()).hexdigest()
    assert (DATA_CACHE_FORMAT_VERSION, digest[:16]) == (6, "300ace5da3ca6e63")


def test_the_source_digest_depends_on_what_determines_the_examples(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"text": "word"}])
    config = DataConfig(source="jsonl", path=path)
    digest = digest_data_options_and_file_stats(config)
    # These options concern packed sequences and the check of the counts only.
    assert digest_data_options_and_file_stats(replace(config, length=64)) == digest
    assert digest_data_options_and_file_stats(replace(config, max_invalid_fraction=0.3)) == digest
    for other in (
        replace(config, max_examples=3),
        DataConfig("hub", "owner/name"),
        DataConfig("stdlib"),
    ):
        assert digest_data_options_and_file_stats(other) != digest


def test_an_unreadable_file_is_named(tokenizer, tmp_path):
    (tmp_path / "b.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"b\.parquet is damaged or cut off after row 0"):
        packed_columns(DataConfig(source="jsonl", path=str(tmp_path)), tokenizer)


def test_counts_of_a_cached_data_set_equal_those_of_the_first_run(tokenizer, tmp_path):
    """Counts of used, excluded and invalid examples, when read and when tokenised; too many invalid
    ones are refused in both runs."""
    chat = [{"role": "user", "content": "why? "}, {"role": "assistant", "content": "because"}]
    with_reasoning = [chat[0], chat[1] | {"reasoning_content": "hm"}]
    with_unknown_id = [chat[0], chat[1] | {"token_ids": [len(tokenizer)]}]
    records = [{"messages": [{"role": "system", "content": f"{i}"}, *chat]} for i in range(12)]
    records += [{"messages": with_reasoning}, {"messages": with_unknown_id}]
    records += [{"messages": chat[:1]}, {"text": 3}]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    config = DataConfig(path=path, length=64, max_invalid_fraction=0.2)
    digest = tokenizer_digest(tokenizer)
    counts = prepare_packed_dataset(config, tokenizer, digest).counts
    cached_counts = prepare_packed_dataset(config, tokenizer, digest).counts

    assert counts == cached_counts
    assert (counts.used, counts.held_out, counts.total) == (10, 2, 16)
    assert counts.excluded == {
        "the chat template leaves out the reasoning of an answer": 1,
        NO_ANSWER_EXCLUSION_REASON: 1,
    }
    assert counts.invalid == {
        "token_ids are outside the vocabulary": 1,
        "text, prompt and response must be strings": 1,
    }
    assert "a.jsonl, line 16: text, prompt" in counts.format_lines()[-1]
    message = (
        r"2 of 16 examples are invalid; data.max_invalid_fraction=0.1 allows 1. First: .*line 16"
    )
    with pytest.raises(ValueError, match=message):
        prepare_packed_dataset(replace(config, max_invalid_fraction=0.1), tokenizer, digest)


@pytest.mark.parametrize("size", [2000, 60_000], ids=["examples", "packed sequences"])
def test_a_full_disk_while_the_cache_is_written_is_not_blamed_on_the_examples(
    tokenizer, tmp_path, file_size_limit, size
):
    """The cached examples fit under the larger limit, the padded packed sequences do not."""
    records = [{"prompt": "", "response": f"x = {i}\n"} for i in range(100)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    config = DataConfig(source="jsonl", path=path, length=20_000)
    with file_size_limit(size), pytest.raises(OSError, match="File too large"):
        packed_columns(config, tokenizer)


@pytest.mark.parametrize("mean", [600, 2000])
def test_packed_sequences_are_98_percent_full(mean):
    """Chats of log-normal lengths, the longer ones split: every segment is packed once, and no
    packed sequence is too long."""
    capacity = 3072
    random = Random(mean)
    lengths = []
    for _ in range(20_000):
        remaining = max(8, int(random.lognormvariate(math.log(mean) - 0.5 * 0.8**2, 0.8)))
        while remaining > 0:
            lengths.append(min(remaining, capacity))
            remaining -= capacity
    sequences = list(best_fit_decreasing(lengths, capacity))
    packed_indices = [segment for sequence in sequences for segment in sequence]
    assert sorted(packed_indices) == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in sequence) for sequence in sequences) <= capacity
    assert sum(lengths) / (len(sequences) * capacity) > 0.98
    # An iterator can be read only once, and gives the same order.
    assert list(best_fit_decreasing(iter(lengths), capacity)) == sequences


def test_packing_groups_and_processes_do_not_change_the_sequences(tokenizer, tmp_path, monkeypatch):
    """One process and two give the same packed sequences, and so does a draw in the middle of a
    packing group, which is what a resumed run reads."""
    monkeypatch.setattr("data.packing.PACKING_GROUP_SEGMENTS", 64)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    records = [{"text": f"word {i} " * (1 + i * 7 % 23)} for i in range(700)]
    path = write_jsonl(tmp_path / "a.jsonl", records)
    one_process = DataConfig(source="jsonl", path=path, length=64)
    # Another limit gives another cache key, so that nothing is cached.
    two_processes = replace(one_process, max_examples=699)

    all_columns = []
    for min_examples, config in ((700, one_process), (100, two_processes)):
        monkeypatch.setattr("data.packing.MIN_MULTIPROCESS_EXAMPLES", min_examples)
        dataset = load_packed_dataset(config, tokenizer, tokenizer_digest(tokenizer))
        all_columns.append({name: dataset[name][:].tolist() for name in PACKED_COLUMNS})
        batch = read_batch(dataset, 37, 3, seed=0)
        shapes = {name: column.shape for name, column in batch.items()}
        assert shapes == dict.fromkeys(dataset.column_names, (3, 64))
        assert batch["ids"].dtype == torch.int64
        assert batch["loss"].dtype == torch.bool
        index = get_shuffled_index(38, len(dataset), 0)
        assert batch["ids"][1].tolist() == all_columns[0]["ids"][index]
        assert str(dataset.features["ids"].feature.dtype) == "int32"
    assert all_columns[0] == all_columns[1]
