"""Pre-trains the embedded target: a small Qwen3 on the sources of the Python standard library.

    ./launch.sh pretrain                # about an hour on two cores; writes runs/embedded-target

The folder `data/embedded` in the repository is what this script wrote. Recipe: matrices by Muon, the embedding
and the norms by AdamW, one peak rate, warm-up, plateau, linear decay; windows of the token stream in a fresh
order every epoch. Single process: a target this small needs no engine.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

END_OF_TEXT, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
# The target is no chat model: a chat with it is one text, which it continues.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


@dataclass
class PretrainConfig:
    """Options of the embedded target's pre-training; every default is the shipped recipe.

    out: the folder that is written
    seed: seed of weights and data order
    vocab_size: tokens, special ones among them
    hidden_size: entries of a hidden state
    intermediate_size: entries between the two feed-forward matrices
    num_hidden_layers: layers
    num_attention_heads: query heads
    num_key_value_heads: key and value heads
    head_dim: entries of a head
    length: tokens a window
    batch: windows a step
    steps: training steps
    lr: peak rate of both optimisers
    weight_decay: weight decay of matrices
    warmup: share of the steps
    decay: share of the steps, linear to zero, at the end
    clip: largest norm of the gradient
    compile: train under torch.compile
    save_every: steps between saves
    answers: texts that the finished target writes, for drafters to learn from
    prompt_tokens: tokens of such a text's prompt
    answer_tokens: tokens that the target writes, greedy
    """

    out: str = "runs/embedded-target"
    seed: int = 0
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    length: int = 512
    batch: int = 16
    steps: int = 1000
    lr: float = 3e-3
    weight_decay: float = 0.05
    warmup: float = 0.02
    decay: float = 0.5
    clip: float = 1.0
    compile: bool = True
    save_every: int = 100
    answers: int = 2560
    prompt_tokens: int = 96
    answer_tokens: int = 160

    def check(self) -> None:
        """Raises ValueError for a recipe that cannot run."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: at least 1")
        if min(self.num_key_value_heads, self.head_dim, self.prompt_tokens, self.answer_tokens) < 1:
            raise ValueError("num_key_value_heads, head_dim, prompt_tokens and answer_tokens are at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} divides num_attention_heads")
        if min(self.steps, self.batch, self.length, self.save_every) < 1 or self.answers < 0:
            raise ValueError("steps, batch, length and save_every are at least 1, answers 0 or more")
        if not self.lr > 0 or not self.clip > 0 or not self.weight_decay >= 0:
            raise ValueError(
                f"lr={self.lr} and clip={self.clip}: above 0; weight_decay={self.weight_decay}: 0 or above"
            )
        if not 0 <= self.warmup <= 1 or not 0 <= self.decay <= 1:
            raise ValueError(f"warmup={self.warmup} and decay={self.decay}: shares of the run, from 0 to 1")


def train_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE of exactly `vocab_size` ids, special tokens first (end of text, mask, padding)."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer(add_prefix_space=False)
    bpe.train_from_iterator(texts, vocab_size=vocab_size, special_tokens=[END_OF_TEXT, MASK, PAD], show_progress=False)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer,
        eos_token=END_OF_TEXT,
        mask_token=MASK,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
    )


def windows(stream, length: int, batch: int, steps: int, seed: int) -> Iterator:
    """Batches (batch, length + 1) of consecutive windows of the token stream; every epoch shifts the
    cuts by a random phase and permutes the windows."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    queue = []
    for _ in range(steps):
        while len(queue) < batch:
            phase = int(torch.randint(length, (1,), generator=generator))
            starts = torch.arange(phase, len(stream) - length - 1, length)
            queue += starts[torch.randperm(len(starts), generator=generator)].tolist()
        rows, queue = queue[:batch], queue[batch:]
        yield torch.stack([stream[start : start + length + 1] for start in rows])


def held_out_loss(model, stream, length: int) -> float:
    """Mean cross-entropy (nats a token) over the held-out stream cut into windows."""
    import torch

    total, count = 0.0, 0
    starts = range(0, len(stream) - length - 1, length)
    with torch.no_grad():
        for start in starts:
            ids = stream[start : start + length + 1][None]
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            total += torch.nn.functional.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
            count += length
    return total / count


def pretrain(config: PretrainConfig) -> dict:
    """Trains and saves tokenizer and weights (bf16 safetensors) to `config.out`; returns the figures."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from data.corpus import stdlib_documents
    from train.config import OptimConfig
    from train.optim import make_optimizer, trapezoid

    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    train_texts = [document.text for document in stdlib_documents("train")]
    held_texts = [document.text for document in stdlib_documents("held_out")]
    tokenizer = train_tokenizer(train_texts, config.vocab_size)
    tokenizer.save_pretrained(out)

    def to_stream(texts: list[str]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(config.seed)
        order = torch.randperm(len(texts), generator=generator).tolist()
        encoded = tokenizer([texts[i] for i in order])["input_ids"]
        return torch.tensor([id for ids in encoded for id in [*ids, tokenizer.eos_token_id]])

    stream, held_stream = to_stream(train_texts), to_stream(held_texts)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            head_dim=config.head_dim,
            max_position_embeddings=2048,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} training tokens", flush=True)

    optimizer = make_optimizer(model, OptimConfig(name="muon", lr=config.lr, weight_decay=config.weight_decay))
    body = torch.compile(model.model) if config.compile else model.model
    began, recent = time.time(), []
    batches = windows(stream, config.length, config.batch, config.steps, config.seed)
    for step, ids in enumerate(batches):
        share = trapezoid(step, config.steps, config.warmup, config.decay)
        for group in optimizer.param_groups:
            group["lr"] = config.lr * share
        with torch.autocast("cpu", torch.bfloat16):
            hidden = body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
        optimizer.step()
        optimizer.zero_grad()
        recent.append(loss.item())
        last = step + 1 == config.steps
        if step % 20 == 0 or last:
            tokens = (step + 1) * ids.numel()
            seconds = time.time() - began
            left = seconds / (step + 1) * (config.steps - step - 1) / 60
            print(
                f"step {step + 1}/{config.steps} loss {sum(recent) / len(recent):.3f} "
                f"{tokens / seconds:,.0f} tokens/s, {left:.0f} min left",
                flush=True,
            )
            recent.clear()
        if (step + 1) % config.save_every == 0 or last:
            figures = {
                "step": step + 1,
                "held_out_loss": held_out_loss(model, held_stream, config.length),
                "held_out_bits_per_byte": None,
                "minutes": (time.time() - began) / 60,
                "train_tokens": len(stream),
                "recipe": asdict(config),
            }
            held_bytes = sum(len(text.encode()) for text in held_texts)
            figures["held_out_bits_per_byte"] = figures["held_out_loss"] * len(held_stream) / held_bytes / math.log(2)
            print(figures, flush=True)
            twin = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
            twin.load_state_dict(model.state_dict())
            twin.save_pretrained(out)
            (out / "pretraining.json").write_text(json.dumps(figures, indent=1) + "\n")
    write_answers(config, out)
    return figures


def write_answers(config: PretrainConfig, out: Path) -> None:
    """Lets the finished target continue prompts from its training text, greedily, into out/answers.jsonl: a drafter
    learns best from what its target writes."""
    import torch

    from data.rows import DataConfig, training_rows
    from infer import DecodeOptions, load_target
    from infer.engine.engine import decode

    target = load_target(str(out))
    size = config.prompt_tokens
    texts = target.tokenizer([row["text"] for row in training_rows(DataConfig(source="stdlib"))])["input_ids"]
    windows = [ids[start : start + size] for ids in texts for start in range(0, len(ids) - 2 * size, size)]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(config.seed)).tolist()
    options = DecodeOptions(method="plain", max_new_tokens=config.answer_tokens, rows=64)
    with (out / "answers.jsonl").open("w") as file:
        for first in range(0, config.answers, 128):
            prompts = [windows[i] for i in order[first : min(first + 128, config.answers)]]
            for prompt, row in zip(prompts, decode(target, None, prompts, options), strict=True):
                response = target.tokenizer.decode(row.ids, skip_special_tokens=True)
                if response.strip():  # a text that ends at once teaches nothing
                    file.write(json.dumps({"prompt": target.tokenizer.decode(prompt), "response": response}) + "\n")
            print(f"{first + len(prompts)}/{config.answers} answers", flush=True)
