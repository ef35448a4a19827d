"""Measure structured outputs: tokens per round and second under a grammar, and the grammar's cost.

    python benchmarks/structured.py

First table, with the embedded target and drafter, interleaved prompt by prompt: constrained
baseline decoding, DDTree whose drafter ignores the grammar, and DDTree that follows it. Second
table: the grammar's share of rounds of 64 nodes, also for a random target with a vocabulary of
131,072. Seconds are processor time of one thread.
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
from inputs import load_held_out_prompts
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from infer import Engine, load_drafter, load_target
from infer.config import DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.base import Drafter
from infer.drafters.build import create_drafter
from infer.engine import runner
from infer.targets.target import Target

FILE_JSON_SCHEMA = {
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
MEASURED_GRAMMARS = {
    "schema": {"json_schema": json.dumps(FILE_JSON_SCHEMA)},
    "expression": {"regex": r"(def|class) [a-z_]{3,12}\([a-z, ]*\):"},
}
LARGE_VOCABULARY_SIZE = 131_072


def build_large_vocabulary_models() -> tuple[Target, Drafter]:
    """Return a random target whose vocabulary has many short words, and a random drafter."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    merges = []
    lowercase = string.ascii_lowercase
    for size in (2, 3, 4):
        for first, *rest in itertools.product("Ġ" + lowercase + '"', *[lowercase] * (size - 1)):
            word = "".join([first, *rest])
            if len(vocabulary) < LARGE_VOCABULARY_SIZE - 1:
                vocabulary[word] = len(vocabulary)
                merges.append((word[:-1], word[-1]))
    vocabulary["<end>"] = len(vocabulary)
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=LARGE_VOCABULARY_SIZE,
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
    drafter = create_drafter(DrafterConfig(layers=1, block_size=8, mask_token_id=0), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    return target, drafter


def generate_with_times(
    target, drafter, prompt, options, method, budget=16, follows_grammar=True, timed_functions=()
):
    """Decode a prompt; return the sequence, its seconds, and the seconds of `timed_functions`.

    follows_grammar: whether the draft tree has only tokens that the grammar allows
    timed_functions: "round" (of the runner), "mask" (of the grammar) or a function of the module
        infer.engine.runner
    """
    engine = Engine(
        target,
        drafter,
        EngineConfig(method, budget, max_num_seqs=1),
        len(prompt) + options.max_new_tokens + 1,
    )
    if not follows_grammar:
        engine.runner.method = replace(engine.runner.method, sorts_nodes_by_probability=False)
    constrain_to_grammars = runner.constrain_to_grammars
    function_seconds = defaultdict(float)

    def time_function(owner: object, name: str) -> None:
        run = getattr(owner, name)

        def run_timed(*arguments):
            start_time = time.thread_time()
            try:
                return run(*arguments)
            finally:
                function_seconds[name] += time.thread_time() - start_time

        setattr(owner, name, run_timed)

    text = engine.submit(prompt, options)
    for name in timed_functions:
        time_function(
            {"mask_scores": text.grammar, "decode_round": engine.runner}.get(name, runner), name
        )
    start_time = time.thread_time()
    while engine.has_unfinished_sequences:
        engine.step()
    runner.constrain_to_grammars = constrain_to_grammars
    return text, time.thread_time() - start_time, function_seconds


def print_speeds(target, drafter, prompts, tokens) -> None:
    """Print tokens per round and per second of the three decoding modes."""
    decoding_modes = {
        "plain": ("plain", True),
        "drafter without": ("ddtree", False),
        "drafter with": ("ddtree", True),
    }
    print(f"{'':<12}{'':>11}" + "".join(f"{mode:>26}" for mode in decoding_modes))
    for (name, grammar), temperature in itertools.product(MEASURED_GRAMMARS.items(), (0.0, 0.7)):
        taus = defaultdict(list)
        speeds = defaultdict(list)
        same = True
        for number, prompt in enumerate(prompts):
            options = SamplingOptions(
                max_new_tokens=tokens, temperature=temperature, seed=number, **grammar
            )
            ids = set()
            for mode, (method, follows_grammar) in decoding_modes.items():
                text, seconds, _ = generate_with_times(
                    target, drafter, prompt, options, method, follows_grammar=follows_grammar
                )
                taus[mode].append((len(text.ids) - 1, max(1, text.stats.rounds)))
                speeds[mode].append(len(text.ids) / seconds)
                ids.add(tuple(text.ids))
            same &= len(ids) == 1
        cells = []
        for mode in decoding_modes:
            total_tokens = sum(tokens_committed for tokens_committed, _ in taus[mode])
            total_rounds = sum(rounds for _, rounds in taus[mode])
            tau = total_tokens / total_rounds
            pairs = zip(speeds[mode], speeds["plain"], strict=True)
            ratio = statistics.median(speed / plain_speed for speed, plain_speed in pairs)
            cells.append(f"{tau:>8.2f} {statistics.median(speeds[mode]):>8.0f}/s {ratio:>5.2f}x")
        print(
            f"{name:<12}{f't = {temperature}':>11}"
            + "".join(f"{cell:>26}" for cell in cells)
            + f"   same texts: {same}"
        )


def print_grammar_shares(target, drafter, prompts, tokens) -> None:
    """Print the grammar's share of the time of rounds of 64 nodes.

    It consists of `constrain_to_grammars` (trees under the grammar, forced tokens) and
    `mask_scores` (masks of the target's logits).
    """
    timed_functions = ("decode_round", "constrain_to_grammars", "mask_scores")
    for name, grammar in MEASURED_GRAMMARS.items():
        total_seconds = defaultdict(float)
        rounds = 0
        for number, prompt in enumerate(prompts):
            options = SamplingOptions(
                max_new_tokens=tokens, temperature=0.7, seed=number, **grammar
            )
            text, _, function_seconds = generate_with_times(
                target, drafter, prompt, options, "ddtree", 64, True, timed_functions
            )
            rounds += text.stats.rounds
            for key, seconds in function_seconds.items():
                total_seconds[key] += seconds
        round_seconds = total_seconds.pop("decode_round")
        grammar_seconds = total_seconds
        details = ", ".join(
            f"{key} {1000 * value / rounds:.2f}" for key, value in grammar_seconds.items()
        )
        print(
            f"{target.name:<16}{name:<12} a round {1000 * round_seconds / rounds:6.1f} ms, the "
            "grammar's part "
            f"{sum(grammar_seconds.values()) / round_seconds:.1%} ({details} ms)"
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
    prompts = load_held_out_prompts(target.tokenizer, args.prompts, 64)
    print_speeds(target, drafter, prompts, args.tokens)
    print_grammar_shares(target, drafter, prompts, args.tokens)
    print_grammar_shares(
        *build_large_vocabulary_models(),
        [list(range(300 + i, 316 + i)) for i in range(min(4, args.prompts))],
        args.tokens // 2,
    )


if __name__ == "__main__":
    main()
