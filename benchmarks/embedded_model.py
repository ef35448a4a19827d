"""Train a small causal language model like data/embedded on Python's own sources and documentation.

    python benchmarks/embedded_model.py                    # an hour on two cores
    python benchmarks/embedded_model.py --init runs/embedded-target --out runs/longer --steps 120
    --lr 1.5e-3

It writes runs/embedded-target. How the files of data/embedded were made:

- Tokenizer, config.json and model.safetensors: by earlier versions of this script, in four stages,
  each started from the previous one with --init. pretraining.json has their options, README.md
  describes them. This version no longer has their repeated windows and doubled layers.
- answers.jsonl: the model's continuations of prompts from its training text, by
  `./launch.sh regenerate target.path=runs/embedded-target data=embedded out=answers.jsonl`.
- drafter/: a drafter with head=selector, trained by `./launch.sh train` on 20,413 such answers
  (LOG.md, "Training the repository's drafter of the embedded target"). ngrams has the n-grams that
  occur at least five times in them, acceptance.json is from its evaluation.
- outside.jsonl: written by hand.
"""

import argparse
import importlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from data.corpus import Document, is_held_out_file, read_stdlib_documents
from infer.targets.loading import load_and_check_model, load_config, load_tokenizer
from infer.utils.progress import Progress
from train.config import OptimConfig
from train.optim import make_optimizer, set_learning_rate, warmup_decay_factor

WINDOW_TOKENS = 512
WARMUP_STEP_SHARE = 0.05
DECAY_STEP_SHARE = 0.9
WEIGHT_DECAY = 0.05
MAX_GRADIENT_NORM = 1.0
END_OF_TEXT = "<|endoftext|>"
TOKENIZER_SPECIAL_TOKENS = [END_OF_TEXT, "<|mask|>", "<|pad|>"]
# The model is not a chat model: it continues the messages of a chat as one text.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def read_language_reference(split: str) -> Iterator[Document]:
    """Yield the chapters of Python's language reference, English prose that is part of Python.

    A hash of its name decides whether a chapter is held out.
    """
    for name, text in sorted(importlib.import_module("pydoc_data.topics").topics.items()):
        if is_held_out_file(name) == (split == "held_out"):
            yield Document("reference:" + name, text)


def read_texts(split: str) -> list[str]:
    """Return the sources and chapters of a split, "train" or "held_out"."""
    return [
        document.text
        for documents in (read_stdlib_documents, read_language_reference)
        for document in documents(split)
    ]


def train_tokenizer(texts: list[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of exactly `vocabulary_size` ids, special tokens first."""
    bpe = ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(
        texts,
        vocab_size=vocabulary_size,
        special_tokens=TOKENIZER_SPECIAL_TOKENS,
        show_progress=False,
    )
    end_of_text, mask, pad = TOKENIZER_SPECIAL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token=end_of_text,
        mask_token=mask,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
    )


def tokenize(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> torch.Tensor:
    """Return texts as one stream of token ids, each text closed by the end-of-text token."""
    stream = []
    for ids in tokenizer(texts)["input_ids"]:
        stream += [*ids, tokenizer.eos_token_id]
    return torch.tensor(stream)


def train_model(model: PreTrainedModel, stream: torch.Tensor, args: argparse.Namespace) -> float:
    """Train with Muon and AdamW on random windows of a stream of token ids, (tokens,).

    Return the loss of the last step in nats a token.
    """
    optimizer = make_optimizer(
        model, OptimConfig(name="muon", lr=args.lr), weight_decay=WEIGHT_DECAY
    )
    progress = Progress("training", "steps")
    loss = torch.tensor(float("nan"))
    for step in range(args.steps):
        set_learning_rate(
            optimizer,
            args.lr * warmup_decay_factor(step, args.steps, WARMUP_STEP_SHARE, DECAY_STEP_SHARE),
        )
        starts = torch.randint(len(stream) - WINDOW_TOKENS, (args.batch, 1))
        ids = stream[starts + torch.arange(WINDOW_TOKENS + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
        optimizer.step()
        optimizer.zero_grad()
        progress(step + 1, args.steps, f"loss {loss.item():.3f}")
    return loss.item()


@torch.no_grad()
def compute_mean_loss(model: PreTrainedModel, stream: torch.Tensor) -> float:
    """Return the mean cross-entropy of a stream, (tokens,), in windows; in nats a token."""
    windows = stream[: len(stream) // WINDOW_TOKENS * WINDOW_TOKENS].view(-1, 1, WINDOW_TOKENS)
    return sum(model(input_ids=ids, labels=ids).loss.item() for ids in windows) / len(windows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default="runs/embedded-target", help="output folder")
    parser.add_argument(
        "--init", help="folder with tokenizer and weights to start from; default: random weights"
    )
    parser.add_argument(
        "--sizes", default="embedded", help="model whose config.json has the sizes of a new one"
    )
    parser.add_argument("--seed", type=int, default=0, help="of weights and data order")
    parser.add_argument("--batch", type=int, default=16, help="windows of 512 tokens a step")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--lr", type=float, default=3e-3, help="peak rate of both optimisers")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    texts = read_texts("train")
    if args.init is not None:
        model = load_and_check_model(args.init, {"dtype": torch.float32})
        tokenizer = load_tokenizer(args.init)
    else:
        sizes = load_config(args.sizes)
        model = AutoModelForCausalLM.from_config(sizes, dtype=torch.float32)
        tokenizer = train_tokenizer(texts, sizes.vocab_size)
    stream = tokenize(texts, tokenizer)
    held_out_stream = tokenize(read_texts("held_out"), tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(stream):,} training tokens", flush=True)

    loss = train_model(model, stream, args)
    results = {
        "loss": loss,
        "held_out_loss": compute_mean_loss(model, held_out_stream),
        "train_tokens": len(stream),
    }
    print(results)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    recipe = json.dumps(results | {"recipe": vars(args)}, indent=1)
    Path(args.out, "pretraining.json").write_text(recipe + "\n")


if __name__ == "__main__":
    main()
