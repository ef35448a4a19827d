"""Masked diffusion: masks and weights equal those of a loop, the bound its exact value; a complete
run and its folder."""

import itertools
import json
import math
from contextlib import nullcontext

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3ForCausalLM,
)

from data.packing import pack_segments
from infer.masked.model import load_masked
from infer.targets.loading import EMBEDDED_TARGET_FOLDER
from infer.utils.hydra_app import run_command
from train.masked import diffusion
from train.masked.diffusion import DiffusionConfig, load_initial_model, train_diffusion_model
from train.masked.objective import (
    MaskingNoise,
    estimate_nll_bound,
    exclude_unpredictable_tokens,
    mask_block_and_later_tokens,
    sample_noise,
)

TINY_VOCABULARY_SIZE = 7
MASK_ID = 6


@pytest.fixture
def tiny(random_qwen3) -> Qwen3ForCausalLM:
    """A Qwen3 of seven tokens, whose weights are large enough for its predictions to differ."""
    return random_qwen3(
        4, vocab_size=TINY_VOCABULARY_SIZE, num_hidden_layers=2, initializer_range=0.3
    ).eval()


def pack_documents(*documents: list[tuple[int, bool]], length: int) -> dict[str, torch.Tensor]:
    """Return one packed sequence (1, T) of documents, each a list of (token, has loss)."""
    ids = [[token for token, _ in document] for document in documents]
    loss = [[has_loss for _, has_loss in document] for document in documents]
    return {
        name: torch.tensor([column]) for name, column in pack_segments(ids, loss, length).items()
    }


def make_batch() -> dict[str, torch.Tensor]:
    """Return three packed sequences of 16 tokens: two documents with prompts and padding; three
    documents, one with two turns and one without loss; a single document."""
    sequences = [
        pack_documents(
            [(1, False), (2, False), *[(k % 6, True) for k in range(7)]],
            [(k % 5, k > 0) for k in range(5)],
            length=16,
        ),
        pack_documents(
            [(3, True)] * 3,
            [(4, False)] * 4,
            [(5, False), (1, True), (2, True), (3, False), (0, True), (1, True)],
            length=16,
        ),
        pack_documents([((5 * k) % 6, True) for k in range(16)], length=16),
    ]
    return {name: torch.cat([sequence[name] for sequence in sequences]) for name in sequences[0]}


def mask_token_by_token(
    batch: dict, noise: MaskingNoise, block_lengths: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as `mask_block_and_later_tokens` in a loop; return masked tokens (B, T) bool and
    weights (B, T)."""
    masked = torch.zeros(batch["ids"].shape, dtype=torch.bool)
    weights = torch.zeros(batch["ids"].shape)
    for row, block_length in enumerate(block_lengths):
        documents = batch["documents"][row].tolist()
        for document in range(max(documents) + 1):
            positions = [i for i, number in enumerate(documents) if number == document]
            learned = [i for i in positions if batch["loss"][row, i]]
            if not learned:
                continue
            starts = range(0, len(learned), block_length)
            blocks = [learned[start : start + block_length] for start in starts]
            number = int(noise.block_uniforms[row, document] * len(blocks))
            block = blocks[number]
            level = noise.levels[row, document]
            predicted = [i for i in block if noise.token_uniforms[row, i] < level]
            for i in predicted:
                masked[row, i] = True
                weights[row, i] = len(blocks) * (len(block) + 1) / len(predicted)

            # after the block: positions with all learned tokens of this and earlier blocks before
            is_last = number + 1 == len(blocks)
            num_earlier = len(learned) if is_last else (number + 1) * block_length
            for i in positions:
                if sum(k < i for k in learned) >= num_earlier and i > block[-1]:
                    masked[row, i] = not is_last
    return masked, weights


@pytest.mark.parametrize("lengths", [[16, 16, 16], [1, 1, 1], [3, 2, 4], [5, 16, 7]])
def test_masks_and_weights_equal_those_of_a_loop(lengths):
    batch = make_batch()
    for seed in range(40):
        noise = sample_noise(batch["documents"], torch.Generator().manual_seed(seed))
        ids, weights = mask_block_and_later_tokens(batch, noise, torch.tensor(lengths), MASK_ID)
        masked, expected_weights = mask_token_by_token(batch, noise, lengths)
        assert torch.equal(ids, batch["ids"].masked_fill(masked, MASK_ID))
        assert torch.allclose(weights, expected_weights, rtol=1e-6)


def test_noise_levels_are_spread_over_the_batch():
    levels = sample_noise(
        torch.zeros(64, 5, dtype=torch.long), torch.Generator().manual_seed(1)
    ).levels
    assert levels.shape == (64, 1) and levels.min() > 0 and levels.max() <= 1
    gaps = levels[:, 0].sort().values.diff()
    assert torch.allclose(gaps, torch.full((63,), 1 / 64), atol=1e-6)


def cross_entropies(model, document: list[int], masked: set[int]) -> dict[int, float]:
    """Return -log p of every masked position, from a forward pass of the document alone."""
    ids = torch.tensor([[MASK_ID if i in masked else token for i, token in enumerate(document)]])
    mask = torch.zeros(1, 1, len(document), len(document))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[0].double()
    logits[:, MASK_ID] = -torch.inf
    log_probs = logits.log_softmax(-1)
    return {i: -log_probs[i - 1, document[i]].item() for i in masked}


def exact_bound(model, document: list[int], block_length: int) -> float:
    """Return the bound by enumerating all sets S of masked tokens among a block's n tokens.

    S has the density t^|S| (1 - t)^(n - |S|). Its integral over t with the weight 1/t is
    (|S| - 1)! (n - |S|)! / n!.
    """
    total = 0.0
    for start in range(1, len(document), block_length):
        block = range(start, min(start + block_length, len(document)))
        later_positions = set(range(block.stop, len(document)))
        n = len(block)
        for size in range(1, n + 1):
            weight = math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
            for masked in itertools.combinations(block, size):
                losses = cross_entropies(model, document, set(masked) | later_positions)
                total += weight * sum(losses[i] for i in masked)
    return total


@pytest.mark.parametrize("block_length", [8, 2])
def test_the_estimate_of_the_bound_is_unbiased(tiny, block_length):
    """The mean over 120 independent batches of 64 maskings (which depend on each other within a
    batch) may be off by five standard errors. By chance this happens less than once in 400,000 runs
    (Student's t, 119 degrees of freedom)."""
    document = [1, 4, 2, 0, 5]
    batch = pack_documents([(token, True) for token in document], length=5)
    batch = exclude_unpredictable_tokens(batch, MASK_ID)
    batch = {name: column.repeat(64, 1) for name, column in batch.items()}
    means = []
    unweighted = []
    with torch.no_grad():
        for seed in range(120):
            noise = sample_noise(batch["documents"], torch.Generator().manual_seed(seed))
            block_lengths = torch.full((64,), block_length)
            ids, weights = mask_block_and_later_tokens(batch, noise, block_lengths, MASK_ID)
            means.append(estimate_nll_bound(tiny, batch, ids, weights, MASK_ID).item() / 64)
            if seed < 20:
                equal_weights = weights.sign()
                bound = estimate_nll_bound(tiny, batch, ids, equal_weights, MASK_ID).item() / 64
                unweighted.append(bound)
    means = torch.tensor(means, dtype=torch.float64)
    error = means.std() / len(means) ** 0.5
    exact = exact_bound(tiny, document, block_length)
    assert error < 0.03 * exact
    assert abs(means.mean() - exact) < 5 * error
    # without the weights the estimate is biased, so the test can fail
    assert abs(sum(unweighted) / 20 - exact) > 10 * error


def test_every_token_sees_its_whole_document_and_no_other(tiny):
    """Gradients are exactly zero outside the document and not zero anywhere inside."""
    batch = pack_documents(
        [(k % 6, True) for k in range(6)], [(k % 5, True) for k in range(7)], length=16
    )
    embeddings = []

    def record_embeddings(module, inputs, output) -> None:
        output.retain_grad()
        embeddings.append(output)

    tiny.get_input_embeddings().register_forward_hook(record_embeddings)
    for position in (1, 9):  # in the first and in the second document
        weights = torch.nn.functional.one_hot(torch.tensor([position]), 16).float()
        estimate_nll_bound(tiny, batch, batch["ids"], weights, MASK_ID).backward()
        same_document = batch["documents"][0] == batch["documents"][0, position]
        gradient_sizes = embeddings.pop().grad[0].abs().sum(-1)
        assert (gradient_sizes[same_document] > 0).all()
        assert not gradient_sizes[~same_document].any()


def test_mask_tokens_in_texts_and_first_tokens_carry_no_loss():
    batch = pack_documents(
        [(1, True), (MASK_ID, True), (2, True)], [(3, True), (4, False)], length=6
    )
    loss = exclude_unpredictable_tokens(batch, MASK_ID)["loss"][0].tolist()
    assert loss == [False, False, True, False, False, False]


@pytest.fixture(scope="module")
def start_folder(tmp_path_factory, random_qwen3):
    """A folder with a causal model of two layers, the embedded tokenizer, and a file of texts."""
    folder = tmp_path_factory.mktemp("start")
    model = random_qwen3(vocab_size=512, num_hidden_layers=2, eos_token_id=0)
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET_FOLDER).save_pretrained(folder / "model")
    texts = [
        {"text": f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(y):\n    return y * {n}\n"}
        for n in range(120)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


@pytest.fixture
def small(start_folder, monkeypatch):
    """A function (out, **options) that returns the options of a run of a few seconds, in
    float32."""
    monkeypatch.setattr(diffusion, "bfloat16_autocast", lambda model: nullcontext())
    monkeypatch.setattr(diffusion, "SAVE_INTERVAL_STEPS", 2)
    monkeypatch.setattr(diffusion, "MAX_HELD_OUT_SEQUENCES", 4)
    sizes = {"steps": 6, "block_length": 8, "length": 64, "batch_size": 4, "lr": 1e-2}
    paths = {"path": str(start_folder / "texts.jsonl"), "init": str(start_folder / "model")}
    defaults = paths | sizes
    return lambda out, **options: DiffusionConfig(str(out), **(defaults | options))


def test_the_bound_falls_and_a_run_is_not_overwritten(small, tmp_path):
    bound = train_diffusion_model(small(tmp_path / "run"))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    bounds = [line["held_out_nats_per_token"] for line in lines if "loss" not in line]
    assert len(bounds) == 4 and bounds[-1] == bound < bounds[0] - 0.1
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="already has a run, and this command cannot resume a run"):
        train_diffusion_model(small(tmp_path / "run"))


@pytest.mark.parametrize("weighting", ["elbo", "flat"])
def test_the_loss_of_a_step_is_the_bound_or_the_mean_over_masked_tokens(
    small, tmp_path, weighting, monkeypatch
):
    config = small(tmp_path, weighting=weighting)
    model, _ = load_initial_model(config)
    batch = {name: column.repeat(2, 1)[:4] for name, column in make_batch().items()}
    batch["ids"] += 9
    maskings = []

    def record_masking(*arguments):
        maskings.append(mask_block_and_later_tokens(*arguments))
        return maskings[-1]

    monkeypatch.setattr(diffusion, "mask_block_and_later_tokens", record_masking)
    loss = diffusion.compute_gradients(model, batch, config, 3)
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    ids, weights = maskings[0]
    predictable = exclude_unpredictable_tokens(batch, 1)
    losses = []
    for row, position in (weights > 0).nonzero().tolist():
        one_weight = torch.zeros(4, 16)
        one_weight[row, position] = 1
        with torch.no_grad():
            losses.append(estimate_nll_bound(model, predictable, ids, one_weight, 1))
    losses = torch.stack(losses)
    if weighting == "elbo":
        expected = (losses * weights[weights > 0]).sum() / predictable["loss"].sum()
    else:
        expected = losses.mean()
    assert len(losses) > 8 and loss == pytest.approx(expected.item(), rel=1e-4)
    assert diffusion.compute_gradients(model, batch, config, 3) == loss
    assert diffusion.compute_gradients(model, batch, config, 4) != loss


def test_the_folder_is_an_ordinary_model(small, start_folder, tmp_path):
    initial = load_initial_model(small(tmp_path))[0].state_dict()
    causal_model = AutoModelForCausalLM.from_pretrained(start_folder / "model", dtype=torch.float32)
    causal = causal_model.state_dict()
    changed = [name for name in causal if not torch.equal(initial[name], causal[name])]
    # only the embedding of the mask token is new
    assert changed == ["model.embed_tokens.weight"]
    changed_rows = (initial[changed[0]] != causal[changed[0]]).any(1).nonzero().tolist()
    assert changed_rows == [[1]]
    train_diffusion_model(small(tmp_path / "run", steps=1, block_length=None))
    folder = tmp_path / "run" / "model"
    config = json.loads((folder / "config.json").read_text())
    assert config["mask_token_id"] == 1 and config["masked_diffusion"] == {"shifted": True}
    files = sorted(path.name for path in folder.parent.iterdir())
    assert files == ["metrics.jsonl", "model", "options.json"]
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    masked = load_masked(str(folder), "float32")
    hf_model = AutoModelForCausalLM.from_pretrained(folder)
    assert (masked.mask_token_id, masked.shifted) == (1, True)
    assert type(hf_model) is Qwen3ForCausalLM
    ids = torch.tensor([[20, 30, 1, 1, 40]])
    with torch.no_grad():
        logits = hf_model(input_ids=ids, attention_mask=torch.zeros(1, 1, 5, 5)).logits
        masked_logits = masked.compute_logits(ids)
    logits[..., 1] = -torch.inf
    assert torch.allclose(masked_logits[0, 2:4], logits[0, 1:3], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["block_length=257"], "it must be from 1 to length=256 tokens, or null"),
        (["batch_size=3"], "batch_size=3 cannot be divided evenly among 2 data sets"),
        (["path=x.jsonl"], "path=x.jsonl: no such file"),
        (["length=8", "block_length=4"], "data.length=8 is too small; set it to at least 16"),
        (["weighting=none"], "weighting=none: use elbo or flat"),
        (["mask_token_id=512"], "it must be an id of the vocabulary, from 0 to 511"),
        (["init=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_invalid_options_are_refused_with_one_sentence(arguments, message, tmp_path, capsys):
    overrides = [f"out={tmp_path / 'run'}", *arguments]
    with pytest.raises(SystemExit) as raised:
        run_command("diffusion", DiffusionConfig, train_diffusion_model, overrides)
    printed = capsys.readouterr().err.strip()
    assert raised.value.code == 2
    assert message in printed and printed.startswith("error: ") and "\n" not in printed
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_without_a_free_id_is_refused(small, start_folder, tmp_path):
    folder = tmp_path / "full"
    AutoModelForCausalLM.from_pretrained(start_folder / "model").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_TARGET_FOLDER)
    tokenizer.mask_token = tokenizer.pad_token = None
    tokenizer.chat_template = "<|mask|><|pad|>"  # in use
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ValueError, match="has no unused token id for the mask token: choose an id with mask_token"
    ):
        train_diffusion_model(small(tmp_path / "run", init=str(folder)))


def test_a_model_with_another_architecture_is_refused(tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=1, **sizes)).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(EMBEDDED_TARGET_FOLDER).save_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match="model_type llama is not supported. Give a model of the type qwen3"
    ):
        train_diffusion_model(DiffusionConfig(out=str(tmp_path / "run"), init=str(tmp_path)))
