"""Pre-trains the embedded target: a small Qwen3 (or a hybrid) on the sources and documentation of the standard library.

    ./launch.sh pretrain                # about an hour on two cores; writes runs/embedded-target

The folder `data/embedded` in the repository is what this script wrote, in three stages (its README). Recipe: matrices
by Muon, the embedding and the norms by AdamW, one peak rate, warm-up, plateau, linear decay; windows of the token
stream in a fresh order every epoch, and beside them windows that repeat themselves, from which the model learns to
leave loops. Single process: a target this small needs no engine.
"""

import json
import math
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import ByteLevelBPETokenizer
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from data.corpus import stdlib_documents, stdlib_prose
from infer.api import decode
from infer.config import DecodeOptions
from infer.engine.loops import LONGEST_PERIOD, find_loop, loop_period
from infer.targets.loading import load_target
from infer.utils.entry import going_on
from infer.utils.files import write_json
from infer.utils.progress import Progress
from train.pretraining.config import PretrainConfig
from train.pretraining.single import small_optimizer, take_steps

SPLITS = ("train", "held_out")
WARMUP, DECAY = 0.02, 0.5  # shares of the steps
END_OF_TEXT, MASK, PAD = "<|endoftext|>", "<|mask|>", "<|pad|>"
# The target is no chat model: a chat with it is one text, which it continues.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def train_tokenizer(texts: list[str], vocab_size: int):
    """A byte-level BPE of exactly `vocab_size` ids, special tokens first (end of text, mask, padding)."""
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
    generator = torch.Generator().manual_seed(seed)
    queue = []
    for _ in range(steps):
        while len(queue) < batch:
            phase = int(torch.randint(length, (1,), generator=generator))
            starts = torch.arange(phase, len(stream) - length - 1, length)
            queue += starts[torch.randperm(len(starts), generator=generator)].tolist()
        rows, queue = queue[:batch], queue[batch:]
        yield torch.stack([stream[start : start + length + 1] for start in rows])


class Loop(NamedTuple):
    """A text that repeats itself from its token `begin` on, with a period."""

    text: torch.Tensor  # (n,) token ids
    begin: int
    period: int


@dataclass
class LoopWindows:
    """Windows that begin as a text of the stream does and then repeat themselves to the end: half of them loops that
    the model itself fell into, looked for anew every `every` steps, the others a stretch of 1 to 64 tokens of text."""

    stream: torch.Tensor  # (N,) token ids
    length: int
    generator: torch.Generator
    every: int = 20
    found: list[Loop] = field(default_factory=list)

    def search(self, model: PreTrainedModel, rows: int = 48, prompt: int = 64, tokens: int = 160) -> None:
        """Let the model continue texts greedily, and keep those that end in a loop."""
        starts = torch.randint(len(self.stream) - prompt, (rows,), generator=self.generator).tolist()
        prompts = torch.stack([self.stream[start : start + prompt] for start in starts])
        with torch.autocast("cpu", torch.bfloat16):
            texts = model.generate(prompts, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
        for text in texts:
            if (end := find_loop(text[prompt:].tolist())) is not None:
                end += prompt
                period = loop_period(text.tolist(), end, LONGEST_PERIOD)
                self.found.append(Loop(text[:end], end - 3 * period, period))
        self.found = self.found[-256:]

    def batch(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Draw windows (rows, length + 1), and the first repeated position and period of each, (rows, 2)."""
        drawn = [self._draw(own=bool(self.found) and i % 2 == 0) for i in range(rows)]
        texts = [torch.cat([loop.text, loop.text[-loop.period :].repeat(self.length)]) for loop in drawn]
        marks = torch.tensor([[loop.begin, loop.period] for loop in drawn])
        return torch.stack([text[: self.length + 1] for text in texts]), marks

    def _draw(self, own: bool) -> Loop:
        if own:
            return self.found[int(torch.randint(len(self.found), (1,), generator=self.generator))]
        period = int(2 ** (6 * torch.rand((), generator=self.generator)))  # as many below 8 tokens as above
        begin = int(torch.randint(64, self.length // 2, (1,), generator=self.generator))
        start = int(torch.randint(len(self.stream) - self.length, (1,), generator=self.generator))
        return Loop(self.stream[start : start + begin], begin, period)


def loop_loss(logits: torch.Tensor, ids: torch.Tensor, marks: torch.Tensor, decline: float) -> torch.Tensor:
    """Teach a model to leave loops: each time a stretch comes again, its tokens are to be `decline` times as likely as
    the time before. -log(1 - |p_t - decline p_{t - period}|), the earlier probability without a gradient; mean over the
    repeated tokens (DITTO, Xu et al. 2022, arXiv:2206.02369, section 3.2).

    logits: (R, T, V) at the tokens before ids (R, T); marks: (R, 2) first repeated position and period of each row.
    """
    p = logits.float().log_softmax(-1).gather(-1, ids[..., None])[..., 0].exp()  # (R, T)
    at = torch.arange(ids.shape[1])
    begin, period = marks[:, :1] - 1, marks[:, 1:]  # ids are one behind the window
    before = p.detach().gather(1, (at - period).clamp(min=0))
    looped = at >= begin
    return -torch.log1p(-(p - decline * before).abs().clamp(max=1 - 1e-4))[looped].mean()


def held_out_loss(model, stream, length: int) -> float:
    """Mean cross-entropy (nats a token) over the held-out stream cut into windows."""
    total, count = 0.0, 0
    starts = range(0, len(stream) - length - 1, length)
    with torch.no_grad():
        for start in starts:
            ids = stream[start : start + length + 1][None]
            logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
            total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
            count += length
    return total / count


def token_stream(texts: list[str], tokenizer, seed: int) -> torch.Tensor:
    """Join texts in random order into one stream of token ids, each closed by the end-of-text token."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed)).tolist()
    encoded = tokenizer([texts[i] for i in order])["input_ids"]
    return torch.tensor([id for ids in encoded for id in [*ids, tokenizer.eos_token_id]])


def new_model(config: PretrainConfig, tokenizer) -> PreTrainedModel:
    """Make the model with random weights."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    heads, rope = config.num_attention_heads, {"rope_type": "default", "rope_theta": 10000.0}
    own = {
        "qwen3": {"rope_parameters": rope},
        "qwen3_5_text": {
            "rope_parameters": rope | {"partial_rotary_factor": 0.25},
            **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads"), heads),
            **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), config.head_dim),
        },
    }
    shape = AutoConfig.for_model(
        config.model_type,
        **{name: getattr(config, name) for name in (*sizes, "num_key_value_heads", "head_dim")},
        **own[config.model_type],
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return AutoModelForCausalLM.from_config(shape, dtype=torch.float32)


def pretrain(config: PretrainConfig) -> dict:
    """Train tokenizer and model, save both (bf16 safetensors) to `config.out`, and return the figures."""
    out = Path(config.out)
    torch.manual_seed(config.seed)
    out.mkdir(parents=True, exist_ok=True)
    code = {split: [document.text for document in stdlib_documents(split)] for split in SPLITS}
    prose = {split: [document.text for document in stdlib_prose(split)] for split in SPLITS}
    texts = code["train"] + prose["train"]
    model, tokenizer = continued(config.init) if config.init else begun(config, texts)
    tokenizer.save_pretrained(out)
    stream = token_stream(texts, tokenizer, config.seed)
    held_code, held_prose = (token_stream(of_kind["held_out"], tokenizer, config.seed) for of_kind in (code, prose))
    held_bytes = sum(len(text.encode()) for text in code["held_out"])
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {len(stream):,} training tokens", flush=True)
    began = time.time()
    with going_on(f"{out} is as it was last saved, if it was; the same command begins anew"):
        for step in trained(model, stream, config):
            if step % config.save_every == 0 or step == config.steps:
                loss = held_out_loss(model, held_code, config.length)
                figures = {
                    "step": step,
                    "held_out_loss": loss,
                    "held_out_bits_per_byte": loss * len(held_code) / held_bytes / math.log(2),
                    "held_out_loss_of_prose": held_out_loss(model, held_prose, config.length),
                    "minutes": (time.time() - began) / 60,
                    "train_tokens": len(stream),
                    "recipe": asdict(config),
                }
                print(figures, flush=True)
                half = type(model)(model.config).to(torch.bfloat16)
                half.load_state_dict(model.state_dict())
                half.save_pretrained(out)
                write_json(out / "pretraining.json", figures)
    with going_on(f"the model in {out} is finished, its answers are not; the same command begins anew"):
        write_answers(config, out)
    return figures


def continued(folder: str) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return model and tokenizer of the folder to go on from."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model, PreTrainedTokenizerFast.from_pretrained(folder)


def begun(config: PretrainConfig, texts: list[str]) -> tuple[PreTrainedModel, PreTrainedTokenizerFast]:
    """Return a model with random weights and a tokenizer of these texts."""
    tokenizer = train_tokenizer(texts, config.vocab_size)
    return new_model(config, tokenizer), tokenizer


def trained(model: PreTrainedModel, stream: torch.Tensor, config: PretrainConfig) -> Iterator[int]:
    """Train the model on the token stream; yield how many steps are taken, after each."""
    optimizer = small_optimizer(model, config.lr)
    body = torch.compile(model.model) if config.compile else model.model
    batches = windows(stream, config.length, config.batch, config.steps, config.seed)
    loops = LoopWindows(stream, config.length, torch.Generator().manual_seed(config.seed))

    def backward(step: int) -> float:
        text, leaving = next(batches), 0.0
        if config.loops and step % loops.every == 0:
            loops.search(model)
        again, marks = loops.batch(config.loops) if config.loops else (text[:0], None)
        ids = torch.cat([text, again])  # (batch + loops, length + 1)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model.lm_head(body(input_ids=ids[:, :-1], use_cache=False).last_hidden_state)
            loss = F.cross_entropy(logits[: len(text)].flatten(0, 1), text[:, 1:].flatten())
        if config.loops:
            leaving = loop_loss(logits[len(text) :], again[:, 1:], marks, config.loop_decline)
        (loss + leaving).backward()
        return loss.item()

    for taken in take_steps(model, optimizer, config, 0, backward, WARMUP, DECAY):
        yield taken.step


def write_answers(config: PretrainConfig, out: Path) -> None:
    """Let the finished target continue prompts from its training texts, up to where it repeats itself, into
    out/answers.jsonl: a drafter learns best from what its target writes. Every third answer is sampled at temperature
    1, the others are greedy."""
    target = load_target(str(out))
    size = config.prompt_tokens
    documents = [document.text for read in (stdlib_documents, stdlib_prose) for document in read("train")]
    texts = target.tokenizer(documents)["input_ids"]
    windows = [ids[start : start + size] for ids in texts for start in range(0, len(ids) - 2 * size, size)]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(config.seed)).tolist()
    prompts = [windows[i] for i in order[: config.answers]]
    options = DecodeOptions(
        method="plain", max_new_tokens=config.answer_tokens, rows=64, loop_period=LONGEST_PERIOD, seed=config.seed
    )
    progress = Progress("writing", "answers")
    with (out / "answers.jsonl").open("w") as file:
        for first in range(0, len(prompts), 192):
            some = prompts[first : first + 192]
            greedy = decode(target, None, some[:128], options)
            sampled = decode(target, None, some[128:], replace(options, temperature=1.0, seed=config.seed + first))
            for prompt, row in zip(some, [*greedy, *sampled], strict=True):
                response = target.tokenizer.decode(row.ids, skip_special_tokens=True)
                if response.strip():  # a text that ends at once teaches nothing
                    file.write(json.dumps({"prompt": target.tokenizer.decode(prompt), "response": response}) + "\n")
            progress(first + len(some), len(prompts))
