"""Check that the logits of an int8 target are bit-equal however they are computed.

    HF_HUB_OFFLINE=1 python tests/robustness/bits.py --target smollm2 --positions 10000

Sequences are random tokens. Each is computed token by token, alone, on one thread; then four at
once, in pieces of random lengths; then in draft trees that contain the next tokens at random nodes;
each on one thread and on two. Fails (exit code 1) if a logit differs. The line before the last is a
digest of the logits, to compare versions. Without --target a small random Llama is used.
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

BITS_BATCH_ROWS = 4
BITS_SEQUENCE_TOKENS = 100
BITS_MAX_TREE_NODES = 40


def build_small_int8_target() -> Target:
    """Return a random Llama in int8, with activations of two digits in one layer."""
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
    calibration.quantise_model(model, (model(torch.randint(300, (8, 64))) for _ in range(1)))
    for module in model.model.layers[1].modules():
        if type(module) is Int8Linear:
            module.codes_per_activation = 2
    return Target(model)


def extend_in_pieces(
    target: Target, rows: list[list[int]], lengths: Iterator[int]
) -> list[torch.Tensor]:
    """Return the final states of every row, (T, D), computed in pieces of these lengths."""
    cache = target.allocate_cache(len(rows), 2 * BITS_SEQUENCE_TOKENS)
    computed_tokens = [0] * len(rows)
    states = [[] for _ in rows]
    with cache.add_rows(len(rows)):
        pass
    while any(position < len(row) for position, row in zip(computed_tokens, rows, strict=True)):
        pieces = [
            row[position : position + next(lengths)]
            for position, row in zip(computed_tokens, rows, strict=True)
        ]
        last = target.extend_cache(pieces, cache, ()).last_hidden_states
        for r, piece in enumerate(pieces):
            states[r].append(last[r, : len(piece)])
            computed_tokens[r] += len(piece)
    return [torch.cat(row_states) for row_states in states]


def verify_in_trees(target: Target, text: list[int], random_numbers: random.Random) -> torch.Tensor:
    """Return the final states of a sequence, (T, D), computed as nodes of draft trees."""
    cache = target.allocate_cache(1, 2 * BITS_SEQUENCE_TOKENS)
    position = 0
    states = []
    with cache.add_rows(1):
        pass
    while position < len(text):
        steps = min(len(text) - position, random_numbers.randint(1, 9))
        # a path along the text, and other nodes between
        tokens = [text[position]]
        parents = [0]
        depths = [0]
        path = [0]
        while len(path) < steps or (
            len(tokens) < BITS_MAX_TREE_NODES and random_numbers.random() < 0.8
        ):
            right = len(path) < steps and random_numbers.random() < 0.4
            parent = path[-1] if right else random_numbers.randrange(len(tokens))
            path += [len(tokens)] if right else []
            tokens.append(
                text[position + len(path) - 1] if right else random_numbers.randrange(300)
            )
            parents.append(parent)
            depths.append(depths[parent] + 1)
        columns = (torch.tensor([column]) for column in (tokens, parents, depths))
        tree = DraftTree(*columns, torch.zeros(1, len(tokens)), max(depths))
        states.append(
            target.verify(tree, tree.build_ancestor_mask(), cache).last_hidden_states[0, path]
        )
        cache.commit(torch.tensor([path]), torch.tensor([steps]))
        cache.update_host_lengths([steps])
        position += steps
    return torch.cat(states)


def find_differing_logits(
    target: Target, texts: list[list[int]], random_numbers: random.Random, digest: "hashlib._Hash"
) -> list[str]:
    """Return the methods whose logits differ from those of one token at a time on one thread.

    digest: updated with the logits
    """
    torch.set_num_threads(1)
    alone = [
        extend_in_pieces(target, [text], iter([1] * BITS_SEQUENCE_TOKENS))[0] for text in texts
    ]
    logits = [
        torch.cat([target.compute_logits(state[None]) for state in states]) for states in alone
    ]  # (T, V)
    for states in logits:
        digest.update(states.numpy())
    differences = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        states_by_method = {
            "token by token beside others": extend_in_pieces(target, texts, iter(lambda: 1, 0)),
            "in pieces beside others": extend_in_pieces(
                target, texts, iter(lambda: random_numbers.choice([1, 2, 9, 30, 100]), 0)
            ),
            "in one piece": [
                extend_in_pieces(target, [text], iter([BITS_SEQUENCE_TOKENS]))[0] for text in texts
            ],
            "in trees": [verify_in_trees(target, text, random_numbers) for text in texts],
        }
        for method, states in states_by_method.items():
            same = all(
                torch.equal(target.compute_logits(a), b)
                for a, b in zip(states, logits, strict=True)
            )
            differences += [] if same else [f"{method}, {threads} threads"]
    return differences


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", help="a model's folder or name")
    parser.add_argument("--positions", type=int, default=400)
    args = parser.parse_args()
    target = (
        load_target(args.target, quantization="int8") if args.target else build_small_int8_target()
    )
    assert target.kernel_decoder is not None, "our own decoder does not support this target"
    random_numbers = random.Random(0)
    digest = hashlib.sha256()
    failures = 0
    rounds = -(-args.positions // (BITS_BATCH_ROWS * BITS_SEQUENCE_TOKENS))
    for number in range(rounds):
        texts = [
            [random_numbers.randrange(300) for _ in range(BITS_SEQUENCE_TOKENS)]
            for _ in range(BITS_BATCH_ROWS)
        ]
        for method in find_differing_logits(target, texts, random_numbers, digest):
            failures += 1
            print(f"{number}: other logits {method}", flush=True)
        print(f"{(number + 1) * BITS_BATCH_ROWS * BITS_SEQUENCE_TOKENS:,} positions", flush=True)
    print(f"{digest.hexdigest()[:16]}\n{failures} faults")
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
