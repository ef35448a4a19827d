"""What drafters are worth on a target, one after the other: chains by position, and DDTree of 8 nodes.

    PYTHONPATH=. python benchmarks/adapting.py <target> <drafter> [<drafter> ...]

For the checkpoints of a run that adapts a drafter to a fine-tune (docs/doctor.md), beside the drafter that it began
with: 24 held-out prompts of 64 tokens, 64 new tokens behind each, greedy.
"""

import sys

import torch

from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import DecodeOptions, load_drafter, load_target
from infer.api import decode
from infer.evaluation.acceptance import count_accepted
from infer.evaluation.results import Acceptance


def main() -> None:
    torch.set_num_threads(1)
    target = load_target(sys.argv[1])
    source = DataConfig(source="embedded")
    prompts = [prompt.ids for prompt in evaluation_prompts(source, target.tokenizer, 24, 64, 8)]
    print("| drafter | rounds | chain, τ | first drafts accepted, ... | DDTree 8, τ |\n| --- | --- | --- | --- | --- |")
    for path in sys.argv[2:]:
        drafter, options = load_drafter(path), {"max_new_tokens": 64, "loop_period": 64, "positions": None, "rows": 8}
        chains = decode(target, drafter, prompts, DecodeOptions(method="chain", **options))
        counts = [count_accepted(text.commits, len(text.ids), drafter.block_size - 1) for text in chains]
        found = Acceptance.of_all(counts)
        trees = decode(target, drafter, prompts, DecodeOptions(method="ddtree", budget=8, **options))
        tau = sum(sum(text.commits[1:]) for text in trees) / sum(len(text.commits) - 1 for text in trees)
        shares = ", ".join(f"{100 * share:.1f} %" for share in found.shares[:4])
        print(f"| {path[-48:]} | {found.rounds} | {1 + found.mean:.3f} | {shares} | {tau:.3f} |", flush=True)


if __name__ == "__main__":
    main()
