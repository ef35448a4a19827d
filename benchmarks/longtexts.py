"""Tokens a round along a long conversation, and what a draft takes there, by the window that a
drafter is given.

    ./launch.sh regenerate target=smollm2 target.quantization=int8 data=jsonl
    data.path=questions.jsonl \
        decoding.max_new_tokens=128 decoding.prefix_cache_mib=900 out=conversation.jsonl
    OMP_NUM_THREADS=1 python benchmarks/longtexts.py 0 256 1024 < conversation.jsonl

questions.jsonl: one line with all of the user's turns. Chains of SmolLM2's drafter are drafted
along the answers, as decoding does (0: no window). A row for each thousand positions: rounds,
tokens a round, and milliseconds of processor time, one thread, of a draft and of taking in what was
accepted.
"""

import json
import sys
import time

import numpy as np
import torch

from infer import load_drafter, load_target
from infer.api import encode
from infer.evaluation.replay import features_of


@torch.inference_mode()
def rounds(target, drafter, ids, features, spans) -> np.ndarray:
    """Return where each round of a text's answers begins, tokens that it commits, and its seconds,
    (rounds, 3)."""
    state = drafter.state(1, len(ids) + drafter.block_size)
    found = []
    at = 0
    size = drafter.block_size
    with state.add(1) as row:
        drafter.update_context(target, features[None, :1], ids[None, :1], [1], row)
    for begin, end in spans:
        part = slice(max(1, at), begin)
        at = begin
        drafter.update_context(
            target, features[None, part], ids[None, part], [part.stop - part.start], state
        )
        while at + size <= end:
            mark = time.thread_time()
            block = drafter.draft_block(target, ids[at : at + 1], state)
            right = drafter.vocabulary.ids(block.marginals[0].argmax(-1)) == ids[at + 1 : at + size]
            count = int(right.long().cumprod(0).sum()) + 1
            drafter.update_context(
                target, features[None, at : at + count], ids[None, at : at + count], [count], state
            )
            found.append((at, count, time.thread_time() - mark))
            at += count
    return np.array(found)


target = load_target("smollm2", quantization="int8")
said = json.load(sys.stdin)["messages"]
turns = [
    (encode(target, said[:i]), one["token_ids"]) for i, one in enumerate(said) if "token_ids" in one
]
ids = [*turns[-1][0], *turns[-1][1]]
spans = [(len(prompt), len(prompt) + len(own)) for prompt, own in turns]
features = features_of(target, [8, 18, 27], (ids, [])).clone()
for window in map(int, sys.argv[1:]):
    drafter = load_drafter("smollm2", quantization="int8", sliding_window=window or None)
    found = rounds(target, drafter, torch.tensor(ids), features, spans)
    for place in range(0, len(ids), 1000):
        here = found[found[:, 0] // 1000 == place // 1000]
        print(
            f"{window:6d} {place:6d} {len(here):6d} {here[:, 1].mean():6.2f} {1000 * here[:, 2].mean():6.1f}"
        )
