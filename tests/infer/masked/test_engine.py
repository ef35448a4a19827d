"""Masked diffusion models in the engine, the API, the server and the commands; and those with code
of their own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import load_file, save_file

from infer import generate, stream
from infer.api import open_engine
from infer.cli.eval import EvalCommand, run as run_eval
from infer.cli.generate import GenerateCommand, run as run_generate
from infer.cli.models import load_all
from infer.config import DecodeOptions, EvaluationConfig, TargetConfig, TextOptions
from infer.masked.config import MaskedConfig, MaskedOptions
from infer.masked.engine import MaskedEngine
from infer.masked.model import FOREIGN, MaskedModel, load_masked
from infer.serving.dialogue import Row
from infer.serving.regenerate import by_engine, options_of
from infer.targets.kinds import MASKED, is_masked

MASK = 60
PROMPTS = [[3], [7, 8, 9, 10, 11, 12, 13], [1, 40, 2, 5, 5, 5, 33, 21, 9, 14, 50, 4], [9, 9, 4]]
LENGTHS = [5, 16, 11, 24]  # not whole blocks


def written(model: MaskedModel, prompts, texts: list[TextOptions], engine: MaskedConfig) -> list:
    """Texts that come one after the other, a round apart."""
    engine = MaskedEngine(model, engine, 64)
    done = []
    for prompt, options in zip(prompts, texts, strict=True):
        done.append(engine.submit(prompt, options))
        engine.step()
    while engine.busy:
        engine.step()
    assert not engine.scheduler.writing
    assert sorted(engine.runner.free_rows) == list(range(engine.options.max_num_seqs))
    return done


@pytest.mark.parametrize(
    "cache, shifted", [("none", False), ("none", True), ("dual", False), ("dual", True)]
)
def test_texts_beside_each_other_are_what_each_is_alone(make_masked, cache, shifted):
    """Greedy and sampled rows of many lengths come and go; alone and step by step is the truth."""
    model = make_masked(shifted)
    model.end_ids = frozenset([17])
    texts = [
        TextOptions(max_new_tokens=length, temperature=temperature, seed=at)
        for at, (length, temperature) in enumerate(zip(LENGTHS, (0.0, 0.9, 0.0, 1.3), strict=True))
    ]
    how = MaskedConfig(max_num_seqs=3, block_length=8, cache=cache)
    steps = replace(how, method="steps", max_num_seqs=1)
    alone = [
        written(model, [prompt], [text], steps)[0]
        for prompt, text in zip(PROMPTS, texts, strict=True)
    ]
    for method, length in (("guided", 4), ("mixed", 3)):
        together = written(model, PROMPTS, texts, replace(how, method=method, draft_length=length))
        for one, text, most in zip(alone, together, LENGTHS, strict=True):
            assert (text.ids, text.finish) == (one.ids, one.finish) and len(text.ids) <= most
            assert text.stats.rounds == len(text.drafted) == len(text.commits) <= one.stats.rounds
            assert (
                sum(text.commits) == len(text.ids)
                and sum(text.stats.histogram) == text.stats.rounds
            )
            assert text.row is None
        assert sum(text.stats.rounds for text in together) < sum(
            text.stats.rounds for text in alone
        )
    assert [text.finish for text in alone].count("length") >= 2
    assert [text.stats.tau for text in alone] == [1.0] * 4


def test_an_answer_ends_where_a_causal_one_would(make_masked):
    model = make_masked()
    full = generate(model, None, PROMPTS[1], method="steps", max_new_tokens=24, ignore_eos=True)
    assert len(full.ids) == 24 and full.finish_reason == "length"
    end = full.ids[13]
    model.end_ids = frozenset([end])
    at = full.ids.index(end)
    for method in ("steps", "guided"):
        ended = generate(model, None, PROMPTS[1], method=method, max_new_tokens=24)
        assert ended.ids == full.ids[: at + 1] and ended.finish_reason == "stop"
        # 21 tokens are three blocks of masks like 24, and then cut
        cut = generate(model, None, PROMPTS[1], method=method, max_new_tokens=21, ignore_eos=True)
        assert cut.ids == full.ids[:21] and cut.finish_reason == "length" and cut.stats.tokens == 21
    assert ended.stats.rounds < full.stats.rounds


def test_pieces_come_in_order_while_later_tokens_are_missing(folder):
    model = load_masked(str(folder), "float32", "cpu")
    options = MaskedOptions(max_new_tokens=24)
    whole = generate(model, None, "import os", options)
    pieces = list(stream(model, None, "import os", options))
    assert "".join(pieces) == whole.text and len(pieces) > 2
    both = generate(model, None, ["import os", "def f("], options)
    assert (
        both[0].text == whole.text and both[1].text == generate(model, None, "def f(", options).text
    )
    stop = whole.text[3:5]
    stopped = generate(model, None, "import os", replace(options, stop=[stop]))
    assert stopped.text == whole.text[: whole.text.index(stop)] and stopped.finish_reason == "stop"


def test_cancelled_and_failed_texts_leave_their_rows(make_masked):
    model = make_masked()
    engine = MaskedEngine(model, MaskedConfig(max_num_seqs=1, cache="dual"), 64)
    first, second, third = (
        engine.submit(prompt, TextOptions(max_new_tokens=24)) for prompt in PROMPTS[:3]
    )
    engine.step()
    first.cancelled = third.cancelled = True
    changed = engine.step()
    assert {first, third} <= set(changed) and first.finish == third.finish == "cancelled"
    while engine.busy:
        engine.step()
    assert (
        second.ids
        == generate(model, None, PROMPTS[1], method="steps", max_new_tokens=24, cache="dual").ids
    )
    engine.submit(PROMPTS[0], TextOptions(max_new_tokens=24))
    engine.step()
    engine.reset()
    assert not engine.busy and engine.runner.free_rows == [0]


def test_answers_are_regenerated_with_a_masked_model(folder):
    model = load_masked(str(folder), "float32", "cpu")
    options = MaskedOptions(max_new_tokens=12, max_num_seqs=2, method="greedy")
    prompts = ["import os", "def f(", "x = "]
    answers = list(
        by_engine(model, None, options, 30)([Row(i, prompt) for i, prompt in enumerate(prompts)])
    )
    steps = [
        generate(model, None, prompt, method="steps", max_new_tokens=12).text for prompt in prompts
    ]
    assert [answer["response"] for answer in answers] == steps
    assert options_of(options) == options_of(replace(options, budget=3, method="steps"))
    assert options_of(options) != options_of(replace(options, block_length=4))
    assert "block_length" not in options_of(DecodeOptions(method="plain"))


WRONG_TEXTS = [
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"logprobs": 0},
]


@pytest.mark.parametrize("changes", WRONG_TEXTS)
def test_options_of_other_models_are_refused(make_masked, changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(
        ValueError, match=f"^{name}={value}: masked diffusion decoding cannot follow it"
    ):
        MaskedOptions(**changes).check()
    DecodeOptions(**changes).check()
    with pytest.raises(ValueError, match=f"^{name}={value}"):
        MaskedEngine(make_masked(), MaskedConfig(), 64).submit([1], TextOptions(**changes))


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"block_length": 0}, "block_length=0: at least 1"),
        ({"budget": 0}, "budget=0: at least 1"),
        ({"cache": "prefix"}, "cache=prefix: use none or dual"),
        ({"draft_length": 9}, "draft_length=9: use 1, 2, 3, 4, 5, 6, 7 or 8"),
        ({"method": "ddtree"}, "method=ddtree: use guided, greedy, mixed or steps"),
    ],
)
def test_engines_that_cannot_be_are_refused(make_masked, changes, words):
    with pytest.raises(ValueError, match=words):
        generate(make_masked(), None, [1, 2], **{"max_new_tokens": 8} | changes)


def test_models_and_methods_of_two_kinds_do_not_mix(make_masked, make_tiny, folder, repo):
    target, drafter = make_tiny()
    model = make_masked()
    with pytest.raises(ValueError, match="method=guided: use plain"):
        generate(target, None, [1, 2], method="guided")
    with pytest.raises(ValueError, match="drafts for itself: give None as its drafter"):
        generate(model, drafter, [1, 2], max_new_tokens=8)
    with pytest.raises(ValueError, match="no prefixes"):
        generate(model, None, [1, 2], max_new_tokens=8, processors=[lambda ids, scores: scores])
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        generate(model, None, [[]], max_new_tokens=8)
    with pytest.raises(ValueError, match="token 64 does not exist, the model has 0 to 63"):
        generate(model, None, [64], max_new_tokens=8)
    with pytest.raises(ValueError, match="may take 129 positions, the target has 128"):
        generate(model, None, [1] * 113, max_new_tokens=15)  # whole blocks: 16
    assert (
        is_masked(str(folder))
        and not is_masked("embedded")
        and set(FOREIGN) == set(MASKED.model_types)
    )
    (folder / "model.safetensors").unlink()  # both before weights are looked at
    with pytest.raises(ValueError, match="a masked diffusion model has no drafter"):
        load_all(TargetConfig(str(folder)), ["no/such/drafter"])
    with pytest.raises(
        ValueError, match="^target.path=embedded: a qwen3 model that was not trained to fill masks"
    ):
        load_masked("embedded")


def test_the_server_answers_with_a_masked_model(running, folder):
    model = load_masked(str(folder), "float32", "cpu")

    def own(prompt: str, length: int, **more) -> str:
        return generate(
            model, None, prompt, method="steps", max_new_tokens=length, cache="dual", **more
        ).text

    engine = open_engine(
        model, None, MaskedConfig(max_num_seqs=3, block_length=8, cache="dual"), 60
    )
    with (
        running(engine, max_requests=40) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        done = client.completions.create(
            model="embedded", prompt=["import os", "class A"], max_tokens=20, temperature=0
        )
        assert [choice.text for choice in done.choices] == [
            own(p, 20) for p in ("import os", "class A")
        ]
        settings = {
            "prompt": "def walk(",
            "max_tokens": 17,
            "temperature": 0.8,
            "seed": 5,
            "model": "embedded",
        }
        chunks = list(
            client.completions.create(
                **settings, stream=True, stream_options={"include_usage": True}
            )
        )
        expected = own("def walk(", 17, temperature=0.8, seed=5)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
        assert (
            sum(bool(chunk.choices) for chunk in chunks) > 2
            and chunks[-1].usage.completion_tokens <= 17
        )
        with pytest.raises(
            openai.BadRequestError, match="top_p=0.5: masked diffusion decoding cannot follow it"
        ):
            client.completions.create(**settings, top_p=0.5)


# As LLaDA's and Dream's code: no post_init, ties for itself, embeddings deep inside, a loader of
# its own, a buffer that is not stored.
CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class FakeConfig(PretrainedConfig):
    model_type = "{kind}"

class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("near", torch.tensor([0.5]), persistent=False)  # as rotary frequencies: not stored

    def forward(self, x):
        place = torch.arange(x.shape[1], device=x.device)
        apart = place[:, None] - place
        return torch.tanh((torch.exp(-self.near * apart.abs()) * (1 + 0.1 * torch.sign(apart))).to(x.dtype) @ x)

class FakeModel(PreTrainedModel):
    config_class, base_model_prefix = FakeConfig, "model"

    def __init__(self, config, model=None, init_params=False):
        super().__init__(config)
        parts = {"wte": torch.nn.Embedding(512, 16), "mixer": Mixer(), "ff_out": torch.nn.Linear(16, 512, bias=False)}
        self.model = torch.nn.Module()
        self.model.transformer = torch.nn.ModuleDict(parts)

    def forward(self, input_ids=None, inputs_embeds=None, attention_mask=None, attention_bias=None, use_cache=None):
        assert attention_mask is None and not use_cache
        parts = self.model.transformer
        return CausalLMOutput(logits=parts.ff_out(parts.mixer(parts.wte(input_ids))))

    @classmethod
    def from_pretrained(cls, path, *args, config=None, weights_only=True, **kwargs):
        raise AssertionError("reads a generation config of its own kind")

    def get_input_embeddings(self):
        return self.model.transformer.wte

    def get_output_embeddings(self):
        return self.model.transformer.ff_out

    def tie_weights(self):
        if self.config.weight_tying:
            self.model.transformer.ff_out = self.model.transformer.wte
"""
NAMES = ("model.transformer.wte.weight", "model.transformer.ff_out.weight")


def foreign_folder(folder: Path, embedded: Path, kind: str) -> Path:
    """A folder that loads as LLaDA and Dream do: a model with code of its own in the shape of
    theirs, far smaller."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    (folder / "modeling_fake.py").write_text(CODE.replace("{kind}", kind))
    config = {
        "model_type": kind,
        "mask_token_id": MASK,
        "vocab_size": 512,
        "architectures": ["FakeModel"],
    }
    config |= {"weight_tying": False, "tie_word_embeddings": False}
    config["auto_map"] = {
        "AutoConfig": "modeling_fake.FakeConfig",
        "AutoModel": "modeling_fake.FakeModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(1)
    weights = {name: torch.randn(512, 16, generator=generator) for name in NAMES}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("kind, shifted", [("llada", False), ("Dream", True)])
def test_models_with_their_own_code_load_and_decode(tmp_path, repo, monkeypatch, kind, shifted):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = foreign_folder(tmp_path / f"tiny-{kind.lower()}", repo / "data" / "embedded", kind)
    with pytest.raises(ValueError, match="run code that comes with them.*trust_remote_code=true"):
        load_masked(str(folder), "float32", "cpu")
    model = load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    assert is_masked(str(folder)) and model.shifted is shifted and model.mask_token_id == MASK
    stored = load_file(folder / "model.safetensors")
    assert all(
        torch.equal(model.model.state_dict()[name], weight) for name, weight in stored.items()
    )
    assert [float(value) for name, value in model.model.named_buffers()] == [0.5]
    ids = torch.tensor([[5, 6, MASK, 8]])
    theirs = model.model(input_ids=ids).logits
    assert torch.equal(model.logits(ids)[0, 2, :MASK], theirs[0, 2 - shifted, :MASK])
    prompts = [[5, 6], [7, 8, 9], [9, 4]]
    for temperature in (0.0, 0.8):
        settings = {"max_new_tokens": 16, "temperature": temperature, "seed": 2}
        expected = [
            answer.ids
            for answer in generate(model, None, prompts, method="steps", max_num_seqs=1, **settings)
        ]
        for way in ("greedy", "mixed", "guided"):
            done = generate(
                model, None, prompts, method=way, **settings
            )  # of two lengths: two passes
            assert [answer.ids for answer in done] == expected
    with pytest.raises(ValueError, match="cache=dual: .* takes no cache of ours: use cache=none"):
        generate(model, None, prompts, cache="dual")


def test_foreign_code_and_weights_that_do_not_fit_are_told_in_one_sentence(
    tmp_path, repo, monkeypatch
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = foreign_folder(tmp_path / "lacking", repo / "data" / "embedded", "llada")
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("model.transformer.ff_out.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match="do not agree on weights, such as model.transformer.ff_out.weight"
    ):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    save_file(weights | {"head": head}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="do not agree on weights, such as head"):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    folder = foreign_folder(tmp_path / "old", repo / "data" / "embedded", "Dream")
    code = (folder / "modeling_fake.py").read_text()
    (folder / "modeling_fake.py").write_text(
        code.replace("        parts = {", "        config.gone()\n        parts = {")
    )
    with pytest.raises(
        ValueError, match="code that comes with it does not run with transformers .*AttributeError"
    ):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)


def masked_folder(repo: Path, copy: Path) -> Path:
    """Two layers of the embedded causal model, said to be a masked one: of no use but for
    loading."""
    shutil.copytree(
        repo / "data" / "embedded", copy, ignore=shutil.ignore_patterns("answers.jsonl")
    )
    edit(copy, mask_token_id=1, masked_diffusion={"shifted": True}, num_hidden_layers=2)
    edit(copy, layer_types=["full_attention"] * 2)
    tensors = load_file(copy / "model.safetensors")
    kept = {
        name: it
        for name, it in tensors.items()
        if ".layers." not in name or int(name.split(".")[2]) < 2
    }
    save_file(kept, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture
def folder(tmp_path, repo) -> Path:
    return masked_folder(repo, tmp_path / "model")


def edit(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


@pytest.mark.robustness
def test_the_commands_continue_a_text_and_print_the_table(folder, tmp_path, capsys):
    place = TargetConfig(str(folder), "float32", "cpu")
    config = GenerateCommand(prompt="import os", target=place)
    config.decoding, config.masked = DecodeOptions(max_new_tokens=8), MaskedConfig(cache="dual")
    config.check()
    run_generate(config)
    said = capsys.readouterr()
    answer = generate(
        load_masked(str(folder), "float32", "cpu"),
        None,
        "import os",
        max_new_tokens=8,
        cache="dual",
    )
    assert said.out == f"import os{answer.text}\n"
    assert f"[guided: 8 tokens in {answer.stats.rounds} rounds" in said.err
    evaluation = EvaluationConfig(prompts=1, max_prompt_tokens=8, max_new_tokens=5)
    config = EvalCommand(
        target=place,
        out=str(tmp_path / "out"),
        evaluation=evaluation,
        masked=MaskedConfig(cache="dual"),
    )
    config.check()
    run_eval(config)
    lines = capsys.readouterr().out.splitlines()
    ways = [line.split("|")[1].strip() for line in lines if line.endswith("yes |")]
    assert ways[:4] == ["step by step", "greedy 1", "mixed 1", "guided 1"]
    assert ways[-1] == "guided 5, 16 states"
    assert len(ways) == 1 + 5 * 3 + 1  # and none differs from step by step
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert (
        result["max_new_tokens"] == 8
        and result["methods"][0]["rounds"] == 8
        and len(result["methods"]) == 17
    )


@pytest.mark.parametrize(
    "changes, words",
    [
        (
            {"mask_token_id": None},
            "this model has no mask token: its config.json needs mask_token_id",
        ),
        ({"masked_diffusion": None}, "was not trained to fill masks"),
        ({"model_type": "llama"}, "a llama model that was not trained to fill masks"),
    ],
)
def test_what_is_no_masked_model_is_refused_in_one_sentence(folder, changes, words):
    edit(folder, **changes)
    with pytest.raises(ValueError, match=words) as caught:
        load_masked(str(folder))
    assert "\n" not in str(caught.value)
