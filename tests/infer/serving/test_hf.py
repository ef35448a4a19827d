"""`model.generate(..., custom_generate=speculative(...))` gives the output of `generate`."""

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

from infer.serving.hf import _replace_processors_by_options, speculative


@pytest.fixture(scope="module")
def tiny(make_tiny):
    target, drafter = make_tiny(seed=4)
    target.model.generation_config.pad_token_id = 95
    return target, drafter


def batch() -> dict[str, torch.Tensor]:
    """Return three prompts of different lengths, padded on the left as Hugging Face requires."""
    ids = torch.randint(90, (3, 9), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :7] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 95), "attention_mask": mask}


class Favour(LogitsProcessor):
    """Favours the successor of the last token and forbids the last two tokens."""

    def __call__(self, ids, scores):
        scores = scores.scatter_add(1, (ids[:, -1:] + 1) % 90, torch.full((len(ids), 1), 3.0))
        return scores.scatter(1, ids[:, -2:], -float("inf"))


class Sum(StoppingCriteria):
    """Ends a sequence whose last three tokens add up to a multiple of seven."""

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
def test_greedy_output_is_that_of_generate(tiny, settings):
    target, drafter = tiny
    expected = target.model.generate(**batch(), do_sample=False, **settings)
    for method in ("chain", "ddtree"):
        speculative_output = target.model.generate(
            **batch(),
            do_sample=False,
            custom_generate=speculative(target, drafter, method, 7),
            **settings,
        )
        # The longest row decides the length; the padding after other rows is the same.
        assert torch.equal(speculative_output, expected), method


def allowed(row: int, ids: torch.Tensor) -> list[int]:
    """Return a third of the vocabulary, different for each row, without the last token."""
    return [token for token in range(row, 90, 3) if token != int(ids[-1])]


@pytest.fixture(scope="module")
def unprocessed(tiny):
    return tiny[0].model.generate(**batch(), max_new_tokens=16, do_sample=False)


@pytest.mark.parametrize(
    "first, settings",  # `first`: first row of the batch; rows from 1 on are padded
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
def test_processors_with_state_per_row_of_a_padded_batch(tiny, unprocessed, first, settings):
    target, drafter = tiny
    inputs = {name: value[first:] for name, value in batch().items()}
    settings = {"max_new_tokens": 16, "do_sample": False, **settings}
    expected = target.model.generate(**inputs, **settings)
    assert first or not torch.equal(expected, unprocessed)  # the processors have an effect
    for method in ("plain", "ddtree"):
        speculative_output = target.model.generate(
            **inputs, custom_generate=speculative(target, drafter, method, 7), **settings
        )
        assert torch.equal(speculative_output, expected), method


def test_processors_are_not_called_after_an_end_token(tiny):
    target, drafter = tiny
    ends = list(range(40, 60))

    def unended(row, ids):
        assert not torch.isin(ids[9:], torch.tensor(ends)).any(), (
            "called after the end of the sequence"
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
        speculative_output = target.model.generate(
            ids, custom_generate=speculative(target, drafter, "ddtree", 64), **settings
        )
        assert torch.equal(speculative_output, expected)


def test_sampling_is_reproducible_and_follows_the_filters(tiny):
    target, drafter = tiny
    settings = {
        "max_new_tokens": 30,
        "do_sample": True,
        "temperature": 0.9,
        "top_k": 3,
        "top_p": 0.95,
    }
    outputs = []
    for method in ("plain", "chain", "ddtree", "ddtree"):
        torch.manual_seed(5)
        outputs.append(
            target.model.generate(
                **batch(),
                num_return_sequences=2,
                custom_generate=speculative(target, drafter, method, 9),
                **settings,
            )
        )
    assert all(torch.equal(ids, outputs[0]) for ids in outputs) and outputs[0].shape == (6, 39)
    assert not torch.equal(outputs[0][0], outputs[0][1])
    ids = outputs[0][:1]
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


def test_supported_processors_become_options_and_others_stay():
    from transformers import TemperatureLogitsWarper, TopKLogitsWarper

    heat = TemperatureLogitsWarper(0.5)
    top = TopKLogitsWarper(4)
    penalty = RepetitionPenaltyLogitsProcessor(1.2)
    assert _replace_processors_by_options([penalty, heat, top], 0) == (
        {"repetition_penalty": 1.2, "temperature": 0.5, "top_k": 4},
        (),
    )
    for other in ([top, heat], [heat, heat], [heat, Favour()]):
        assert _replace_processors_by_options(other, 0) == ({}, other)
    penalty_after_prompt = RepetitionPenaltyLogitsProcessor(1.2, prompt_ignore_length=2)
    assert _replace_processors_by_options([penalty_after_prompt], 2) == (
        {"repetition_penalty": 1.2},
        (),
    )
    assert _replace_processors_by_options([penalty_after_prompt], 0) == (
        {},
        [penalty_after_prompt],
    ) and _replace_processors_by_options([penalty], 2) == ({}, [penalty])


@pytest.mark.parametrize(
    ("settings", "expected_message"),
    [
        ({"num_beams": 2}, "num_beams=2"),
        ({"encoder_repetition_penalty": 1.5}, "work with a single prompt"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores"),
    ],
)
def test_unsupported_arguments_are_named(tiny, settings, expected_message):
    target, drafter = tiny
    with pytest.raises(ValueError, match=expected_message):
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
def test_the_example_of_the_docs_runs(repo, shallow, shallow_target, tmp_path, monkeypatch, capsys):
    """The ten lines of docs/serving.md run unchanged, with a target and an untrained drafter."""
    from infer import save_drafter
    from infer.config import DrafterConfig
    from infer.drafters.build import create_drafter

    section = (
        (repo / "docs" / "serving.md").read_text().split("## Inside Hugging Face's generate")[1]
    )
    example = section.split("```python\n")[1].split("```")[0]
    assert len([line for line in example.splitlines() if line]) <= 10
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "embedded").symlink_to(shallow)
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.initialize(shallow_target, torch.Generator().manual_seed(0), warm_start=True)
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
