"""What prefix reuse saves: a conversation of ten turns, and 100 requests that share a system prompt.

    python benchmarks/prefixes.py

With reuse and without take turns. Printed: prompt tokens sent and computed, and the processor
seconds of one thread up to the first token; texts are compared.
"""

import argparse
import statistics
import time

import torch

from data.prompts import held_out_prompts
from data.rows import DataConfig
from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, TextOptions
from infer.engine.sequence import Sequence

MEMORY = 512  # MiB, the server's default


def write(engine: Engine, prompt: list[int], options: TextOptions) -> tuple[Sequence, float]:
    """Write a text; return it, and the processor seconds to its first token."""
    began = time.thread_time()
    text = engine.submit(prompt, options)
    while not text.ids:
        engine.step()
    first = time.thread_time() - began
    while engine.busy:
        engine.step()
    return text, first


def conversation(engines: dict[str, Engine], words: list[list[int]], args: argparse.Namespace) -> None:
    """Print the turns of a conversation that begins with a system prompt and grows by questions and answers."""
    options = TextOptions(max_new_tokens=args.answer, ignore_eos=True)
    prompt, firsts, same = sum(words, [])[: args.system], {name: [] for name in engines}, True
    print(f"{'turn':<6}{'sent':>6}{'computed':>10}{'first token, ms: without':>26}{'with':>8}")
    for turn in range(args.turns):
        prompt = prompt + words[turn][: args.question]
        found = {name: write(engine, prompt, options) for name, engine in engines.items()}
        for name, (_, first) in found.items():
            firsts[name].append(first)
        texts = [text for text, _ in found.values()]
        same &= texts[0].ids == texts[1].ids
        computed = len(prompt) - texts[1].stats.reused
        milliseconds = [1000 * firsts[name][-1] for name in engines]
        print(f"{turn + 1:<6}{len(prompt):>6}{computed:>10}{milliseconds[0]:>26.0f}{milliseconds[1]:>8.0f}")
        prompt = prompt + texts[0].ids
    ratios = {name: found[-1] / found[0] for name, found in firsts.items()}
    print(", ".join(f"turn {args.turns} over turn 1, {name}: {ratio:.2f}" for name, ratio in ratios.items()), end="; ")
    print(f"same texts: {same}\n")


def shared(engines: dict[str, Engine], words: list[list[int]], args: argparse.Namespace) -> None:
    """Print what requests cost that share a system prompt of 1,000 tokens, one after the other."""
    system = (sum(words, []) * 9)[:1000]
    options, sent, computed, same, compared = TextOptions(max_new_tokens=4), 0, 0, True, 0
    seconds = {name: [] for name in engines}
    for number in range(args.requests):
        prompt = system + words[number % len(words)][: 16 + number % 17]
        text, first = write(engines["with"], prompt, options)
        sent, computed = sent + len(prompt), computed + len(prompt) - text.stats.reused
        seconds["with"].append(first)
        if number % args.every == 0:
            other, first = write(engines["without"], prompt, options)
            seconds["without"].append(first)
            same, compared = same and other.ids == text.ids, compared + 1
    print(
        f"{args.requests} requests with a shared system prompt of 1,000 tokens: {sent:,} prompt tokens sent, ", end=""
    )
    print(f"{computed:,} computed ({computed / sent:.1%}); first token after (median) ", end="")
    print(", ".join(f"{1000 * statistics.median(found):.0f} ms {name}" for name, found in seconds.items()), end="; ")
    print(f"same texts ({compared} compared): {same}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--system", type=int, default=200, help="tokens of the conversation's system prompt")
    parser.add_argument("--question", type=int, default=40, help="tokens of a turn's question")
    parser.add_argument("--answer", type=int, default=60)
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="which of the requests are written without reuse, too")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target, drafter = load_target("embedded", device="cpu"), load_drafter(args.drafter)
    words = held_out_prompts(DataConfig(), target.tokenizer, 32, 64)
    capacity = max(1040, args.system + args.turns * (args.question + args.answer)) + 8
    engines = {
        name: Engine(target, drafter, EngineConfig("ddtree", 16, rows=1, prefix_memory=memory), capacity)
        for name, memory in (("without", 0), ("with", MEMORY))
    }
    for engine in engines.values():  # what the first text waits for
        write(engine, words[0][:32], TextOptions(max_new_tokens=8))
    conversation(engines, words, args)
    shared(engines, words, args)


if __name__ == "__main__":
    main()
