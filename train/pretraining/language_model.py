"""Pre-trains the embedded target: a small causal model on the sources and documentation of the standard
library.

    ./launch.sh pretrain                # about an hour on two cores; writes runs/embedded-target

The folder `data/embedded` in the repository is what earlier versions of this script wrote, in stages
(its README). Single process: a target this small needs no engine.
"""

from dataclasses import asdict
from pathlib import Path

import torch
from tokenizers import ByteLevelBPETokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from data.corpus import stdlib_documents, stdlib_prose
from infer.targets.loading import load_checked, load_config, load_tokenizer
from infer.utils.errors import going_on
from infer.utils.files import write_json
from train.pretraining.config import PretrainConfig
from train.pretraining.single import take_steps

WINDOW = 512  # tokens
END_OF_TEXT, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
# The target is no chat model: a chat with it is one text, which it continues.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(texts: list[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of exactly `vocab_size` ids, special tokens first (end of text, mask,
    padding)."""
    bpe = ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT, MASK, PAD], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token=END_OF_TEXT,
        mask_token=MASK,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )


def begun(config: PretrainConfig, texts: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return the model and tokenizer to go on from, or random weights and a tokenizer of these
    texts."""
    if config.init is not None:
        return load_checked(config.init, {"dtype": torch.float32}), load_tokenizer(config.init)
    sizes = load_config(config.sizes)
    return AutoModelForCausalLM.from_config(sizes, dtype=torch.float32), train_tokenizer(texts, sizes.vocab_size)


def token_stream(texts: list[str], tokenizer) -> torch.Tensor:
    """Return texts as one stream of token ids, each closed by the end-of-text token."""
    return torch.tensor([id for ids in tokenizer(texts)["input_ids"] for id in [*ids, tokenizer.eos_token_id]])


def mean_loss(model: PreTrainedModel, stream: torch.Tensor) -> float:
    """Mean cross-entropy, nats a token, over a stream cut into windows."""
    windows = stream[: len(stream) // WINDOW * WINDOW].view(-1, 1, WINDOW)
    with torch.no_grad():
        return sum(model(input_ids=ids, labels=ids).loss.item() for ids in windows) / len(windows)


def pretrain(config: PretrainConfig) -> dict:
    """Train tokenizer and model on windows from anywhere in the text, save both (bf16 safetensors) to
    `config.out`, and return the figures."""
    out = Path(config.out)
    torch.manual_seed(config.seed)
    train, held_out = (
        [document.text for read in (stdlib_documents, stdlib_prose) for document in read(split)]
        for split in ("train", "held_out")
    )
    model, tokenizer = begun(config, train)
    stream, held_out = token_stream(train, tokenizer), token_stream(held_out, tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(stream):,} training tokens", flush=True)

    def backward(step: int) -> float:
        starts = torch.randint(len(stream) - WINDOW, (config.batch, 1))
        ids = stream[starts + torch.arange(WINDOW + 1)]
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.item()

    with going_on("nothing is saved before the end: the same command begins anew"):
        losses = [loss for _, loss in take_steps(model, config.lr, config.steps, backward)]
    figures = {"loss": losses[-1], "held_out_loss": mean_loss(model, held_out), "train_tokens": len(stream)}
    print(figures, flush=True)
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)
    write_json(out / "pretraining.json", figures | {"recipe": asdict(config)})
    return figures
