"""Masked diffusion models in the engine, the API, the server and the commands; and models that run
the code of their repositories."""

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
from infer.cli.models import load_target_and_drafters
from infer.config import DecodeOptions, EvaluationConfig, SamplingOptions, TargetConfig
from infer.masked.config import MaskedConfig, MaskedOptions
from infer.masked.engine import MaskedEngine
from infer.masked.model import MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE, MaskedModel, load_masked
from infer.masked.sequence import MaskedSequence
from infer.serving.regenerate import build_engine_answerer, select_output_options
from infer.serving.regeneration_task import PromptExample
from infer.targets.masked_models import MASKED_DIFFUSION_TARGET_KIND, is_masked_diffusion

MASK_TOKEN = 60
TOKEN_PROMPTS = [
    [3],
    [7, 8, 9, 10, 11, 12, 13],
    [1, 40, 2, 5, 5, 5, 33, 21, 9, 14, 50, 4],
    [9, 9, 4],
]
OUTPUT_LENGTHS = [5, 16, 11, 24]  # not multiples of the block length


def decode(
    model: MaskedModel, prompts, text_options: list[SamplingOptions], config: MaskedConfig
) -> list[MaskedSequence]:
    """Decode sequences that are submitted one after the other, a round apart."""
    engine = MaskedEngine(model, config, 64)
    sequences = []
    for prompt, options in zip(prompts, text_options, strict=True):
        sequences.append(engine.submit(prompt, options))
        engine.step()
    while engine.has_unfinished_sequences:
        engine.step()
    assert not engine.scheduler.running
    assert sorted(engine.runner.free_rows) == list(range(engine.options.max_num_seqs))
    return sequences


@pytest.mark.parametrize(
    "cache, shifted", [("none", False), ("none", True), ("dual", False), ("dual", True)]
)
def test_outputs_do_not_depend_on_the_batch(make_masked, cache, shifted):
    """Greedy and sampled sequences of different lengths. The reference is step-by-step decoding of
    each alone."""
    model = make_masked(shifted)
    model.eos_token_ids = frozenset([17])
    temperatures = [0.0, 0.9, 0.0, 1.3]
    options = [
        SamplingOptions(max_new_tokens=length, temperature=temperature, seed=seed)
        for seed, (length, temperature) in enumerate(zip(OUTPUT_LENGTHS, temperatures, strict=True))
    ]
    config = MaskedConfig(max_num_seqs=3, block_length=8, cache=cache)
    steps = replace(config, method="steps", max_num_seqs=1)
    baseline = [
        decode(model, [prompt], [text_options], steps)[0]
        for prompt, text_options in zip(TOKEN_PROMPTS, options, strict=True)
    ]
    for method, length in (("guided", 4), ("mixed", 3)):
        batch_config = replace(config, method=method, draft_length=length)
        batch = decode(model, TOKEN_PROMPTS, options, batch_config)
        for actual, expected, max_length in zip(batch, baseline, OUTPUT_LENGTHS, strict=True):
            assert actual.ids == expected.ids and len(actual.ids) <= max_length
            assert actual.finish_reason == expected.finish_reason
            assert actual.stats.rounds == len(actual.drafted) == len(actual.commits)
            assert actual.stats.rounds <= expected.stats.rounds
            assert sum(actual.commits) == len(actual.ids)
            assert sum(actual.stats.histogram) == actual.stats.rounds
            assert actual.token_row is None
        assert count_rounds(batch) < count_rounds(baseline)
    assert [sequence.finish_reason for sequence in baseline].count("length") >= 2
    assert [sequence.stats.tau for sequence in baseline] == [1.0] * 4


def count_rounds(sequences: list[MaskedSequence]) -> int:
    return sum(sequence.stats.rounds for sequence in sequences)


def test_an_output_ends_where_a_causal_one_would(make_masked):
    model = make_masked()
    full = generate(
        model, None, TOKEN_PROMPTS[1], method="steps", max_new_tokens=24, ignore_eos=True
    )
    assert len(full.ids) == 24 and full.finish_reason == "length"
    end = full.ids[13]
    model.eos_token_ids = frozenset([end])
    index = full.ids.index(end)
    for method in ("steps", "guided"):
        ended = generate(model, None, TOKEN_PROMPTS[1], method=method, max_new_tokens=24)
        assert ended.ids == full.ids[: index + 1] and ended.finish_reason == "stop"
        # 21 tokens are decoded as three blocks, like 24, and then cut.
        cut = generate(
            model, None, TOKEN_PROMPTS[1], method=method, max_new_tokens=21, ignore_eos=True
        )
        assert cut.ids == full.ids[:21] and cut.finish_reason == "length"
        assert cut.stats.tokens == 21
    assert ended.stats.rounds < full.stats.rounds


def test_a_stream_is_in_order_while_later_tokens_are_decoded(folder):
    model = load_masked(str(folder), "float32", "cpu")
    options = MaskedOptions(max_new_tokens=24)
    output = generate(model, None, "import os", options)
    pieces = list(stream(model, None, "import os", options))
    assert "".join(pieces) == output.text and len(pieces) > 2
    outputs = generate(model, None, ["import os", "def f("], options)
    assert outputs[0].text == output.text
    assert outputs[1].text == generate(model, None, "def f(", options).text
    stop = output.text[3:5]
    stopped = generate(model, None, "import os", replace(options, stop=[stop]))
    assert (
        stopped.text == output.text[: output.text.index(stop)] and stopped.finish_reason == "stop"
    )


def test_cancelled_and_failed_sequences_release_their_rows(make_masked):
    model = make_masked()
    engine = MaskedEngine(model, MaskedConfig(max_num_seqs=1, cache="dual"), 64)
    first, second, third = (
        engine.submit(prompt, SamplingOptions(max_new_tokens=24)) for prompt in TOKEN_PROMPTS[:3]
    )
    engine.step()
    first.cancelled = third.cancelled = True
    changed = engine.step()
    assert {first, third} <= set(changed)
    assert first.finish_reason == third.finish_reason == "cancelled"
    while engine.has_unfinished_sequences:
        engine.step()
    expected = generate(
        model, None, TOKEN_PROMPTS[1], method="steps", max_new_tokens=24, cache="dual"
    )
    assert second.ids == expected.ids
    engine.submit(TOKEN_PROMPTS[0], SamplingOptions(max_new_tokens=24))
    engine.step()
    engine.reset()
    assert not engine.has_unfinished_sequences and engine.runner.free_rows == [0]


def test_a_masked_model_regenerates_answers(folder):
    model = load_masked(str(folder), "float32", "cpu")
    options = MaskedOptions(max_new_tokens=12, max_num_seqs=2, method="greedy")
    prompts = ["import os", "def f(", "x = "]
    answers = list(
        build_engine_answerer(model, None, options, 30)(
            [PromptExample(i, prompt) for i, prompt in enumerate(prompts)]
        )
    )
    expected = [
        generate(model, None, prompt, method="steps", max_new_tokens=12).text for prompt in prompts
    ]
    assert [answer["response"] for answer in answers] == expected
    assert select_output_options(options) == select_output_options(
        replace(options, budget=3, method="steps")
    )
    assert select_output_options(options) != select_output_options(replace(options, block_length=4))
    assert "block_length" not in select_output_options(DecodeOptions(method="plain"))


UNSUPPORTED_OPTIONS = [
    {"top_k": 3},
    {"top_p": 0.5},
    {"min_p": 0.1},
    {"repetition_penalty": 1.2},
    {"logprobs": 0},
]


@pytest.mark.parametrize("changes", UNSUPPORTED_OPTIONS)
def test_options_of_other_models_are_refused(make_masked, changes):
    name, value = next(iter(changes.items()))
    with pytest.raises(
        ValueError, match=f"^{name}={value}: masked diffusion decoding does not support it"
    ):
        MaskedOptions(**changes).check()
    DecodeOptions(**changes).check()
    with pytest.raises(ValueError, match=f"^{name}={value}"):
        MaskedEngine(make_masked(), MaskedConfig(), 64).submit([1], SamplingOptions(**changes))


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_length": 0}, "block_length=0: must be at least 1"),
        ({"budget": 0}, "budget=0: must be at least 1"),
        ({"cache": "prefix"}, "cache=prefix: use none or dual"),
        ({"draft_length": 9}, "draft_length=9: use 1, 2, 3, 4, 5, 6, 7 or 8"),
        ({"method": "ddtree"}, "method=ddtree: use guided, greedy, mixed or steps"),
    ],
)
def test_invalid_engine_options_are_refused(make_masked, changes, message):
    with pytest.raises(ValueError, match=message):
        generate(make_masked(), None, [1, 2], **{"max_new_tokens": 8} | changes)


def test_models_and_methods_of_two_kinds_do_not_mix(make_masked, make_tiny, folder, repo):
    target, drafter = make_tiny()
    model = make_masked()
    with pytest.raises(ValueError, match="method=guided: use plain"):
        generate(target, None, [1, 2], method="guided")
    with pytest.raises(ValueError, match="cannot be used with a drafter: give None as the drafter"):
        generate(model, drafter, [1, 2], max_new_tokens=8)
    with pytest.raises(ValueError, match="does not support logits processors"):
        generate(model, None, [1, 2], max_new_tokens=8, processors=[lambda ids, scores: scores])
    with pytest.raises(ValueError, match="every prompt needs at least one token"):
        generate(model, None, [[]], max_new_tokens=8)
    with pytest.raises(ValueError, match="token id 64, but the model has only the ids 0 to 63"):
        generate(model, None, [64], max_new_tokens=8)
    with pytest.raises(ValueError, match="need 129 positions, but the target supports only 128"):
        generate(model, None, [1] * 113, max_new_tokens=15)  # 15 tokens take blocks of 16 positions
    assert is_masked_diffusion(str(folder)) and not is_masked_diffusion("embedded")
    assert set(MASK_TOKEN_AND_SHIFT_BY_REMOTE_MODEL_TYPE) == set(
        MASKED_DIFFUSION_TARGET_KIND.model_types
    )
    (folder / "model.safetensors").unlink()  # both are refused before weights are read
    with pytest.raises(
        ValueError, match="is a masked diffusion model, which cannot be used with a drafter"
    ):
        load_target_and_drafters(TargetConfig(str(folder)), ["no/such/drafter"])
    with pytest.raises(
        ValueError, match="^target.path=embedded: this qwen3 model is no masked diffusion model"
    ):
        load_masked("embedded")


def test_the_server_answers_with_a_masked_model(running, folder):
    model = load_masked(str(folder), "float32", "cpu")

    def decode_in_steps(prompt: str, length: int, **options) -> str:
        return generate(
            model, None, prompt, method="steps", max_new_tokens=length, cache="dual", **options
        ).text

    engine = open_engine(
        model, None, MaskedConfig(max_num_seqs=3, block_length=8, cache="dual"), 60
    )
    with (
        running(engine, max_requests=40) as (url, _),
        openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        completion = client.completions.create(
            model="embedded", prompt=["import os", "class A"], max_tokens=20, temperature=0
        )
        assert [choice.text for choice in completion.choices] == [
            decode_in_steps(prompt, 20) for prompt in ("import os", "class A")
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
        expected = decode_in_steps("def walk(", 17, temperature=0.8, seed=5)
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == expected
        assert sum(bool(chunk.choices) for chunk in chunks) > 2
        assert chunks[-1].usage.completion_tokens <= 17
        with pytest.raises(
            openai.BadRequestError, match="top_p=0.5: masked diffusion decoding does not support it"
        ):
            client.completions.create(**settings, top_p=0.5)


# Like LLaDA's and Dream's code: no post_init, its own tie_weights, nested embeddings, its own
# from_pretrained, and a buffer that is not stored.
MODELLING_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

class FakeConfig(PretrainedConfig):
    model_type = "{kind}"

class Mixer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # Like rotary frequencies, this buffer is not stored.
        self.register_buffer("decay", torch.tensor([0.5]), persistent=False)

    def forward(self, x):
        position = torch.arange(x.shape[1], device=x.device)
        distance = position[:, None] - position
        weights = torch.exp(-self.decay * distance.abs()) * (1 + 0.1 * torch.sign(distance))
        return torch.tanh(weights.to(x.dtype) @ x)

class FakeModel(PreTrainedModel):
    config_class, base_model_prefix = FakeConfig, "model"

    def __init__(self, config, model=None, init_params=False):
        super().__init__(config)
        modules = {
            "wte": torch.nn.Embedding(512, 16),
            "mixer": Mixer(),
            "ff_out": torch.nn.Linear(16, 512, bias=False),
        }
        self.model = torch.nn.Module()
        self.model.transformer = torch.nn.ModuleDict(modules)

    def forward(
        self,
        input_ids=None,
        inputs_embeds=None,
        attention_mask=None,
        attention_bias=None,
        use_cache=None,
    ):
        assert attention_mask is None and not use_cache
        modules = self.model.transformer
        hidden = modules.mixer(modules.wte(input_ids))
        return CausalLMOutput(logits=modules.ff_out(hidden))

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
WEIGHT_NAMES = ("model.transformer.wte.weight", "model.transformer.ff_out.weight")


def make_remote_code_folder(folder: Path, embedded: Path, model_type: str) -> Path:
    """Write a tiny model that loads like LLaDA and Dream, with its own code."""
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(embedded / name, folder)
    (folder / "modeling_fake.py").write_text(MODELLING_CODE.replace("{kind}", model_type))
    config = {
        "model_type": model_type,
        "mask_token_id": MASK_TOKEN,
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
    weights = {name: torch.randn(512, 16, generator=generator) for name in WEIGHT_NAMES}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("model_type, shifted", [("llada", False), ("Dream", True)])
def test_models_with_remote_code_load_and_decode(tmp_path, repo, monkeypatch, model_type, shifted):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = make_remote_code_folder(
        tmp_path / f"tiny-{model_type.lower()}", repo / "data" / "embedded", model_type
    )
    with pytest.raises(ValueError, match="run code that comes with them.*trust_remote_code=true"):
        load_masked(str(folder), "float32", "cpu")
    model = load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    assert (
        is_masked_diffusion(str(folder))
        and model.shifted is shifted
        and model.mask_token_id == MASK_TOKEN
    )
    stored = load_file(folder / "model.safetensors")
    assert all(
        torch.equal(model.model.state_dict()[name], weight) for name, weight in stored.items()
    )
    assert [float(value) for name, value in model.model.named_buffers()] == [0.5]
    ids = torch.tensor([[5, 6, MASK_TOKEN, 8]])
    remote_logits = model.model(input_ids=ids).logits
    assert torch.equal(
        model.compute_logits(ids)[0, 2, :MASK_TOKEN], remote_logits[0, 2 - shifted, :MASK_TOKEN]
    )
    prompts = [[5, 6], [7, 8, 9], [9, 4]]
    for temperature in (0.0, 0.8):
        settings = {"max_new_tokens": 16, "temperature": temperature, "seed": 2}
        expected = [
            answer.ids
            for answer in generate(model, None, prompts, method="steps", max_num_seqs=1, **settings)
        ]
        for method in ("greedy", "mixed", "guided"):
            # The prompts have two lengths, so each round is two passes.
            outputs = generate(model, None, prompts, method=method, **settings)
            assert [output.ids for output in outputs] == expected
    with pytest.raises(
        ValueError, match="cache=dual: .* does not support our KV cache; use cache=none"
    ):
        generate(model, None, prompts, cache="dual")


def test_remote_code_and_weights_that_do_not_match_are_refused_in_one_sentence(
    tmp_path, repo, monkeypatch
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules")
    )
    folder = make_remote_code_folder(tmp_path / "lacking", repo / "data" / "embedded", "llada")
    weights = load_file(folder / "model.safetensors")
    head = weights.pop("model.transformer.ff_out.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match="only in the model's code, for example model.transformer.ff_out.weight"
    ):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    save_file(weights | {"head": head}, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="only in the model's code, for example head"):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)
    folder = make_remote_code_folder(tmp_path / "old", repo / "data" / "embedded", "Dream")
    code = (folder / "modeling_fake.py").read_text()
    (folder / "modeling_fake.py").write_text(
        code.replace("        modules = {", "        config.removed_method()\n        modules = {")
    )
    with pytest.raises(
        ValueError, match="the model's own code does not run with transformers .*AttributeError"
    ):
        load_masked(str(folder), "float32", "cpu", trust_remote_code=True)


def make_masked_folder(repo: Path, copy: Path) -> Path:
    """Write two layers of the embedded causal model with a masked model's config.json. Its outputs
    make no sense."""
    shutil.copytree(
        repo / "data" / "embedded", copy, ignore=shutil.ignore_patterns("answers.jsonl")
    )
    edit_config(copy, mask_token_id=1, masked_diffusion={"shifted": True}, num_hidden_layers=2)
    edit_config(copy, layer_types=["full_attention"] * 2)
    tensors = load_file(copy / "model.safetensors")
    two_layers = {
        name: tensor
        for name, tensor in tensors.items()
        if ".layers." not in name or int(name.split(".")[2]) < 2
    }
    save_file(two_layers, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


@pytest.fixture
def folder(tmp_path, repo) -> Path:
    return make_masked_folder(repo, tmp_path / "model")


def edit_config(folder: Path, **changes) -> None:
    """Change entries of config.json. None removes an entry."""
    config = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )


@pytest.mark.robustness
def test_the_commands_continue_a_text_and_print_the_table(folder, tmp_path, capsys):
    target = TargetConfig(str(folder), "float32", "cpu")
    config = GenerateCommand(prompt="import os", target=target)
    config.decoding = DecodeOptions(max_new_tokens=8)
    config.masked = MaskedConfig(cache="dual")
    config.check()
    run_generate(config)
    printed = capsys.readouterr()
    answer = generate(
        load_masked(str(folder), "float32", "cpu"),
        None,
        "import os",
        max_new_tokens=8,
        cache="dual",
    )
    assert printed.out == f"import os{answer.text}\n"
    assert f"[guided: 8 tokens in {answer.stats.rounds} rounds" in printed.err
    evaluation = EvaluationConfig(prompts=1, max_prompt_tokens=8, max_new_tokens=5)
    config = EvalCommand(
        target=target,
        out=str(tmp_path / "out"),
        evaluation=evaluation,
        masked=MaskedConfig(cache="dual"),
    )
    config.check()
    run_eval(config)
    lines = capsys.readouterr().out.splitlines()
    # Methods whose outputs equal those of step-by-step decoding.
    lossless = [line.split("|")[1].strip() for line in lines if line.endswith("yes |")]
    assert lossless[:4] == ["step by step", "greedy 1", "mixed 1", "guided 1"]
    assert lossless[-1] == "guided 5, 16 states"
    assert len(lossless) == 1 + 5 * 3 + 1
    result = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    assert result["max_new_tokens"] == 8
    assert result["methods"][0]["rounds"] == 8
    assert len(result["methods"]) == 17


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"mask_token_id": None}, "this model has no mask token; add mask_token_id"),
        ({"masked_diffusion": None}, "no masked diffusion model"),
        ({"model_type": "llama"}, "this llama model is no masked diffusion model"),
    ],
)
def test_other_models_are_refused_in_one_sentence(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ValueError, match=message) as caught:
        load_masked(str(folder))
    assert "\n" not in str(caught.value)
