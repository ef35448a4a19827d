"""Masked diffusion: masks and weights against a loop, the bound against its exact value, a whole
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

from data.packing import lay_out
from infer.masked.model import load_masked
from infer.targets.loading import EMBEDDED
from infer.utils.hydra_app import run_command
from train.masked import diffusion
from train.masked.diffusion import DiffusionConfig, begin, train
from train.masked.objective import Dice, bound, learnable, noise, throw

V = 7
MASK = 6


@pytest.fixture
def tiny(random_qwen3) -> Qwen3ForCausalLM:
    """A Qwen3 of seven tokens, whose weights are large enough for its predictions to differ."""
    return random_qwen3(4, vocab_size=V, num_hidden_layers=2, initializer_range=0.3).eval()


def packed(*documents: list[tuple[int, bool]], length: int) -> dict[str, torch.Tensor]:
    """One row (1, T) of documents, each a list of (token, whether it may be learnt)."""
    ids, loss = ([[entry[i] for entry in document] for document in documents] for i in (0, 1))
    return {name: torch.tensor([column]) for name, column in lay_out(ids, loss, length).items()}


def rows() -> dict[str, torch.Tensor]:
    """Rows of 16 tokens: two documents with prompts and padding; three, one of two turns and one
    that may not be learnt; a single one."""
    yes = True
    no = False
    parts = [
        packed(
            [(1, no), (2, no), *[(k % 6, yes) for k in range(7)]],
            [(k % 5, k > 0) for k in range(5)],
            length=16,
        ),
        packed(
            [(3, yes)] * 3,
            [(4, no)] * 4,
            [(5, no), (1, yes), (2, yes), (3, no), (0, yes), (1, yes)],
            length=16,
        ),
        packed([((5 * k) % 6, yes) for k in range(16)], length=16),
    ]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def plain_noise(batch: dict, dice: Dice, lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """`noise`, one token after the other: covered tokens (B, T) bool, weights (B, T)."""
    covered = torch.zeros(batch["ids"].shape, dtype=torch.bool)
    weights = torch.zeros(batch["ids"].shape)
    for b, length in enumerate(lengths):
        for document in range(int(batch["documents"][b].max()) + 1):
            places = [
                i for i in range(batch["ids"].shape[1]) if batch["documents"][b, i] == document
            ]
            learnt = [i for i in places if batch["loss"][b, i]]
            if not learnt:
                continue
            blocks = [learnt[k : k + length] for k in range(0, len(learnt), length)]
            chosen = int(dice.blocks[b, document] * len(blocks))
            hit = [i for i in blocks[chosen] if dice.coins[b, i] < dice.levels[b, document]]
            for i in hit:
                covered[b, i], weights[b, i] = (
                    True,
                    len(blocks) * (len(blocks[chosen]) + 1) / len(hit),
                )
            last = len(learnt) if chosen + 1 == len(blocks) else (chosen + 1) * length
            for i in (
                places
            ):  # behind the block: as many tokens to learn before it as blocks up to here hold
                if sum(k < i for k in learnt) >= last and i > blocks[chosen][-1]:
                    covered[b, i] = chosen + 1 < len(blocks)
    return covered, weights


@pytest.mark.parametrize("lengths", [[16, 16, 16], [1, 1, 1], [3, 2, 4], [5, 16, 7]])
def test_noise_covers_and_weighs_as_a_plain_loop_does(lengths):
    batch = rows()
    for seed in range(40):
        dice = throw(batch["documents"], torch.Generator().manual_seed(seed))
        ids, found = noise(batch, dice, torch.tensor(lengths), MASK)
        covered, weights = plain_noise(batch, dice, lengths)
        assert torch.equal(ids, batch["ids"].masked_fill(covered, MASK))
        assert torch.allclose(found, weights, rtol=1e-6)


def test_noise_levels_are_spread_over_the_batch():
    levels = throw(torch.zeros(64, 5, dtype=torch.long), torch.Generator().manual_seed(1)).levels
    assert levels.shape == (64, 1) and levels.min() > 0 and levels.max() <= 1
    gaps = levels[:, 0].sort().values.diff()
    assert torch.allclose(gaps, torch.full((63,), 1 / 64), atol=1e-6)


def cross_entropies(model, document: list[int], covered: set[int]) -> dict[int, float]:
    """-log p of every covered token of a document, from a pass over that document alone."""
    ids = torch.tensor([[MASK if i in covered else token for i, token in enumerate(document)]])
    mask = torch.zeros(1, 1, len(document), len(document))
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[0].double()
    logits[:, MASK] = -torch.inf
    scores = logits.log_softmax(-1)
    return {i: -scores[i - 1, document[i]].item() for i in covered}


def exact_bound(model, document: list[int], block: int) -> float:
    """The bound by enumeration: a set S of a block's n tokens is the covered one with density t^|S|
    (1 - t)^(n - |S|), whose integral over t with the weight 1/t is (|S| - 1)! (n - |S|)! / n!."""
    total = 0.0
    for start in range(1, len(document), block):
        members = range(start, min(start + block, len(document)))
        after = set(range(members.stop, len(document)))
        n = len(members)
        for size in range(1, n + 1):
            weight = math.factorial(size - 1) * math.factorial(n - size) / math.factorial(n)
            for chosen in itertools.combinations(members, size):
                losses = cross_entropies(model, document, set(chosen) | after)
                total += weight * sum(losses[i] for i in chosen)
    return total


@pytest.mark.parametrize("block", [8, 2])
def test_the_estimate_of_the_bound_is_unbiased(tiny, block):
    """120 independent batches of 64 maskings each (within a batch they depend on each other); the
    mean may be five standard errors off, which chance brings about less than once in 400,000 runs
    (Student's t, 119 degrees)."""
    document = [1, 4, 2, 0, 5]
    batch = learnable(packed([(token, True) for token in document], length=5), MASK)
    batch = {name: column.repeat(64, 1) for name, column in batch.items()}
    means = []
    unweighted = []
    with torch.no_grad():
        for seed in range(120):
            dice = throw(batch["documents"], torch.Generator().manual_seed(seed))
            ids, weights = noise(batch, dice, torch.full((64,), block), MASK)
            means.append(bound(tiny, batch, ids, weights, MASK).item() / 64)
            if seed < 20:
                unweighted.append(bound(tiny, batch, ids, weights.sign(), MASK).item() / 64)
    means = torch.tensor(means, dtype=torch.float64)
    error = means.std() / len(means) ** 0.5
    exact = exact_bound(tiny, document, block)
    assert error < 0.03 * exact
    assert abs(means.mean() - exact) < 5 * error
    assert (
        abs(sum(unweighted) / 20 - exact) > 10 * error
    )  # the test can tell: without the weights it is another sum


def test_every_token_sees_its_whole_document_and_no_other(tiny):
    """Through gradients: exactly zero outside the document, something everywhere inside."""
    batch = packed([(k % 6, True) for k in range(6)], [(k % 5, True) for k in range(7)], length=16)
    seen = []
    tiny.get_input_embeddings().register_forward_hook(
        lambda _, __, output: seen.append(output) or output.retain_grad()
    )
    for place in (1, 9):  # of the first, of the second document
        only = torch.nn.functional.one_hot(torch.tensor([place]), 16).float()
        bound(tiny, batch, batch["ids"], only, MASK).backward()
        inside = batch["documents"][0] == batch["documents"][0, place]
        size = seen.pop().grad[0].abs().sum(-1)
        assert (size[inside] > 0).all()
        assert not size[~inside].any()


def test_a_mask_that_a_text_quotes_and_a_first_token_carry_no_loss():
    batch = packed([(1, True), (MASK, True), (2, True)], [(3, True), (4, False)], length=6)
    assert learnable(batch, MASK)["loss"][0].tolist() == [False, False, True, False, False, False]


@pytest.fixture(scope="module")
def start(tmp_path_factory, random_qwen3):
    """A folder with a causal model of two layers and the embedded tokenizer, and a file of
    texts."""
    folder = tmp_path_factory.mktemp("start")
    random_qwen3(vocab_size=512, num_hidden_layers=2, eos_token_id=0).save_pretrained(
        folder / "model"
    )
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(folder / "model")
    texts = [
        {"text": f"def f{n}(x):\n    return x + {n}\n\n\ndef g{n}(y):\n    return y * {n}\n"}
        for n in range(120)
    ]
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    return folder


@pytest.fixture
def small(start, monkeypatch):
    """(out, **options) -> the options of a run of seconds, in float32."""
    monkeypatch.setattr(diffusion, "products", lambda model: nullcontext())
    monkeypatch.setattr(diffusion, "SAVE_EVERY", 2)
    monkeypatch.setattr(diffusion, "HELD_OUT_ROWS", 4)
    sizes = {"steps": 6, "block_length": 8, "length": 64, "batch_size": 4, "lr": 1e-2}
    own = {"path": str(start / "texts.jsonl"), "init": str(start / "model")} | sizes
    return lambda out, **options: DiffusionConfig(str(out), **(own | options))


def test_the_bound_falls_and_a_run_is_not_overwritten(small, tmp_path):
    nats = train(small(tmp_path / "run"))
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    bounds = [line["held_out_nats_per_token"] for line in lines if "loss" not in line]
    assert len(bounds) == 4 and bounds[-1] == nats < bounds[0] - 0.1
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="holds a run, and runs are not gone on with"):
        train(small(tmp_path / "run"))


@pytest.mark.parametrize("weighting", ["elbo", "flat"])
def test_the_loss_of_a_step_is_the_bound_or_the_mean_over_covered_tokens(
    small, tmp_path, weighting, monkeypatch
):
    config = small(tmp_path, weighting=weighting)
    model, _ = begin(config)
    batch = {name: column.repeat(2, 1)[:4] for name, column in rows().items()}
    used = []
    batch["ids"] += 9
    monkeypatch.setattr(
        diffusion, "noise", lambda *arguments: used.append(noise(*arguments)) or used[-1]
    )
    loss = diffusion.train_step(model, batch, config, 3)
    assert model.get_input_embeddings().weight.grad.abs().sum() > 0
    ids, weights = used[0]
    single = [
        torch.zeros(4, 16).index_put_((b, i), torch.ones(()))
        for b, i in (weights > 0).nonzero()[:, :, None]
    ]
    rest = learnable(batch, 1)
    with torch.no_grad():
        losses = torch.stack([bound(model, rest, ids, one, 1) for one in single])
    exact = (losses * weights[weights > 0]).sum() / rest["loss"].sum()
    expected = exact if weighting == "elbo" else losses.mean()
    assert len(single) > 8 and loss == pytest.approx(expected.item(), rel=1e-4)
    assert (
        diffusion.train_step(model, batch, config, 3)
        == loss
        != diffusion.train_step(model, batch, config, 4)
    )


def test_the_folder_is_an_ordinary_model_and_says_what_it_is(small, start, tmp_path):
    begun = begin(small(tmp_path))[0].state_dict()
    theirs = AutoModelForCausalLM.from_pretrained(start / "model", dtype=torch.float32).state_dict()
    apart = [name for name in theirs if not torch.equal(begun[name], theirs[name])]
    assert apart == ["model.embed_tokens.weight"]  # only what stands for the mask is new
    assert (begun[apart[0]] != theirs[apart[0]]).any(1).nonzero().tolist() == [[1]]
    train(small(tmp_path / "run", steps=1, block_length=None))
    folder = tmp_path / "run" / "model"
    said = json.loads((folder / "config.json").read_text())
    assert said["mask_token_id"] == 1 and said["masked_diffusion"] == {"shifted": True}
    left = sorted(path.name for path in folder.parent.iterdir())
    assert left == ["metrics.jsonl", "model", "options.json"]
    assert (folder / "model.safetensors").stat().st_mode & 0o777 == 0o644
    masked = load_masked(str(folder), "float32")
    plain = AutoModelForCausalLM.from_pretrained(folder)
    assert (masked.mask_token_id, masked.shifted) == (1, True)
    assert type(plain) is Qwen3ForCausalLM
    ids = torch.tensor([[20, 30, 1, 1, 40]])
    with torch.no_grad():
        logits = plain(input_ids=ids, attention_mask=torch.zeros(1, 1, 5, 5)).logits
        scores = masked.logits(ids)
    logits[..., 1] = -torch.inf
    assert torch.allclose(scores[0, 2:4], logits[0, 1:3], atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["block_length=257"], "block_length=257: 1 to length=256 tokens, or null"),
        (["batch_size=3"], "batch_size=3 cannot be shared equally by 2 data sets"),
        (["path=x.jsonl"], "path=x.jsonl: no such file"),
        (["length=8", "block_length=4"], "data.length=8: at least 16"),
        (["weighting=none"], "weighting=none: use elbo or flat"),
        (["mask_token_id=512"], "mask_token_id=512: the vocabulary has ids 0 to 511"),
        (["init=/nowhere/at/all"], "/nowhere/at/all"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        run_command("diffusion", DiffusionConfig, train, [f"out={tmp_path / 'run'}", *arguments])
    said = capsys.readouterr().err.strip()
    assert ended.value.code == 2
    assert sentence in said and said.startswith("error: ") and "\n" not in said
    assert not (tmp_path / "run").exists()


def test_a_vocabulary_without_a_spare_id_is_refused(small, start, tmp_path):
    folder = tmp_path / "full"
    AutoModelForCausalLM.from_pretrained(start / "model").save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    tokenizer.mask_token = tokenizer.pad_token = None
    tokenizer.chat_template = "<|mask|><|pad|>"  # in use
    tokenizer.save_pretrained(folder)
    with pytest.raises(
        ValueError, match="no token id is free for the mask: name one by mask_token_id=<id>"
    ):
        train(small(tmp_path / "run", init=str(folder)))


def test_a_model_of_another_kind_is_refused(tmp_path):
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
    }
    LlamaForCausalLM(LlamaConfig(vocab_size=512, num_key_value_heads=1, **sizes)).save_pretrained(
        tmp_path
    )
    AutoTokenizer.from_pretrained(EMBEDDED).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="only qwen3 can become a masked"):
        train(DiffusionConfig(out=str(tmp_path / "run"), init=str(tmp_path)))
