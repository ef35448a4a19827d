"""Prompts that begin as earlier texts did: the same texts and drafts as without, and only the rest
computed."""

import pytest
import torch

from infer import Engine, load_target
from infer.config import DrafterConfig, EngineConfig, TextOptions
from infer.drafters.base import new_drafter
from infer.drafters.families import FAMILIES
from infer.drafters.lookup import Lookup
from infer.engine.prefixes import BLOCK, Prefixes

OPTIONS = TextOptions(max_new_tokens=14, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def target(shallow):
    return load_target(str(shallow), device="cpu")


@pytest.fixture(scope="module")
def drafter(target):
    """Untrained, but begun with the target's own layers: some drafts are accepted."""
    drafter = new_drafter(DrafterConfig(layers=2, block_size=6), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    drafter.warm_start(target)
    return drafter


@pytest.fixture(scope="module")
def drafters(target, drafter):
    """One of every kind of memory."""
    sliding = new_drafter(
        DrafterConfig(layers=2, block_size=6, sliding_window=20), target
    )  # forgets, unless prefixes are kept
    sliding.load_state_dict(drafter.state_dict())
    drafters = {"dflash": drafter, "lookup": Lookup(6), "sliding": sliding}
    if "dart" in FAMILIES:
        drafters["dart"] = new_drafter(DrafterConfig(family="dart", layers=1, block_size=6), target)
        drafters["dart"].init_weights(torch.Generator().manual_seed(0))
    return drafters


def write(target, drafter, prompts, memory, rows=1, together=False):
    """Decode prompts one after the other, or together; return the texts, and how many positions
    were computed."""
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 8, max_num_seqs=rows, prefix_cache_mib=memory), 420
    )
    computed = []
    run = engine.runner.prefill
    engine.runner.prefill = lambda *piece: computed.append(run(*piece)) or computed[-1]
    texts = []
    for prompt in prompts:
        texts.append(engine.submit(prompt, OPTIONS))
        while engine.busy and not together:
            engine.step()
    while engine.busy:
        engine.step()
    return texts, sum(computed)


@pytest.fixture(scope="module")
def prompts(target):
    """A conversation of three turns; then one that leaves it, in the middle of a block."""
    ids = target.tokenizer(
        "import os\n\n\nclass Reader:\n    def read(self):\n        return\n" * 16
    )["input_ids"]
    return [ids[:150], ids[:200], ids[:260], ids[:100] + ids[:50]]


def test_texts_and_drafts_are_the_same_and_less_is_computed(target, drafters, prompts):
    for name, drafter in drafters.items():
        without, every = write(target, drafter, prompts, 0)
        found, computed = write(target, drafter, prompts, 64)
        assert [text.ids for text in found] == [text.ids for text in without], name
        assert [text.commits for text in found] == [text.commits for text in without], (
            name
        )  # drafts, too
        assert (
            every == sum(map(len, prompts)) and [text.stats.reused for text in without] == [0] * 4
        )
        reused = [0, 2 * BLOCK, 3 * BLOCK, BLOCK]  # whole blocks
        assert [text.stats.reused for text in found] == reused and computed == every - sum(
            reused
        ), name


def test_an_answer_is_taken_over_with_its_prompt(target, drafter, prompts):
    prompt = prompts[0][:120]
    [first], _ = write(target, drafter, [prompt], 0)
    turns = [prompt, prompt + first.ids + prompts[0][:9]]  # the answer ends behind position 128
    without, _ = write(target, drafter, turns, 0)
    found, _ = write(target, drafter, turns, 64)
    assert [text.ids for text in found] == [text.ids for text in without]
    assert [text.commits for text in found] == [text.commits for text in without]
    assert found[1].stats.reused == 2 * BLOCK > len(prompt)


def test_what_several_share_is_computed_once(target, drafter, prompts):
    shared = prompts[2][:200]
    asked = [[*shared, *prompts[0][i : i + 5 + i]] for i in range(6)]
    without, _ = write(target, drafter, asked, 0, rows=6, together=True)
    found, computed = write(target, drafter, asked, 64, rows=6, together=True)
    assert [text.ids for text in found] == [text.ids for text in without]
    assert [text.stats.reused for text in found] == [0] + [3 * BLOCK] * 5
    assert computed < len(shared) + 6 * (200 - 3 * BLOCK + 10)


def test_the_least_recently_used_leaves_first_and_an_end_before_its_beginning():
    size = 4 * BLOCK  # bytes of a block below
    store = Prefixes(6 * size)

    def keep(ids):
        store.keep(ids, lambda start: ([torch.full((1, BLOCK, 1), float(ids[start]))], []))

    a, b, c = (list(range(start, start + 4 * BLOCK + 1)) for start in (0, 1000, 2000))
    keep(a)
    keep(b[: 2 * BLOCK + 1])
    assert [len(store.find(ids)[0]) for ids in (a, b)] == [4, 2] and store.bytes == 6 * size
    keep(a[: BLOCK + 1])  # its beginning is used again
    keep(c[: 3 * BLOCK + 1])
    assert [len(store.find(ids)[0]) for ids in (a, b, c)] == [1, 2, 3] and store.bytes == 6 * size
    long = list(range(3000, 3000 + 9 * BLOCK + 1))
    keep(long)  # more than the memory: its beginning
    assert len(store.find(long)[0]) == 6 == len(store.blocks)
    assert [float(block.target[0][0, 0, 0]) for block in store.find(long)[0]] == [
        float(long[i * BLOCK]) for i in range(6)
    ]
    assert (
        store.find(long[: 2 * BLOCK])[0] == store.find(long)[0][:1]
    )  # the token behind a block belongs to it
