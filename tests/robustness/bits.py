"""Logits of a target in int8 to the last bit: alone, in trees, beside other texts, in prompts cut
anywhere, on one thread and on two.

    HF_HUB_OFFLINE=1 python tests/robustness/bits.py --target smollm2 --positions 10000

Texts are random tokens. Each is computed one token after the other, alone, on one thread; then four
at once, in pieces of random lengths; then one draft tree after the other, with the text's next
tokens at random places among random ones. Fails (exit code 1) where a logit differs; else the line
before the last is their digest, to compare versions by. Without --target: a small Llama of random
weights.
"""

import argparse
import hashlib
import random
from collections.abc import Iterator

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from infer import load_target
from infer.int8_cpu import calibration
from infer.int8_cpu.modules import Int8Linear
from infer.targets.target import Target
from infer.trees.tree import DraftTree

# texts at once, tokens of each, nodes of a tree at most
ROWS = 4
LENGTH = 100
NODES = 40


def small_target() -> Target:
    """Return a Llama of random weights in int8, some of its activations in two digits."""
    torch.manual_seed(0)
    heads = {
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
    }
    sizes = {
        "vocab_size": 300,
        "hidden_size": 96,
        "intermediate_size": 160,
        "tie_word_embeddings": True,
    }
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads)).eval()
    for weight in model.parameters():
        weight.data *= 4 if weight.ndim > 1 else 1
    calibration.quantise(model, (model(torch.randint(300, (8, 64))) for _ in range(1)))
    for module in model.model.layers[1].modules():
        if type(module) is Int8Linear:
            module.digits = 2
    return Target(model)


def in_pieces(target: Target, rows: list[list[int]], lengths: Iterator[int]) -> list[torch.Tensor]:
    """Return the final states (T, D) of every row, all rows in one pass, in pieces of such
    lengths."""
    cache = target.cache(len(rows), 2 * LENGTH)
    done = [0] * len(rows)
    found = [[] for _ in rows]
    with cache.add(len(rows)):
        pass
    while any(at < len(row) for at, row in zip(done, rows, strict=True)):
        pieces = [row[at : at + next(lengths)] for at, row in zip(done, rows, strict=True)]
        last = target.extend(pieces, cache, ()).last
        for r, piece in enumerate(pieces):
            found[r].append(last[r, : len(piece)])
            done[r] += len(piece)
    return [torch.cat(parts) for parts in found]


def in_trees(target: Target, text: list[int], dice: random.Random) -> torch.Tensor:
    """Return the final states (T, D) of a text, each a node of a draft tree on the way to it."""
    cache = target.cache(1, 2 * LENGTH)
    at = 0
    found = []
    with cache.add(1):
        pass
    while at < len(text):
        steps = min(len(text) - at, dice.randint(1, 9))
        # a path along the text, and other nodes between
        tokens = [text[at]]
        parents = [0]
        depths = [0]
        path = [0]
        while len(path) < steps or (len(tokens) < NODES and dice.random() < 0.8):
            right = len(path) < steps and dice.random() < 0.4
            parent = path[-1] if right else dice.randrange(len(tokens))
            path += [len(tokens)] if right else []
            tokens.append(text[at + len(path) - 1] if right else dice.randrange(300))
            parents.append(parent)
            depths.append(depths[parent] + 1)
        columns = (torch.tensor([column]) for column in (tokens, parents, depths))
        tree = DraftTree(*columns, torch.zeros(1, len(tokens)), max(depths))
        found.append(target.verify(tree, tree.ancestors(), cache).last[0, path])
        cache.commit(torch.tensor([path]), torch.tensor([steps]))
        cache.note_lengths([steps])
        at += steps
    return torch.cat(found)


def differing(
    target: Target, texts: list[list[int]], dice: random.Random, digest: "hashlib._Hash"
) -> list[str]:
    """Return the ways in which texts have other logits than alone, one token after the other, on
    one thread."""
    torch.set_num_threads(1)
    alone = [in_pieces(target, [text], iter([1] * LENGTH))[0] for text in texts]
    logits = [
        torch.cat([target.head(state[None]) for state in states]) for states in alone
    ]  # (T, V)
    for states in logits:
        digest.update(states.numpy())
    wrong = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        ways = {
            "token by token beside others": in_pieces(target, texts, iter(lambda: 1, 0)),
            "in pieces beside others": in_pieces(
                target, texts, iter(lambda: dice.choice([1, 2, 9, 30, 100]), 0)
            ),
            "in one piece": [in_pieces(target, [text], iter([LENGTH]))[0] for text in texts],
            "in trees": [in_trees(target, text, dice) for text in texts],
        }
        for way, found in ways.items():
            same = all(torch.equal(target.head(a), b) for a, b in zip(found, logits, strict=True))
            wrong += [] if same else [f"{way}, {threads} threads"]
    return wrong


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model's folder or name")
    parser.add_argument("--positions", type=int, default=400)
    args = parser.parse_args()
    target = load_target(args.target, quantization="int8") if args.target else small_target()
    assert target.lean is not None, "the lean pass does not serve this target"
    dice = random.Random(0)
    digest = hashlib.sha256()
    faults = 0
    rounds = -(-args.positions // (ROWS * LENGTH))
    for number in range(rounds):
        texts = [[dice.randrange(300) for _ in range(LENGTH)] for _ in range(ROWS)]
        for way in differing(target, texts, dice, digest):
            faults += 1
            print(f"{number}: other logits {way}", flush=True)
        print(f"{(number + 1) * ROWS * LENGTH:,} positions", flush=True)
    print(f"{digest.hexdigest()[:16]}\n{faults} faults")
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
