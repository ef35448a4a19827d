"""Trains a masked diffusion language model: a causal language model made bidirectional, from its
own weights.

    ./launch.sh diffusion               # less than half an hour on one core; writes runs/embedded-diffusion

The model stays what it was (for the embedded target: `Qwen3ForCausalLM`) and is run under a mask
that lets every token see its whole document. Its outputs stay shifted, as in Dream: the one at
position i - 1 predicts the token at i. Single process, without DeepSpeed.

    <out>/model/          config.json with mask_token_id and masked_diffusion, model.safetensors,
                          tokenizer
    <out>/metrics.jsonl   a line a step; held-out bounds among them
    <out>/options.json    the resolved configuration
"""

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from transformers import AutoModelForCausalLM

from data.packing import batch, best_fit, lay_out, pieces_of, prepare_rows, refuse_no_rows
from data.rows import held_out_rows
from infer.drafters.base import default_mask_token
from infer.masked.model import NATIVE
from infer.targets.loading import load_target
from infer.targets.target import tokenizer_digest
from infer.utils.errors import disk, going_on
from infer.utils.files import READABLE, replacing_folder, write_json
from infer.utils.progress import Progress
from train.batches import seeded
from train.config import OptimConfig
from train.masked.config import DiffusionConfig
from train.masked.objective import Dice, bound, learnable, noise, throw
from train.optim import make_optimizer, set_rate, trapezoid

WARMUP_SHARE = 0.05  # of the steps
DECAY_SHARE = 0.9
TRAINING, HELD_OUT = range(2)  # streams of random numbers, see train.batches.seeded
WHOLE = 0.25  # share of the rows whose documents are noised whole, whatever the block length
SAVE_EVERY = 40  # steps between saves, and between measurements of the held-out bound
HELD_OUT_ROWS = 32  # that the bound is measured on, each under LEVELS noise levels
LEVELS = 4


def begin(config: DiffusionConfig) -> tuple[nn.Module, object]:
    """Return the model to train, on its device in float32, and its tokenizer; the model's config
    carries `mask_token_id` and `masked_diffusion`. Raises ValueError for a model of another kind,
    and for one without an id for the mask."""
    start = load_target(config.init, "float32")
    if start.config.model_type not in NATIVE:
        raise ValueError(
            f"init={config.init}: only {', '.join(NATIVE)} can become a masked diffusion model here"
        )
    mask = config.mask_token_id
    size = start.config.vocab_size
    if mask is None:
        try:
            mask = default_mask_token(start.tokenizer, size, start.end_ids)
        except ValueError:
            raise ValueError(
                "no token id is free for the mask: name one by mask_token_id=<id>"
            ) from None
    if not 0 <= mask < size:
        raise ValueError(f"mask_token_id={mask}: the vocabulary has ids 0 to {size - 1}")
    model = AutoModelForCausalLM.from_config(
        start.model.config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.load_state_dict(start.model.state_dict())
    with torch.no_grad():  # no text had a mask: what stands there is no token's vector
        table = model.get_input_embeddings().weight
        table[mask] = table.mean(0)
    model.config.mask_token_id = mask
    model.config.masked_diffusion = {"shifted": True}
    model.config.dtype = torch.float32
    return model.to(start.device), start.tokenizer


def held_out_batch(config: DiffusionConfig, tokenizer) -> dict[str, torch.Tensor]:
    """Return HELD_OUT_ROWS packed rows that training never sees, evenly spread over the held-out
    text: each column (B, T). Raises ValueError if there are none."""
    data = config.sets()[0]
    pieces = []
    for row in held_out_rows(data):
        with suppress(ValueError):  # training leaves such a row out, and says so
            pieces += pieces_of(row, tokenizer, data.length)
    rows = list(best_fit([len(ids) for ids, _ in pieces], data.length))
    if not rows:
        raise ValueError(f"path={config.path}: no held-out row to measure the bound on")
    count = min(HELD_OUT_ROWS, len(rows))
    chosen = [rows[i * len(rows) // count] for i in range(count)]
    packed = [lay_out(*zip(*(pieces[i] for i in row), strict=True), data.length) for row in chosen]
    return {name: torch.tensor([row[name] for row in packed]) for name in packed[0]}


def held_out_bound(
    model: nn.Module, rows: dict[str, torch.Tensor], config: DiffusionConfig
) -> float:
    """Return the bound of the held-out text, in nats a token, noised as texts will be decoded,
    block by block or whole; always under the same noise."""
    mask = model.config.mask_token_id
    dice = throw(
        rows["documents"].repeat(LEVELS, 1), seeded(config.seed, HELD_OUT)
    )  # levels spread over all
    rows = {name: column.to(model.device) for name, column in learnable(rows, mask).items()}
    count, length = rows["ids"].shape
    total = 0.0
    order = torch.randperm(LEVELS * count, generator=seeded(config.seed, HELD_OUT, 1))
    for part in order.split(16):
        some = {key: column[part % count] for key, column in rows.items()}
        lengths = torch.full((len(part),), config.block_length or length, device=model.device)
        thrown = Dice(*(one[part].to(model.device) for one in dice))
        covered, weights = noise(some, thrown, lengths, mask)
        with torch.no_grad(), products(model):
            total += bound(model, some, covered, weights, mask).item()
    return total / LEVELS / rows["loss"].sum().item()


def products(model: nn.Module) -> torch.autocast:
    """Return the autocast context of a pass: weights stay float32, products are bfloat16."""
    return torch.autocast(model.device.type, torch.bfloat16)


def training_batch(config: DiffusionConfig, sets: list, step: int) -> dict[str, torch.Tensor]:
    """Return the rows of a step, equally many of every data set: a pure function of seed and
    step."""
    share = config.batch_size // len(sets)
    parts = [batch(rows, step * share, share, config.seed) for rows in sets]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def train_step(
    model: nn.Module, rows: dict[str, torch.Tensor], config: DiffusionConfig, step: int
) -> float:
    """Run forward and backward of one step; return the loss in nats a token: with weighting=elbo,
    an estimate of the bound. The noise is a pure function of seed and step."""
    mask = model.config.mask_token_id
    generator = seeded(config.seed, TRAINING, step)
    dice = Dice(*(one.to(model.device) for one in throw(rows["documents"], generator)))
    rows = {name: column.to(model.device) for name, column in learnable(rows, mask).items()}
    count, length = rows["ids"].shape
    order = torch.randperm(count, generator=generator).to(model.device)
    lengths = torch.where(order < round(WHOLE * count), length, config.block_length or length)
    covered, weights = noise(rows, dice, lengths, mask)
    if config.weighting == "flat":
        weights = (weights > 0).float()
    tokens = weights.sum() if config.weighting == "flat" else rows["loss"].sum()
    with products(model):
        loss = bound(model, rows, covered, weights, mask) / tokens.clamp(min=1)
    loss.backward()
    return loss.item()


def save_model(folder: Path, model: nn.Module, tokenizer) -> None:
    """Write an ordinary model folder in the place of the one that was saved before."""
    shutil.rmtree(folder, ignore_errors=True)
    with disk(str(folder)), replacing_folder(folder) as fresh:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        for weights in fresh.glob("*.safetensors"):
            weights.chmod(READABLE)


def take_steps(
    model: nn.Module, rate: float, steps: int, backward: Callable[[int], float]
) -> Iterator[tuple[int, float]]:
    """Take the steps, in one process, with Muon for matrices, which decay, and AdamW for the rest;
    yield how many are taken and the loss, after each.

    rate: the peak rate; backward(step): computes the gradients of a step, counted from 0, and
        returns its loss."""
    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=rate), decay=0.05)
    progress = Progress("training", "steps", stream=sys.stdout)
    for step in range(steps):
        set_rate(optimizer, rate * trapezoid(step, steps, WARMUP_SHARE, DECAY_SHARE))
        loss = backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, steps, f"loss {loss:.3f}")
        yield step + 1, loss


def train(config: DiffusionConfig) -> float:
    """Train into `config.out`; return the last held-out bound. Raises ValueError or
    FileNotFoundError for models and data that cannot be used, and for a folder that has a run in
    it."""
    out = Path(config.out)
    if (out / "metrics.jsonl").exists():
        raise ValueError(
            f"out={out} holds a run, and runs are not gone on with: choose another folder"
        )
    model, tokenizer = begin(config)
    digest = tokenizer_digest(tokenizer)
    progress = Progress("tokenising", "texts")
    sets = []
    for data in config.sets():
        prepared = prepare_rows(data, tokenizer, digest, progress)
        refuse_no_rows(prepared.counts)
        print(*prepared.counts.lines(), sep="\n", flush=True)
        sets.append(prepared.rows)
    held_out = held_out_batch(config, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "options.json", asdict(config))

    def note(**values: float) -> None:
        with (out / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(values) + "\n")

    def measure(step: int) -> float:
        nats = held_out_bound(model.eval(), held_out, config)
        model.train()
        note(step=step, held_out_nats_per_token=nats)
        print(f"step {step}: held out {nats:.3f} nats a token", flush=True)
        return nats

    def backward(step: int) -> float:
        return train_step(model, training_batch(config, sets, step), config, step)

    nats = measure(0)
    with going_on(f"{out}/model is as it was last saved, if it was"):
        for step, loss in take_steps(model, config.lr, config.steps, backward):
            note(step=step, loss=loss)
            if step % SAVE_EVERY == 0 or step == config.steps:
                nats = measure(step)
                save_model(out / "model", model, tokenizer)
    return nats
