"""`model.generate(..., custom_generate=speculative(...))`: Hugging Face's output, with Hugging
Face's own controls."""

import pytest
import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

from infer.serving.hf import _settings, speculative


@pytest.fixture(scope="module")
def tiny(make_tiny):
    target, drafter = make_tiny(seed=4)
    target.model.generation_config.pad_token_id = 95
    return target, drafter


def batch() -> dict[str, torch.Tensor]:
    """Three prompts of different lengths, padded on the left as Hugging Face wants it."""
    ids = torch.randint(90, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :7] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 95), "attention_mask": mask}


class Favour(LogitsProcessor):
    """Needs the true prefix: raises whatever follows the last token by one, and forbids the last
    two."""

    def __call__(self, ids, scores):
        scores = scores.scatter_add(1, (ids[:, -1:] + 1) % 90, torch.full((len(ids), 1), 3.0))
        return scores.scatter(1, ids[:, -2:], -float("inf"))


class Sum(StoppingCriteria):
    """Ends a text whose last three tokens add up to a multiple of seven."""

    def __call__(self, ids, scores, **others):
        return ids[:, -3:].sum(1) % 7 == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"max_new_tokens": 24, "eos_token_id": [3, 11, 19, 23, 40, 41, 42, 43, 44, 45, 46]},
        {"max_new_tokens": 24, "no_repeat_ngram_size": 2},
        {"max_new_tokens": 24, "min_new_tokens": 12, "eos_token_id": list(range(40, 60))},
        {"max_new_tokens": 24, "logits_processor": LogitsProcessorList([Favour()])},
        {
            "max_new_tokens": 24,
            "stopping_criteria": StoppingCriteriaList([Sum()]),
            "eos_token_id": 96,
        },
        {"max_length": 30},
    ],
)
def test_greedy_is_what_generate_writes(tiny, settings):
    target, drafter = tiny
    expected = target.model.generate(**batch(), do_sample=False, **settings)
    for method in ("chain", "ddtree"):
        ours = target.model.generate(
            **batch(),
            do_sample=False,
            custom_generate=speculative(target, drafter, method, 7),
            **settings,
        )
        # one row that ends late makes all of them longer; padding after a text's end is the same
        assert torch.equal(ours, expected), method


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    """A row's own third of the vocabulary, but for its last token."""
    return [token for token in range(row, 90, 3) if token != int(ids[-1])]


@pytest.fixture(scope="module")
def unprocessed(tiny):
    return tiny[0].model.generate(**batch(), max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize(
    "first, settings",  # of the three rows: from 1 on they are padded
    [
        (1, {"repetition_penalty": 1.4}),
        (0, {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}),
        (
            0,
            {
                "repetition_penalty": 1.3,
                "no_repeat_ngram_size": 3,
                "eos_token_id": list(range(40, 50)),
            },
        ),
        (0, {"prefix_allowed_tokens_fn": allowed, "repetition_penalty": 1.3}),
        (0, {"logits_processor": [RepetitionPenaltyLogitsProcessor(0.3)]}),  # of the padding too
        (1, {"logits_processor": [RepetitionPenaltyLogitsProcessor(0.3)]}),
        (0, {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=6)]}),
        (1, {"logits_processor": [RepetitionPenaltyLogitsProcessor(1.6, prompt_ignore_length=6)]}),
    ],
)
def test_what_processors_know_of_each_row_of_a_padded_batch(tiny, unprocessed, first, settings):
    target, drafter = tiny
    inputs = {name: value[first:] for name, value in batch().items()}
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    expected = target.model.generate(**inputs, **settings)
    assert first or not torch.equal(expected, unprocessed)  # they do something
    for method in ("plain", "ddtree"):
        ours = target.model.generate(
            **inputs, custom_generate=speculative(target, drafter, method, 7), **settings
        )
        assert torch.equal(ours, expected), method


def test_processors_are_not_called_behind_an_end_token(tiny):
    target, drafter = tiny
    ends = list(range(40, 60))

    def unended(row, ids):
        assert not torch.isin(ids[9:], torch.tensor(ends)).any(), (
            "called behind the end of the text"
        )
        return list(range(90))

    settings = {
        "max_new_tokens": 40,
        "do_sample": False,
        "eos_token_id": ends,
        "prefix_allowed_tokens_fn": unended,
    }
    for ids in torch.randint(40, (6, 1, 9), generator=torch.Generator().manual_seed(1)):
        settings["attention_mask"] = torch.ones_like(ids)
        expected = target.model.generate(ids, **settings)
        ours = target.model.generate(
            ids, custom_generate=speculative(target, drafter, "ddtree", 64), **settings
        )
        assert torch.equal(ours, expected)


def test_sampling_repeats_with_torchs_seed_and_keeps_to_the_filters(tiny):
    target, drafter = tiny
    settings = {
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.95,
    }
    written = []
    for method in ("plain", "chain", "ddtree", "ddtree"):
        torch.manual_seed(5)
        written.append(
            target.model.generate(
                **batch(),
                num_return_sequences=2,
                custom_generate=speculative(target, drafter, method, 9),
                **settings,
            )
        )
    assert all(torch.equal(ids, written[0]) for ids in written) and written[0].shape == (6, 39)
    assert not torch.equal(written[0][0], written[0][1])
    ids = written[0][:1]
    ranks = target.model(ids).logits[0].argsort(-1, descending=True)[:, :3]
    assert all(ids[0, i + 1] in ranks[i] for i in range(8, 38))


class Collect(BaseStreamer):
    def __init__(self):
        self.ids = []
        self.ended = False

    def put(self, value):
        self.ids += value.flatten().tolist()

    def end(self):
        self.ended = True


def test_streamer_and_dictionary(tiny):
    target, drafter = tiny
    ids = batch()["input_ids"][:1]
    streamer = Collect()
    out = target.model.generate(
        ids,
        max_new_tokens=20,
        do_sample=False,
        return_dict_in_generate=True,
        custom_generate=speculative(target, drafter, "chain", streamer=streamer),
    )
    assert streamer.ids == out.sequences[0].tolist() and streamer.ended


def test_known_processors_become_options_and_others_stay():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    heat = TemperatureLogitsWarper(0.5)
    top = TopKLogitsWarper(4)
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    assert _settings([penalty, heat, top], 0) == (
        {"repetition_penalty": 1.2, "temperature": 0.5, "top_k": 4},
        (),
    )
    for other in ([top, heat], [heat, heat], [heat, Favour()]):
        assert _settings(other, 0) == ({}, other)
    behind = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)
    assert _settings([behind], 2) == ({"repetition_penalty": 1.2}, ())
    assert _settings([behind], 0) == ({}, [behind]) and _settings([penalty], 2) == ({}, [penalty])


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"encoder_repetition_penalty": 1.5}, "one prompt at a time"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ],
)
def test_what_it_cannot_do_it_says(tiny, settings, says):
    target, drafter = tiny
    with pytest.raises(ValueError, match=says):
        target.model.generate(
            **batch(),
            max_new_tokens=4,
            do_sample=False,
            custom_generate=speculative(target, drafter),
            **settings,
        )


def test_another_model_is_refused(tiny, make_tiny):
    target, drafter = tiny
    with pytest.raises(ValueError, match="another model"):
        make_tiny(seed=9)[0].model.generate(
            **batch(), max_new_tokens=4, custom_generate=speculative(target, drafter)
        )


@pytest.mark.robustness
def test_the_example_of_the_docs_runs_as_it_stands(
    repo, shallow, shallow_target, tmp_path, monkeypatch, capsys
):
    """docs/serving.md's ten lines, word for word, where its folders hold a target and a fresh
    drafter."""
    from infer import save_drafter
    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    section = (
        (repo / "docs" / "serving.md").read_text().split("## Inside Hugging Face's generate")[1]
    )
    example = section.split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line]) <= 10
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "embedded").symlink_to(shallow)
    drafter = new_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.initialize(shallow_target, torch.Generator().manual_seed(0), warm=True)
    save_drafter(
        drafter.config,
        drafter.state_dict(),
        tmp_path / "runs/embedded-dflash/checkpoints/best/drafter",
    )
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(example, "docs/serving.md", "exec"), names)
    plain = names["model"].generate(**names["inputs"], max_new_tokens=64, do_sample=False)
    assert (
        torch.equal(names["out"], plain)
        and names["out"].shape[1] > names["inputs"]["input_ids"].shape[1]
    )
    assert capsys.readouterr().out == names["tokenizer"].decode(plain[0]) + "\n"
