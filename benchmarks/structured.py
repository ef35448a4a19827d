"""What grammars cost and give: tokens a round and a second under a schema, and the grammar's share
of a round.

    python benchmarks/structured.py

The first table is of the embedded target and drafter; its ways take turns, prompt by prompt:
constrained plain decoding, DDTree whose drafter knows nothing of the grammar, and DDTree under the
grammar. The second is of rounds of 64 nodes, also for a random target with a vocabulary of 131,072.
Seconds are the processor's, of one thread.
"""

import argparse
import itertools
import json
import statistics
import string
import time
from collections import defaultdict
from dataclasses import replace

import torch
from inputs import held_out
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infer import Engine, load_drafter, load_target
from infer.config import DrafterConfig, EngineConfig, TextOptions
from infer.drafters.base import Drafter, new_drafter
from infer.engine import runner
from infer.targets.target import Target

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 24},
        "path": {"type": "string", "maxLength": 24},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99999},
        "tags": {"type": "array", "items": {"enum": ["code", "prose", "test"]}, "maxItems": 3},
    },
    "required": ["name", "path", "lines", "tags"],
    "additionalProperties": False,
}
ASKED = {
    "schema": {"json_schema": json.dumps(SCHEMA)},
    "expression": {"regex": r"(def|class) [a-z_]{3,12}\([a-z, ]*\):"},
}
BIG = 131_072


def big_target() -> tuple[Target, Drafter]:
    """Return a random target with many tokens of letters, and a random drafter for it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = []
    small = string.ascii_lowercase
    for size in (2, 3, 4):
        for first, *rest in itertools.product("Ġ" + small + '"', *[small] * (size - 1)):
            word = "".join([first, *rest])
            if len(vocabulary) < BIG - 1:
                vocabulary[word] = len(vocabulary)
                merges.append((word[:-1], word[-1]))
    vocabulary["<end>"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer, backend.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=BIG,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        eos_token_id=vocabulary["<end>"],
        tie_word_embeddings=True,
    )
    target = Target(Qwen3ForCausalLM(config), tokenizer, "big vocabulary")
    drafter = new_drafter(DrafterConfig(layers=1, block_size=8, mask_token_id=0), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return target, drafter


def write(target, drafter, prompt, options, method, budget=16, knows=True, around=()):
    """Write a text; return it, and the processor seconds. knows: the tree follows the grammar."""
    engine = Engine(
        target,
        drafter,
        EngineConfig(method, budget, max_num_seqs=1),
        len(prompt) + options.max_new_tokens + 1,
    )
    if not knows:
        engine.runner.method = replace(engine.runner.method, ranked=False)
    follow_grammars = runner.follow_grammars
    spent = defaultdict(float)

    def timed(owner: object, name: str) -> None:
        run = getattr(owner, name)

        def measured(*arguments):
            began = time.thread_time()
            try:
                return run(*arguments)
            finally:
                spent[name] += time.thread_time() - began

        setattr(owner, name, measured)

    text = engine.submit(prompt, options)
    for name in around:
        timed({"mask": text.grammar, "round": engine.runner}.get(name, runner), name)
    began = time.thread_time()
    while engine.busy:
        engine.step()
    runner.follow_grammars = follow_grammars
    return text, time.thread_time() - began, spent


def gains(target, drafter, prompts, tokens) -> None:
    """Print tokens a round and a second of the three ways."""
    ways = {
        "plain": ("plain", True),
        "drafter without": ("ddtree", False),
        "drafter with": ("ddtree", True),
    }
    print(f"{'':<12}{'':>11}" + "".join(f"{way:>26}" for way in ways))
    for (name, shape), heat in itertools.product(ASKED.items(), (0.0, 0.7)):
        taus = defaultdict(list)
        speeds = defaultdict(list)
        same = True
        for number, prompt in enumerate(prompts):
            options = TextOptions(max_new_tokens=tokens, temperature=heat, seed=number, **shape)
            ids = set()
            for way, (method, knows) in ways.items():
                text, seconds, _ = write(target, drafter, prompt, options, method, knows=knows)
                taus[way].append((len(text.ids) - 1, max(1, text.stats.rounds)))
                speeds[way].append(len(text.ids) / seconds)
                ids.add(tuple(text.ids))
            same &= len(ids) == 1
        cells = []
        for way in ways:
            tau = sum(kept for kept, _ in taus[way]) / sum(rounds for _, rounds in taus[way])
            ratio = statistics.median(
                a / b for a, b in zip(speeds[way], speeds["plain"], strict=True)
            )
            cells.append(f"{tau:>8.2f} {statistics.median(speeds[way]):>8.0f}/s {ratio:>5.2f}x")
        print(
            f"{name:<12}{f't = {heat}':>11}"
            + "".join(f"{cell:>26}" for cell in cells)
            + f"   same texts: {same}"
        )


def shares(target, drafter, prompts, tokens) -> None:
    """Print the grammar's share of rounds of 64 nodes: trees under it, what it forces, masks of the
    target."""
    around = ("round", "follow_grammars", "mask")
    for name, shape in ASKED.items():
        total = defaultdict(float)
        rounds = 0
        for number, prompt in enumerate(prompts):
            options = TextOptions(max_new_tokens=tokens, temperature=0.7, seed=number, **shape)
            text, _, spent = write(target, drafter, prompt, options, "ddtree", 64, True, around)
            rounds += text.stats.rounds
            for key, seconds in spent.items():
                total[key] += seconds
        round_ = total.pop("round")
        parts = total
        said = ", ".join(f"{key} {1000 * value / rounds:.2f}" for key, value in parts.items())
        print(
            f"{target.name:<16}{name:<12} a round {1000 * round_ / rounds:6.1f} ms, the grammar's part "
            f"{sum(parts.values()) / round_:.1%} ({said} ms)"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target("embedded", device="cpu")
    drafter = load_drafter("embedded")
    prompts = held_out(target.tokenizer, args.prompts, 64)
    gains(target, drafter, prompts, args.tokens)
    shares(target, drafter, prompts, args.tokens)
    shares(
        *big_target(),
        [list(range(300 + i, 316 + i)) for i in range(min(4, args.prompts))],
        args.tokens // 2,
    )


if __name__ == "__main__":
    main()
