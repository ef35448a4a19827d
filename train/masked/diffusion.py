"""Trains a masked diffusion language model: a causal language model made bidirectional, from its own weights.

    ./launch.sh diffusion               # less than half an hour on one core; writes runs/embedded-diffusion

The model stays what it was (for the embedded target: `Qwen3ForCausalLM`) and is run under a mask that lets every token
see its whole document. Begun from autoregressive weights, its outputs stay shifted, as in Dream: the one at position
i - 1 predicts the token at i. The objective is in `train/masked/objective.py`. Single process: a model this small needs
no engine, and what makes DeepSpeed worth its rules (sharded states, several machines) is of no use here.

    <out>/model/              config.json with mask_token_id and masked_diffusion, model.safetensors, tokenizer
    <out>/state.safetensors   float32 weights, the optimiser's moments and the step: a stopped run goes on from here
    <out>/metrics.jsonl       a line a step; held-out bounds among them
    <out>/options.json        the resolved configuration
"""

import json
import math
import shutil
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data.rows import DataConfig
from infer.utils.redact import redact

if TYPE_CHECKING:
    import torch
    from torch import nn

# streams of random numbers, see train.batches.seeded
TRAINING, HELD_OUT, COLD_START = range(3)


@dataclass
class DiffusionConfig:
    """Options of a masked diffusion model's training; every default is the recipe of the embedded one.

    out: the folder that is written
    seed: seed of data order and noise
    start: the causal model to begin with, and its tokenizer: a Qwen3's folder or hub id
    device: cpu, cuda, cuda:1, ..., or auto
    warm_start: begin with that model's weights; false: with its sizes only
    shifted: whether the output at i - 1 predicts the token at i; None: if it starts warm
    mask_token_id: id of the mask; None: the tokenizer's mask token, else an id that no text uses
    block_length: tokens decoded as one block; None: documents are noised whole
    whole: share of the rows whose documents are noised whole all the same
    weighting: how the loss is weighted. elbo: the bound itself; flat: every covered token counts once, less
        noisy
    sources: equal shares of every batch: stdlib, embedded, jsonl, hub (see data/rows.py); the bound is measured on
        held-out text of the first
    path: of jsonl, a file or folder; of hub, the data set's name
    length: tokens of a packed row, and of a document at most
    batch: rows a step
    steps: training steps
    lr: peak rate of both optimisers
    weight_decay: weight decay of matrices
    warmup: share of the steps
    decay: share of the steps, linear to zero, at the end
    clip: largest norm of the gradient
    precision: dtype of products: float32 or bfloat16; weights stay float32
    save_every: steps between saves, and between measurements of the held-out bound
    held_out: rows that the bound is measured on, each under 4 noise levels
    """

    out: str = "runs/embedded-diffusion"
    seed: int = 0
    start: str = "embedded"
    device: str = "auto"
    warm_start: bool = True
    shifted: bool | None = None
    mask_token_id: int | None = None
    block_length: int | None = 32
    whole: float = 0.25
    weighting: str = "flat"
    sources: list[str] = field(default_factory=lambda: ["stdlib", "embedded"])
    path: str | None = None
    length: int = 256
    batch: int = 16
    steps: int = 440
    lr: float = 1e-3
    weight_decay: float = 0.05
    warmup: float = 0.05
    decay: float = 0.9
    clip: float = 1.0
    precision: str = "bfloat16"
    save_every: int = 40
    held_out: int = 32

    def check(self) -> None:
        """Raises ValueError, one sentence, for a run that cannot work."""
        if not self.start:
            raise ValueError("start=<folder or hub id>: which causal model shall it begin as?")
        if not self.sources or any(source not in ("stdlib", "embedded", "jsonl", "hub") for source in self.sources):
            raise ValueError(f"sources={list(self.sources)}: a list of stdlib, embedded, jsonl, hub")
        for data in self.sets():
            data.check()
        if self.path and not {"jsonl", "hub"} & set(self.sources):
            raise ValueError(f"path={self.path}: for sources=[jsonl] or [hub], not for {list(self.sources)}")
        for name in ("batch", "steps", "save_every", "held_out"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if self.batch % len(self.sources):
            raise ValueError(f"batch={self.batch} cannot be shared equally by {len(self.sources)} sources")
        if self.block_length is not None and not 1 <= self.block_length <= self.length:
            raise ValueError(
                f"block_length={self.block_length}: 1 to length={self.length} tokens, or null for whole rows"
            )
        if not 0 <= self.whole <= 1:
            raise ValueError(f"whole={self.whole}: a share of the rows, from 0 to 1")
        if not self.lr > 0 or not self.clip > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"lr={self.lr} and clip={self.clip}: above 0; weight_decay={self.weight_decay}: 0 or above"
            )
        if not 0 <= self.warmup <= 1 or not 0 <= self.decay <= 1:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay}: shares of the run, from 0 to 1")
        if self.weighting not in ("elbo", "flat"):
            raise ValueError(f"weighting={self.weighting}: use elbo or flat")
        if self.precision not in ("float32", "bfloat16"):
            raise ValueError(f"precision={self.precision}: use float32 or bfloat16")
        if not self.out:
            raise ValueError("out=<folder>: where should the model go?")

    def sets(self) -> list[DataConfig]:
        """The data sets to learn from."""
        return [DataConfig(source=source, path=self.path, length=self.length) for source in self.sources]


def begin(config: DiffusionConfig) -> "tuple[nn.Module, object]":
    """The model to train, on its device in float32, and its tokenizer; the model's config carries `mask_token_id` and
    `masked_diffusion`. Raises ValueError for a model of another kind, and for one without an id for the mask."""
    import torch
    from transformers import AutoModelForCausalLM

    from infer.drafters.base import default_mask_token
    from infer.masked.model import NATIVE
    from infer.targets.loading import load_target
    from train.batches import seeded

    start = load_target(config.start, "float32", config.device)
    if start.config.model_type not in NATIVE:
        raise ValueError(
            f"start={config.start}: a {start.config.model_type} model; only {', '.join(NATIVE)} can become a masked "
            "diffusion model here"
        )
    mask, size = config.mask_token_id, start.config.vocab_size
    if mask is None:
        try:
            mask = default_mask_token(start)
        except ValueError:
            raise ValueError(
                f"start={config.start} has no unused token id for the mask: name one that text never uses "
                "with mask_token_id=<id>"
            ) from None
    if not 0 <= mask < size:
        raise ValueError(f"mask_token_id={mask}: the vocabulary has ids 0 to {size - 1}")
    with torch.random.fork_rng():
        torch.manual_seed(seeded(config.seed, COLD_START).initial_seed())
        model = AutoModelForCausalLM.from_config(start.model.config, dtype=torch.float32, attn_implementation="sdpa")
    if config.warm_start:
        model.load_state_dict(start.model.state_dict())
        with torch.no_grad():  # no text had a mask: what stands there is no token's vector
            table = model.get_input_embeddings().weight
            table[mask] = table.mean(0)
    model.config.mask_token_id = mask
    model.config.masked_diffusion = {"shifted": config.warm_start if config.shifted is None else config.shifted}
    model.config.dtype = torch.float32
    return model.to(start.device), start.tokenizer


def held_out_batch(config: DiffusionConfig, tokenizer) -> "dict[str, torch.Tensor]":
    """`config.held_out` packed rows that training never sees, evenly spread over the held-out text: each column (B, T).
    Raises ValueError if there are none."""
    import torch

    from data.packing import pack, tokenize
    from data.rows import held_out_rows

    data = config.sets()[0]
    rows = list(held_out_rows(data))
    columns = {name: [row[name] for row in rows] for name in ("prompt", "text", "messages")}
    pieces = tokenize(columns, tokenizer, data.length, data.long)
    packed = pack({name: [x for x in column if x] for name, column in pieces.items()}, data.length)
    total = len(packed["ids"])
    if not total:
        raise ValueError(f"sources={list(config.sources)}: no held-out row to measure the bound on")
    count = min(config.held_out, total)
    return {name: torch.tensor(column)[[i * total // count for i in range(count)]] for name, column in packed.items()}


def held_out_bounds(model: "nn.Module", rows: "dict[str, torch.Tensor]", config: DiffusionConfig, tokenizer) -> dict:
    """Bounds of the held-out negative log-likelihood, in nats a token and a byte, with documents noised whole and, if
    the configuration has a block length, block by block; always under the same noise."""
    import torch

    from train.batches import seeded
    from train.masked.objective import bound, draw, learnable, noise

    shifted, mask = model.config.masked_diffusion["shifted"], model.config.mask_token_id
    rows = {name: column.to(model.device) for name, column in learnable(rows, shifted, mask).items()}
    size = sum(len(tokenizer.decode(ids[keep]).encode()) for ids, keep in zip(rows["ids"], rows["loss"], strict=True))
    count, length = rows["ids"].shape
    figures = {}
    for name, block in {"whole": length, "block": config.block_length or length}.items():
        total = 0.0
        draws = draw(rows["documents"].repeat(4, 1).cpu(), seeded(config.seed, HELD_OUT))  # levels spread over all
        order = torch.randperm(4 * count, generator=seeded(config.seed, HELD_OUT, 1))
        for part in order.split(16):
            some = {key: column[part % count] for key, column in rows.items()}
            lengths = torch.full((len(part),), block, device=model.device)
            noised = noise(some, draws.select(part).to(model.device), lengths, mask)
            with torch.no_grad(), products(model, config):
                total += bound(model, some, noised, shifted, mask).item()
        nats = total / 4 / rows["loss"].sum().item()
        figures |= {f"{name}_nats_per_token": nats, f"{name}_perplexity": math.exp(nats)}
        figures[f"{name}_nats_per_byte"] = total / 4 / size
    return figures


def products(model: "nn.Module", config: DiffusionConfig) -> "torch.autocast":
    """The precision of a pass."""
    import torch

    return torch.autocast(model.device.type, torch.bfloat16, enabled=config.precision == "bfloat16")


def training_batch(config: DiffusionConfig, sets: list, step: int) -> "dict[str, torch.Tensor]":
    """The rows of a step, as many of every data set: a pure function of seed and step."""
    import torch

    from data.packing import batch

    share = config.batch // len(sets)
    parts = [batch(rows, step * share, share, config.seed) for rows in sets]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def train_step(model: "nn.Module", rows: "dict[str, torch.Tensor]", config: DiffusionConfig, step: int) -> float:
    """Forward and backward of one step; returns the loss in nats a token: with weighting=elbo, an estimate of the
    bound. The noise is a pure function of seed and step."""
    import torch

    from train.batches import seeded
    from train.masked.objective import Noised, bound, draw, learnable, noise

    shifted, mask = model.config.masked_diffusion["shifted"], model.config.mask_token_id
    generator = seeded(config.seed, TRAINING, step)
    draws = draw(rows["documents"], generator).to(model.device)
    rows = {name: column.to(model.device) for name, column in learnable(rows, shifted, mask).items()}
    count, length = rows["ids"].shape
    order = torch.randperm(count, generator=generator).to(model.device)
    lengths = torch.where(order < round(config.whole * count), length, config.block_length or length)
    noised = noise(rows, draws, lengths, mask)
    if config.weighting == "flat":
        weights = (noised.weights > 0).float()
        noised = Noised(noised.ids, weights, weights.sum())
    with products(model, config):
        loss = bound(model, rows, noised, shifted, mask) / noised.tokens.clamp(min=1)
    loss.backward()
    return loss.item()


def save_state(path: Path, model: "nn.Module", optimizer: "torch.optim.Optimizer", step: int) -> None:
    """Writes weights and moments into one file, whole or as it was before whenever the process is killed."""
    from safetensors.torch import save_file

    from infer.utils.files import sync

    state = {}
    for name, parameter in model.named_parameters():
        state[name] = parameter.detach().clone()
        state |= {f"{name}/{key}": value.detach().clone() for key, value in optimizer.state[parameter].items()}
    fresh = path.with_name(f".{path.name}")
    save_file(state, fresh, metadata={"step": str(step)})
    sync(fresh)
    fresh.replace(path)


def load_state(path: Path, model: "nn.Module", optimizer: "torch.optim.Optimizer") -> int:
    """Gives model and optimiser what `save_state` wrote; returns the step to go on with."""
    import torch
    from safetensors import safe_open

    named = dict(model.named_parameters())
    with safe_open(path, "pt") as file, torch.no_grad():
        for key in file.keys():  # noqa: SIM118 (no dictionary)
            name, _, moment = key.partition("/")
            value = file.get_tensor(key)
            if not moment:
                named[name].copy_(value)
            else:
                optimizer.state[named[name]][moment] = value.to(named[name].device) if value.ndim else value
        return int(file.metadata()["step"])


def save_model(folder: Path, model: "nn.Module", tokenizer) -> None:
    """Writes an ordinary model folder aside and puts it in the place of the last one."""
    from infer.formats.integrity import MODEL_MODE

    fresh, old = folder.with_name(f".{folder.name}"), folder.with_name(f".{folder.name}-old")
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.save_pretrained(fresh)
    tokenizer.save_pretrained(fresh)
    for weights in fresh.glob("*.safetensors"):
        weights.chmod(MODEL_MODE)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def prepare(config: DiffusionConfig, out: Path) -> None:
    """Makes the run's folder. Raises ValueError if it holds a run of another configuration."""
    from infer.utils.files import atomic_write

    options, text = out / "options.json", json.dumps(redact(asdict(config)), indent=1) + "\n"
    if options.exists() and options.read_text() != text:
        theirs, ours = json.loads(options.read_text()), json.loads(text)
        names = [name for name in ours if theirs.get(name) != ours[name]]
        raise ValueError(f"out={out} holds a run with other options ({', '.join(names)}): choose another folder")
    out.mkdir(parents=True, exist_ok=True)
    atomic_write(options, text)


def train(config: DiffusionConfig) -> dict:
    """Trains, or goes on training, into `config.out`; returns the last held-out bounds. Raises ValueError or
    FileNotFoundError for models and data that cannot be used."""
    import torch

    from data.packing import packed_rows
    from infer.targets.target import tokenizer_digest
    from train.config import OptimConfig
    from train.optim import make_optimizer, trapezoid
    from train.run.log import trim_log
    from train.safety.processes import disk

    out = Path(config.out)
    model, tokenizer = begin(config)
    prepare(config, out)
    sets = [packed_rows(data, tokenizer, tokenizer_digest(tokenizer)) for data in config.sets()]
    held_out = held_out_batch(config, tokenizer)
    optim = OptimConfig(name="muon", lr=config.lr, weight_decay=config.weight_decay)
    optimizer, first = make_optimizer(model, optim), 0
    if (out / "state.safetensors").exists():
        first = load_state(out / "state.safetensors", model, optimizer)
    trim_log(out / "metrics.jsonl", first)
    if first >= config.steps:
        print(f"{out} is finished: step {first}")

    began, figures = time.time(), {}
    with (out / "metrics.jsonl").open("a") as log:

        def note(step: int, **values: float) -> None:
            log.write(json.dumps({"step": step, **values}) + "\n")
            log.flush()

        def measure(step: int) -> dict:
            figures = held_out_bounds(model.eval(), held_out, config, tokenizer)
            model.train()
            note(step, **{f"held_out_{name}": value for name, value in figures.items()})
            print(f"step {step}: held out " + ", ".join(f"{k} {v:.3f}" for k, v in figures.items()), flush=True)
            return figures

        if first == 0:
            figures = measure(0)
        recent = []
        for step in range(first, config.steps):
            share = trapezoid(step, config.steps, config.warmup, config.decay)
            for group in optimizer.param_groups:
                group["lr"] = config.lr * share
            loss = train_step(model, training_batch(config, sets, step), config, step)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip).item()
            optimizer.step()
            optimizer.zero_grad()
            recent.append(loss)
            done, seconds = step + 1, time.time() - began
            speed = (done - first) * config.batch * config.length / seconds
            note(done, loss=loss, gradient_norm=norm, lr=config.lr * share, tokens_per_second=speed)
            if done % 20 == 0 or done == config.steps:
                left = seconds / (done - first) * (config.steps - done) / 60
                print(
                    f"step {done}/{config.steps} loss {sum(recent) / len(recent):.3f} {speed:,.0f} tokens/s, "
                    f"{left:.0f} min left",
                    flush=True,
                )
                recent.clear()
            if done % config.save_every == 0 or done == config.steps:
                figures = measure(done)
                with disk(str(out)):
                    save_model(out / "model", model, tokenizer)
                    save_state(out / "state.safetensors", model, optimizer, done)
    return figures
