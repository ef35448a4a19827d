"""Train a masked diffusion language model. It starts from the weights of a causal language model
and becomes bidirectional.

    ./launch.sh diffusion     # writes runs/embedded-diffusion; less than half an hour on one core

The model keeps the class of the causal model, for example `Qwen3ForCausalLM`, but is run with an
attention mask that lets every token see its whole document. As in the causal model and in
Dream, the output at position i - 1 predicts the token at position i. Training uses a single
process, without DeepSpeed.

    <out>/model/          config.json with mask_token_id and masked_diffusion, model.safetensors,
                          tokenizer
    <out>/metrics.jsonl   one line per step with the loss, and one line per evaluation with the
                          upper bound on held-out text
    <out>/options.json    the resolved configuration

The upper bound on held-out text is a bound on its negative log-likelihood, in nats per token (see
objective.py).
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from data.packing import (
    best_fit_decreasing,
    pack_segments,
    prepare_packed_dataset,
    read_batch,
    refuse_empty_dataset,
    tokenize_example,
)
from data.rows import read_held_out_examples
from infer.drafters.build import choose_mask_token
from infer.masked.model import MASKED_MODEL_TYPES_IN_TRANSFORMERS
from infer.targets.loading import load_target
from infer.targets.target import tokenizer_digest
from infer.utils.errors import abort_on_write_error, set_interrupt_message
from infer.utils.files import SHARED_FILE_MODE, atomic_create_folder, write_json
from infer.utils.progress import Progress
from train.config import OptimConfig
from train.masked.config import DiffusionConfig
from train.masked.objective import (
    estimate_nll_bound,
    exclude_unpredictable_tokens,
    mask_block_and_later_tokens,
    sample_noise,
)
from train.optim import make_optimizer, set_learning_rate, warmup_decay_factor
from train.seeding import seeded_generator

LEARNING_RATE_WARMUP_STEP_SHARE = 0.05  # fraction of all steps in which the learning rate rises
LEARNING_RATE_DECAY_STEP_SHARE = 0.9  # fraction of all steps in which the learning rate falls
MUON_WEIGHT_DECAY = 0.05
DIFFUSION_MAX_GRADIENT_NORM = 1.0
# Keys of `seeded_generator`. They differ, so that training and evaluation draw different random
# numbers.
TRAINING_NOISE_STREAM = 0
HELD_OUT_NOISE_STREAM = 1
# Fraction of the training sequences in which whole documents are masked instead of one block per
# document.
WHOLE_DOCUMENT_MASKING_SHARE = 0.25
SAVE_INTERVAL_STEPS = 40  # steps between saves of the model; it is also evaluated at each save
MAX_HELD_OUT_SEQUENCES = 32
# An evaluation masks each held-out sequence this number of times, each time with other masks.
MASKINGS_PER_HELD_OUT_SEQUENCE = 4
HELD_OUT_BATCH_SIZE = 16  # packed sequences per forward pass of an evaluation


def load_initial_model(config: DiffusionConfig) -> tuple[PreTrainedModel, object]:
    """Load the causal language model `config.init` and its tokenizer, and prepare the model for
    training. Return both.

    The returned model is float32. Its config gets the entries `mask_token_id` and
    `masked_diffusion`. Raises ValueError if the model's architecture is not supported, or if the
    mask token has no valid id.
    """
    start = load_target(config.init, "float32")
    if start.config.model_type not in MASKED_MODEL_TYPES_IN_TRANSFORMERS:
        raise ValueError(
            f"init={config.init}: the model_type {start.config.model_type} is not supported. Give "
            f"a model of the type {' or '.join(MASKED_MODEL_TYPES_IN_TRANSFORMERS)}"
        )
    mask_token_id = config.mask_token_id
    vocab_size = start.config.vocab_size
    if mask_token_id is None:
        assert start.tokenizer is not None
        try:
            mask_token_id = choose_mask_token(start.tokenizer, vocab_size, start.eos_token_ids)
        except ValueError:
            raise ValueError(
                "the vocabulary has no unused token id for the mask token: choose an id with "
                "mask_token_id=<id>"
            ) from None
    if not 0 <= mask_token_id < vocab_size:
        raise ValueError(
            f"mask_token_id={mask_token_id} is not allowed: it must be an id of the vocabulary, "
            f"from 0 to {vocab_size - 1}"
        )

    model = AutoModelForCausalLM.from_config(
        start.model.config, dtype=torch.float32, attn_implementation="sdpa"
    )
    model.load_state_dict(start.model.state_dict())
    # The mask token has no trained embedding yet. It starts with the mean of all embeddings.
    with torch.no_grad():
        embeddings = model.get_input_embeddings().weight
        embeddings[mask_token_id] = embeddings.mean(0)
    model.config.mask_token_id = mask_token_id
    model.config.masked_diffusion = {"shifted": True}
    model.config.dtype = torch.float32
    return model.to(start.device), start.tokenizer


def load_held_out_batch(config: DiffusionConfig, tokenizer) -> dict[str, torch.Tensor]:
    """Return up to MAX_HELD_OUT_SEQUENCES packed sequences of the held-out text, evenly spaced over
    it.

    Keys of the returned dictionary are columns, for example "ids". Values have the shape (packed
    sequences, tokens). Raises ValueError if there is no held-out text.
    """
    data = config.data_configs()[0]
    pieces = []
    for example in read_held_out_examples(data):
        # Leave out invalid examples. The preparation of the training data reports them.
        with suppress(ValueError):
            pieces += tokenize_example(example, tokenizer, data.length)
    sequences = list(best_fit_decreasing([len(ids) for ids, _ in pieces], data.length))
    if not sequences:
        raise ValueError(
            f"path={config.path}: there is no held-out text, so the upper bound on the negative "
            "log-likelihood cannot be measured. Give a path with more text"
        )

    count = min(MAX_HELD_OUT_SEQUENCES, len(sequences))
    packed = []
    for i in range(count):
        piece_numbers = sequences[i * len(sequences) // count]
        ids = [pieces[number][0] for number in piece_numbers]
        loss = [pieces[number][1] for number in piece_numbers]
        packed.append(pack_segments(ids, loss, data.length))
    return {name: torch.tensor([sequence[name] for sequence in packed]) for name in packed[0]}


def measure_held_out_nll_bound(
    model: PreTrainedModel, held_out: dict[str, torch.Tensor], config: DiffusionConfig
) -> float:
    """Return an estimate of the upper bound on the held-out text's negative log-likelihood, in nats
    per token.

    held_out: packed sequences, the result of `load_held_out_batch`. One random block of each
    document is masked, or the whole document if `config.block_length` is None. Every call draws the
    same masks.
    """
    mask_token_id = model.config.mask_token_id
    # Sample the noise for all repetitions of the text in one call, because the noise levels of one
    # call are evenly spread.
    noise = sample_noise(
        held_out["documents"].repeat(MASKINGS_PER_HELD_OUT_SEQUENCE, 1),
        seeded_generator(config.seed, HELD_OUT_NOISE_STREAM),
    )
    held_out = exclude_unpredictable_tokens(held_out, mask_token_id)
    held_out = {name: column.to(model.device) for name, column in held_out.items()}
    count, length = held_out["ids"].shape
    order = torch.randperm(
        MASKINGS_PER_HELD_OUT_SEQUENCE * count,
        generator=seeded_generator(config.seed, HELD_OUT_NOISE_STREAM, 1),
    )
    total = 0.0
    for repetitions in order.split(HELD_OUT_BATCH_SIZE):
        columns = {name: column[repetitions % count] for name, column in held_out.items()}
        block_lengths = torch.full(
            (len(repetitions),), config.block_length or length, device=model.device
        )
        masked_ids, weights = mask_block_and_later_tokens(
            columns, noise.select_rows(repetitions, model.device), block_lengths, mask_token_id
        )
        with torch.no_grad(), bfloat16_autocast(model):
            total += estimate_nll_bound(model, columns, masked_ids, weights, mask_token_id).item()
    return total / MASKINGS_PER_HELD_OUT_SEQUENCE / held_out["loss"].sum().item()


def bfloat16_autocast(model: PreTrainedModel) -> torch.autocast:
    """Return a context manager for forward passes of the model. In it, matmuls are computed in
    bfloat16; the weights stay float32."""
    return torch.autocast(model.device.type, torch.bfloat16)


def load_training_batch(config: DiffusionConfig, datasets: list, step: int) -> dict:
    """Return the packed sequences of a training step, the same number from each data set.

    Keys of the returned dictionary are columns, for example "ids". Values have the shape (packed
    sequences, tokens). The result depends only on the data, the seed and the step.
    """
    share = config.batch_size // len(datasets)
    batches = [read_batch(dataset, step * share, share, config.seed) for dataset in datasets]
    return {name: torch.cat([columns[name] for columns in batches]) for name in batches[0]}


def compute_gradients(
    model: PreTrainedModel, columns: dict[str, torch.Tensor], config: DiffusionConfig, step: int
) -> float:
    """Mask random tokens, run the forward and backward pass of one training step, and return the
    loss in nats per token.

    columns: packed sequences. Keys are column names, values have the shape (packed sequences,
    tokens).

    With weighting=elbo, the loss is an estimate of the upper bound on the negative log-likelihood.
    With weighting=flat, it is the mean cross-entropy of the masked tokens. Which tokens are masked
    depends only on the packed sequences, the seed and the step.
    """
    mask_token_id = model.config.mask_token_id
    generator = seeded_generator(config.seed, TRAINING_NOISE_STREAM, step)
    noise = sample_noise(columns["documents"], generator).to_device(model.device)
    columns = exclude_unpredictable_tokens(columns, mask_token_id)
    columns = {name: column.to(model.device) for name, column in columns.items()}
    count, length = columns["ids"].shape
    order = torch.randperm(count, generator=generator).to(model.device)
    block_lengths = torch.where(
        order < round(WHOLE_DOCUMENT_MASKING_SHARE * count),
        length,
        config.block_length or length,
    )
    masked_ids, weights = mask_block_and_later_tokens(columns, noise, block_lengths, mask_token_id)
    if config.weighting == "flat":
        weights = (weights > 0).float()
        num_tokens = weights.sum()
    else:
        num_tokens = columns["loss"].sum()
    with bfloat16_autocast(model):
        bound = estimate_nll_bound(model, columns, masked_ids, weights, mask_token_id)
        loss = bound / num_tokens.clamp(min=1)
    loss.backward()
    return loss.item()


def save_model(folder: Path, model: PreTrainedModel, tokenizer) -> None:
    """Save model and tokenizer with Hugging Face's `save_pretrained`. A model that was saved in
    `folder` before is replaced."""
    shutil.rmtree(folder, ignore_errors=True)
    with abort_on_write_error(str(folder)), atomic_create_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        for weights in temporary.glob("*.safetensors"):
            weights.chmod(SHARED_FILE_MODE)


def run_optimizer_steps(
    model: nn.Module, peak_rate: float, num_steps: int, backward: Callable[[int], float]
) -> Iterator[tuple[int, float]]:
    """Train a model in a single process, with Muon for matrices and AdamW for all other weights.
    After each step, yield the number of completed steps and the step's loss.

    backward: a function that is called with the number of the step, counted from 0. It computes the
    gradients and returns the loss.
    """
    optim = OptimConfig(name="muon", lr=peak_rate)
    optimizer = make_optimizer(model, optim, weight_decay=MUON_WEIGHT_DECAY)
    progress = Progress("training", "steps", stream=sys.stdout)
    for step in range(num_steps):
        factor = warmup_decay_factor(
            step, num_steps, LEARNING_RATE_WARMUP_STEP_SHARE, LEARNING_RATE_DECAY_STEP_SHARE
        )
        set_learning_rate(optimizer, peak_rate * factor)
        loss = backward(step)
        nn.utils.clip_grad_norm_(model.parameters(), DIFFUSION_MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, num_steps, f"loss {loss:.3f}")
        yield step + 1, loss


def train_diffusion_model(config: DiffusionConfig) -> float:
    """Train a masked diffusion language model, and write it to the folder `config.out`. Return the
    final upper bound on the held-out text's negative log-likelihood, in nats per token.

    Raises ValueError or FileNotFoundError for a model or data that cannot be used. Raises
    ValueError if `config.out` already has a run.
    """
    out = Path(config.out)
    if (out / "metrics.jsonl").exists():
        raise ValueError(
            f"out={out} already has a run, and this command cannot resume a run: choose another "
            "folder with out="
        )
    model, tokenizer = load_initial_model(config)
    datasets = prepare_datasets(config, tokenizer)
    held_out = load_held_out_batch(config, tokenizer)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "options.json", asdict(config))

    def write_metrics(**values: float) -> None:
        with (out / "metrics.jsonl").open("a") as log:
            log.write(json.dumps(values) + "\n")

    def evaluate(step: int) -> float:
        bound = measure_held_out_nll_bound(model.eval(), held_out, config)
        model.train()
        write_metrics(step=step, held_out_nats_per_token=bound)
        print(
            f"step {step}: the negative log-likelihood of held-out text is at most {bound:.3f} "
            "nats per token",
            flush=True,
        )
        return bound

    def backward(step: int) -> float:
        columns = load_training_batch(config, datasets, step)
        return compute_gradients(model, columns, config, step)

    bound = evaluate(0)
    with set_interrupt_message(f"{out}/model has the last saved model, if one was saved already"):
        for step, loss in run_optimizer_steps(model, config.lr, config.steps, backward):
            write_metrics(step=step, loss=loss)
            if step % SAVE_INTERVAL_STEPS == 0 or step == config.steps:
                bound = evaluate(step)
                save_model(out / "model", model, tokenizer)
    return bound


def prepare_datasets(config: DiffusionConfig, tokenizer) -> list:
    """Tokenize and pack the training data. Return a data set of packed sequences for each entry of
    `config.data_configs()`, and print how many of its examples are used and excluded."""
    digest = tokenizer_digest(tokenizer)
    progress = Progress("tokenising", "texts")
    datasets = []
    for data in config.data_configs():
        prepared = prepare_packed_dataset(data, tokenizer, digest, progress)
        refuse_empty_dataset(prepared.counts)
        print(*prepared.counts.format_lines(), sep="\n", flush=True)
        datasets.append(prepared.dataset)
    return datasets
