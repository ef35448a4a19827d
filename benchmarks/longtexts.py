"""Measure tokens per round and drafting time along a long conversation, by drafter window.

    ./launch.sh regenerate target=smollm2 target.quantization=int8 data=jsonl \
        data.path=questions.jsonl decoding.max_new_tokens=128 decoding.prefix_cache_mib=900 \
        out=conversation.jsonl
    OMP_NUM_THREADS=1 python benchmarks/longtexts.py 0 256 1024 < conversation.jsonl

questions.jsonl: one line with all of the user's turns. Arguments: sliding windows of the drafter in
tokens; 0: none. Chains of SmolLM2's drafter are drafted along the answers, as decoding does. The
table has a row for each thousand positions: window, position, rounds, tokens per round, and
milliseconds of processor time (one thread) of a draft and the update of its context.
"""

import json
import sys
import time

import numpy as np
import torch

from infer import load_drafter, load_target
from infer.api import encode_prompt
from infer.evaluation.replay import extract_features

ROW_POSITIONS = 1000  # positions that a row of the table summarises


@torch.inference_mode()
def replay_rounds(target, drafter, ids, features, spans) -> np.ndarray:
    """Draft along the answers of a conversation.

    ids: token ids of the conversation, (T,)
    features: context features of its tokens, (T, K*D)
    spans: position range [start, end) of each answer

    Return (rounds, 3): position, committed tokens and seconds of each round.
    """
    block_size = drafter.block_size
    state = drafter.allocate_state(1, len(ids) + block_size)
    rounds = []
    position = 0
    with state.add(1) as row:
        drafter.update_context(target, features[None, :1], ids[None, :1], [1], row)
    for answer_start, answer_end in spans:
        prompt = slice(max(1, position), answer_start)
        position = answer_start
        drafter.update_context(
            target, features[None, prompt], ids[None, prompt], [prompt.stop - prompt.start], state
        )
        while position + block_size <= answer_end:
            start_time = time.thread_time()
            block = drafter.draft_block(target, ids[position : position + 1], state)
            drafted_ids = drafter.vocabulary.columns_to_ids(block.marginals[0].argmax(-1))
            is_right = drafted_ids == ids[position + 1 : position + block_size]
            count = int(is_right.long().cumprod(0).sum()) + 1
            committed = slice(position, position + count)
            drafter.update_context(
                target, features[None, committed], ids[None, committed], [count], state
            )
            rounds.append((position, count, time.thread_time() - start_time))
            position += count
    return np.array(rounds)


target = load_target("smollm2", quantization="int8")
messages = json.load(sys.stdin)["messages"]
turns = []
for i, message in enumerate(messages):
    if "token_ids" in message:
        turns.append((encode_prompt(target, messages[:i]), message["token_ids"]))
last_prompt, last_answer = turns[-1]
ids = [*last_prompt, *last_answer]
spans = [(len(prompt), len(prompt) + len(answer)) for prompt, answer in turns]
features = extract_features(target, [8, 18, 27], (ids, [])).clone()
for window in map(int, sys.argv[1:]):
    drafter = load_drafter("smollm2", quantization="int8", sliding_window=window or None)
    rounds = replay_rounds(target, drafter, torch.tensor(ids), features, spans)
    for start in range(0, len(ids), ROW_POSITIONS):
        selected = rounds[rounds[:, 0] // ROW_POSITIONS == start // ROW_POSITIONS]
        tokens_per_round = selected[:, 1].mean()
        draft_milliseconds = 1000 * selected[:, 2].mean()
        print(
            f"{window:6d} {start:6d} {len(selected):6d} "
            f"{tokens_per_round:6.2f} {draft_milliseconds:6.1f}"
        )
