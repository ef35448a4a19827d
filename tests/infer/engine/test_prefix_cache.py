"""The prefix cache: outputs and drafts are the same as without it, and fewer positions are
computed."""

import pytest
import torch

from infer import Engine, load_target
from infer.config import DrafterConfig, EngineConfig, SamplingOptions
from infer.drafters.build import create_drafter
from infer.drafters.families import DRAFTER_FAMILIES
from infer.drafters.lookup import PromptLookup
from infer.engine.prefix_cache import PREFIX_CACHE_BLOCK_TOKENS, PrefixCache
from infer.engine.sequence import Sequence

SAMPLED_OPTIONS = SamplingOptions(max_new_tokens=14, temperature=0.8, seed=3)


@pytest.fixture(scope="module")
def target(shallow):
    return load_target(str(shallow), device="cpu")


@pytest.fixture(scope="module")
def drafter(target):
    """An untrained drafter with the target's layers, of which some drafts are accepted."""
    drafter = create_drafter(DrafterConfig(layers=2, block_size=6), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    drafter.warm_start(target)
    return drafter


@pytest.fixture(scope="module")
def drafters(target, drafter):
    """Return a drafter of every kind of cache, by name."""
    # A sliding cache drops positions, unless prefixes are cached.
    sliding = create_drafter(DrafterConfig(layers=2, block_size=6, sliding_window=20), target)
    sliding.load_state_dict(drafter.state_dict())
    drafters = {"dflash": drafter, "lookup": PromptLookup(6), "sliding": sliding}
    if "dart" in DRAFTER_FAMILIES:
        drafters["dart"] = create_drafter(
            DrafterConfig(family="dart", layers=1, block_size=6), target
        )
        drafters["dart"].init_weights(torch.Generator().manual_seed(0))
    return drafters


def decode_prompts(target, drafter, prompts, megabytes, max_num_seqs=1, together=False):
    """Decode prompts one after the other, or together, with a prefix cache of that size. Return the
    sequences, and the number of prefilled positions."""
    options = EngineConfig("ddtree", 8, max_num_seqs=max_num_seqs, prefix_cache_mib=megabytes)
    engine = Engine(target, drafter, options, 420)
    prefill = engine.runner.prefill
    computed = []

    def count_positions(*arguments) -> int:
        computed.append(prefill(*arguments))
        return computed[-1]

    engine.runner.prefill = count_positions
    sequences = []
    for prompt in prompts:
        sequences.append(engine.submit(prompt, SAMPLED_OPTIONS))
        while engine.has_unfinished_sequences and not together:
            engine.step()
    while engine.has_unfinished_sequences:
        engine.step()
    return sequences, sum(computed)


@pytest.fixture(scope="module")
def prompts(target):
    """Return a conversation of three turns, and a prompt that differs from the middle of a block
    on."""
    ids = target.tokenizer(
        "import os\n\n\nclass Reader:\n    def read(self):\n        return\n" * 16
    )["input_ids"]
    return [ids[:150], ids[:200], ids[:260], ids[:100] + ids[:50]]


def assert_same_outputs_and_drafts(actual: list[Sequence], expected: list[Sequence]) -> None:
    """Compare outputs, and the number of tokens that each round committed."""
    assert [sequence.ids for sequence in actual] == [sequence.ids for sequence in expected]
    assert [sequence.commits for sequence in actual] == [sequence.commits for sequence in expected]


def count_cached_tokens(sequences: list[Sequence]) -> list[int]:
    return [sequence.stats.cached_tokens for sequence in sequences]


def test_outputs_and_drafts_are_the_same_and_less_is_computed(target, drafters, prompts):
    for name, drafter in drafters.items():
        expected, all_positions = decode_prompts(target, drafter, prompts, 0)
        actual, computed = decode_prompts(target, drafter, prompts, 64)
        assert_same_outputs_and_drafts(actual, expected)
        assert all_positions == sum(map(len, prompts))
        assert count_cached_tokens(expected) == [0] * 4
        cached_blocks = [0, 2, 3, 1]
        cached_tokens = [blocks * PREFIX_CACHE_BLOCK_TOKENS for blocks in cached_blocks]
        assert count_cached_tokens(actual) == cached_tokens, name
        assert computed == all_positions - sum(cached_tokens), name


def test_an_output_is_cached_with_its_prompt(target, drafter, prompts):
    prompt = prompts[0][:120]
    [first], _ = decode_prompts(target, drafter, [prompt], 0)
    turns = [prompt, prompt + first.ids + prompts[0][:9]]  # the first output ends after 2 blocks
    expected, _ = decode_prompts(target, drafter, turns, 0)
    actual, _ = decode_prompts(target, drafter, turns, 64)
    assert_same_outputs_and_drafts(actual, expected)
    assert actual[1].stats.cached_tokens == 2 * PREFIX_CACHE_BLOCK_TOKENS > len(prompt)


def test_a_shared_prefix_is_computed_once(target, drafter, prompts):
    prefix = prompts[2][:200]
    batch = [[*prefix, *prompts[0][i : i + 5 + i]] for i in range(6)]
    expected, _ = decode_prompts(target, drafter, batch, 0, max_num_seqs=6, together=True)
    actual, computed = decode_prompts(target, drafter, batch, 64, max_num_seqs=6, together=True)
    assert [sequence.ids for sequence in actual] == [sequence.ids for sequence in expected]
    assert count_cached_tokens(actual) == [0] + [3 * PREFIX_CACHE_BLOCK_TOKENS] * 5
    assert computed < len(prefix) + 6 * (200 - 3 * PREFIX_CACHE_BLOCK_TOKENS + 10)


def test_the_least_recently_used_blocks_are_evicted_first_and_the_end_of_a_sequence_first():
    block_bytes = 4 * PREFIX_CACHE_BLOCK_TOKENS
    cache = PrefixCache(6 * block_bytes)

    def insert(ids):
        def copy_block(start):
            return [torch.full((1, PREFIX_CACHE_BLOCK_TOKENS, 1), float(ids[start]))], []

        cache.insert(ids, copy_block)

    def count_blocks(*sequences):
        return [len(cache.find_prefix(ids)[0]) for ids in sequences]

    a, b, c = (
        list(range(start, start + 4 * PREFIX_CACHE_BLOCK_TOKENS + 1)) for start in (0, 1000, 2000)
    )
    insert(a)
    insert(b[: 2 * PREFIX_CACHE_BLOCK_TOKENS + 1])
    assert count_blocks(a, b) == [4, 2] and cache.bytes == 6 * block_bytes
    insert(a[: PREFIX_CACHE_BLOCK_TOKENS + 1])  # use its first block again
    insert(c[: 3 * PREFIX_CACHE_BLOCK_TOKENS + 1])
    assert count_blocks(a, b, c) == [1, 2, 3] and cache.bytes == 6 * block_bytes
    long = list(range(3000, 3000 + 9 * PREFIX_CACHE_BLOCK_TOKENS + 1))
    insert(long)  # larger than the cache, which keeps its beginning
    blocks = cache.find_prefix(long)[0]
    assert len(blocks) == 6 == len(cache.blocks)
    first_values = [float(block.target_tensors[0][0, 0, 0]) for block in blocks]
    assert first_values == [float(long[i * PREFIX_CACHE_BLOCK_TOKENS]) for i in range(6)]
    # The key of a block includes the token after it.
    assert cache.find_prefix(long[: 2 * PREFIX_CACHE_BLOCK_TOKENS])[0] == blocks[:1]
