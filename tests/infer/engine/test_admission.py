"""Admission: prompts are prefilled in chunks between rounds, running sequences go on, and outputs
do not depend on the batch."""

import random

import pytest

from infer import Engine
from infer.config import EngineConfig, SamplingOptions


@pytest.fixture(scope="module", params=["dflash", "dart"])
def tiny(request, make_tiny):
    return make_tiny(seed=5, block_size=4, family=request.param)


@pytest.fixture
def costs(monkeypatch):
    """Return a function (engine) -> a list to which every target pass appends its cost.

    The cost is the number of positions, padding included. A position after
    `context_length_matching_weight_cost` others counts twice.
    """

    def watch_passes(engine: Engine) -> list[float]:
        pass_costs = []
        target = engine.target
        extend = target.extend_cache
        verify = target.verify

        def measured_extend(chunks, cache, layers):
            width = max(map(len, chunks))
            context = max(cache.lengths) + width
            pass_costs.append(
                len(chunks) * width * (1 + context / target.context_length_matching_weight_cost)
            )
            return extend(chunks, cache, layers)

        def measured_verify(tree, ancestors, cache, layers):
            context = max(cache.lengths)
            pass_costs.append(
                tree.tokens.numel() * (1 + context / target.context_length_matching_weight_cost)
            )
            return verify(tree, ancestors, cache, layers)

        monkeypatch.setattr(target, "extend_cache", measured_extend)
        monkeypatch.setattr(target, "verify", measured_verify)
        return pass_costs

    return watch_passes


def decode_alone(target, prompt: list[int], options: SamplingOptions) -> list[int]:
    """Return the output of baseline decoding of one sequence."""
    config = EngineConfig("plain", max_num_seqs=1)
    engine = Engine(target, None, config, len(prompt) + options.max_new_tokens)
    sequence = engine.submit(prompt, options)
    while engine.has_unfinished_sequences:
        engine.step()
    return sequence.ids


def test_a_running_sequence_waits_for_few_positions(tiny, costs):
    """Eight prompts of 150 tokens, and short ones after them, arrive while a sequence is running.

    It grows in every step. A step costs at most 32 positions without context, or 3 per row or one
    tree after the longest context if that is more; costs are rounded, by up to a quarter. The
    default limit is the cost of a few trees.
    """
    assert EngineConfig().max_num_batched_tokens < 2.5 * (EngineConfig().budget + 1)
    target, drafter = tiny
    dice = random.Random(0)
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=16, max_num_batched_tokens=32), 320
    )
    stream = engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=300))
    engine.step()
    pass_costs = costs(engine)
    lengths = [150] * 8 + [3, 9, 4, 31, 2]
    prompts = [[dice.randrange(90) for _ in range(length)] for length in lengths]
    options = [
        SamplingOptions(max_new_tokens=4, temperature=0.8 * (i % 2), seed=i)
        for i in range(len(prompts))
    ]
    sequences = [
        engine.submit(prompt, prompt_options)
        for prompt, prompt_options in zip(prompts, options, strict=True)
    ]
    max_started_together = 0
    while any(sequence.finish_reason is None for sequence in sequences):
        pass_costs.clear()
        not_started = [sequence for sequence in sequences if not sequence.ids]
        grown = engine.step()
        assert stream in grown and stream.finish_reason is None
        in_step = {*engine.scheduler.running, *grown}
        context = max(len(sequence.token_ids) for sequence in in_step)
        position_cost = 1 + context / target.context_length_matching_weight_cost
        limit = max(32, 3 * position_cost * len(in_step), 8 * position_cost)
        assert sum(pass_costs) <= 1.25 * limit
        num_started = len([sequence for sequence in not_started if sequence.ids])
        max_started_together = max(max_started_together, num_started)
    assert max_started_together >= 2  # short prompts are prefilled together
    for sequence, prompt, prompt_options in zip(sequences, prompts, options, strict=True):
        assert sequence.ids == decode_alone(target, prompt, prompt_options)
    stream_options = SamplingOptions(max_new_tokens=len(stream.ids))
    assert stream.ids == decode_alone(target, [1, 2, 3], stream_options)


def test_without_running_sequences_all_prompts_are_prefilled_at_once(tiny, costs):
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4, max_num_batched_tokens=16), 128
    )
    pass_costs = costs(engine)
    options = SamplingOptions(max_new_tokens=3)
    sequences = [engine.submit([5] * length, options) for length in (40, 30, 20)]
    engine.step()
    assert pass_costs[0] == 120 * (1 + 40 / target.context_length_matching_weight_cost)
    assert all(sequence.ids for sequence in sequences)


def test_a_sequence_cancelled_during_its_prefill_leaves_nothing(tiny):
    """Its row, half prefilled, is reused, while other sequences start and finish."""
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=2, max_num_batched_tokens=16), 128
    )
    running = engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=60))
    engine.step()
    cancelled = engine.submit(list(range(60)), SamplingOptions(max_new_tokens=9))
    engine.step()
    assert engine.scheduler.prefilling == [cancelled] and not cancelled.ids
    cancelled.cancelled = True
    assert cancelled in engine.step()
    assert cancelled.finish_reason == "cancelled"
    assert not engine.scheduler.prefilling
    prompts = [list(range(20, 60)), list(range(10, 33))]
    options = SamplingOptions(max_new_tokens=12)
    sequences = [engine.submit(prompt, options) for prompt in prompts]
    while engine.has_unfinished_sequences:
        engine.step()
        running.cancelled = len(running.ids) > 20  # release the row before the prefilling one
    for sequence, prompt in zip(sequences, prompts, strict=True):
        assert sequence.ids == decode_alone(target, prompt, options)
    assert engine.runner.batch_state.cache.lengths == []


def test_a_sequence_prefilled_with_a_cancelled_one_is_decoded(tiny):
    """Two long prompts are prefilled together, over several rounds. One is cancelled meanwhile."""
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4, max_num_batched_tokens=144), 128
    )
    engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=60))
    engine.step()
    prompts = [[7] * 45, list(range(44))]
    cancelled, other = (
        engine.submit(prompt, SamplingOptions(max_new_tokens=9)) for prompt in prompts
    )
    engine.step()
    assert engine.scheduler.prefilling == [cancelled, other] and not other.ids
    cancelled.cancelled = True
    while engine.has_unfinished_sequences:
        engine.step()
    assert cancelled.finish_reason == "cancelled"
    assert other.ids == decode_alone(target, prompts[1], SamplingOptions(max_new_tokens=9))


def test_a_reset_engine_keeps_waiting_sequences(tiny):
    target, drafter = tiny
    engine = Engine(
        target, drafter, EngineConfig("ddtree", 7, max_num_seqs=2, max_num_batched_tokens=16), 128
    )
    engine.submit([1, 2, 3], SamplingOptions(max_new_tokens=60))
    engine.step()
    engine.submit(list(range(60)), SamplingOptions(max_new_tokens=9))
    waiting = engine.submit([7, 8], SamplingOptions(max_new_tokens=9))
    engine.step()
    engine.reset()
    assert list(engine.scheduler.waiting) == [waiting]
    assert not engine.scheduler.prefilling
    assert not engine.scheduler.running
    while engine.has_unfinished_sequences:
        engine.step()
    assert waiting.ids == decode_alone(target, [7, 8], SamplingOptions(max_new_tokens=9))


def test_only_a_sequence_that_does_not_fit_alone_fails(tiny):
    """A step raises an exception if its rows need more than 3 units of memory: a greedy row needs
    1, a sampled one 3, one with log-probabilities 9, which never fits. All others are decoded; at
    the end all rows may be used again."""
    target, drafter = tiny
    options = [
        SamplingOptions(
            max_new_tokens=12,
            temperature=0.9 * (i % 4 == 1),
            logprobs=2 if i % 7 == 3 else None,
            seed=i,
        )
        for i in range(16)
    ]

    def needed_memory(sequence) -> int:
        if sequence.options.logprobs is not None:
            return 9
        return 3 if sequence.options.temperature else 1

    engine = Engine(target, drafter, EngineConfig("ddtree", 7, max_num_seqs=4), 40)
    copy_to_host = engine.runner._copy_to_host
    num_failures = 0
    failed = []

    def copy_with_limited_memory(*args):
        if sum(map(needed_memory, engine.scheduler.running)) > 3:
            raise RuntimeError("out of memory")
        return copy_to_host(*args)

    engine.runner._copy_to_host = copy_with_limited_memory
    sequences = [engine.submit([i + 1, 2], options[i]) for i in range(len(options))]
    while engine.has_unfinished_sequences:
        try:
            engine.step()
        except RuntimeError:
            num_failures += 1
            failed.append(engine.scheduler.recover_from_error())
            engine.reset()
    too_large = {sequence for sequence in sequences if needed_memory(sequence) == 9}
    assert {sequence for sequence in failed if sequence} == too_large
    assert num_failures < 40
    for i, sequence in enumerate(sequences):
        if sequence not in too_large:
            assert sequence.ids == decode_alone(target, [i + 1, 2], options[i])
            assert sum(sequence.commits) == len(sequence.ids)
            assert sum(sequence.stats.histogram) == sequence.stats.rounds
    assert engine.scheduler.max_running == 4


def test_trees_shrink_with_rows_and_context(tiny):
    """Trees are smaller with more rows and after longer contexts. A single sequence, and rounds
    without a limit, have the whole node budget."""
    target, drafter = tiny

    def count_tree_positions(rows: int, limit: int | None, prompt_length: int = 2) -> int:
        config = EngineConfig("ddtree", 14, max_num_seqs=rows, max_num_batched_tokens=limit)
        engine = Engine(target, drafter, config, prompt_length + 62)
        sequences = []
        for i in range(rows):
            prompt = [i, *[5] * (prompt_length - 1)]
            sequences.append(engine.submit(prompt, SamplingOptions(max_new_tokens=9)))
        engine.step()
        engine.step()
        return max(sequence.drafted[-1] for sequence in sequences) + 1

    sizes = [count_tree_positions(rows, 32) for rows in (1, 2, 3, 4, 5, 8, 16, 40)]
    assert sizes == [15, 15, 8, 8, 4, 4, 2, 2]
    assert count_tree_positions(1, 4) == count_tree_positions(8, None) == 15

    layer_weights = 4 * 32 * 32 - 2 * 32 * 16 + 3 * 32 * 48
    assert target.context_length_matching_weight_cost == layer_weights / (4 * 2 * 8)
    # After `context_length_matching_weight_cost` positions, as with twice as many rows.
    sizes = [count_tree_positions(rows, 32, prompt_length=114) for rows in (1, 2, 3, 5)]
    assert sizes == [15, 8, 4, 2]
    assert count_tree_positions(3, 32, prompt_length=260) == 3  # after twice that context
    assert count_tree_positions(1, 4, prompt_length=260) == 15
    assert count_tree_positions(3, None, prompt_length=260) == 15


def test_where_a_prefill_takes_long_sequences_are_admitted_together(tiny, monkeypatch):
    """If a prefill takes as long as several rounds, sequences are admitted together, and none waits
    for more than a few dozen rounds. If no sequence is running, they are admitted at once."""
    target, _ = tiny
    dice = random.Random(0)
    prompts = [[dice.randrange(90) for _ in range(dice.randrange(3, 20))] for _ in range(60)]
    options = [
        SamplingOptions(max_new_tokens=dice.randrange(10, 40), ignore_eos=True) for _ in prompts
    ]
    prefill_rows = []
    extend = target.extend_cache

    def measured_extend(chunks, *arguments):
        prefill_rows.append(len(chunks))
        return extend(chunks, *arguments)

    monkeypatch.setattr(target, "extend_cache", measured_extend)
    outputs = {}
    num_prefills = {}
    longest_waits = {}
    for rounds_per_prefill in (0, 4):
        engine = Engine(
            target, None, EngineConfig("plain", max_num_seqs=8, max_num_batched_tokens=None), 64
        )
        engine.runner.rounds_per_prefill = rounds_per_prefill
        prefill_rows.clear()
        sequences = [engine.submit(prompts[i], options[i]) for i in range(len(prompts))]
        engine.step()
        assert prefill_rows == [8]
        wait = 0
        longest_wait = 0
        while engine.has_unfinished_sequences:
            wait = wait + 1 if engine.scheduler.num_admissible else 0
            longest_wait = max(longest_wait, wait)
            engine.step()
        num_prefills[rounds_per_prefill] = len(prefill_rows)
        longest_waits[rounds_per_prefill] = longest_wait
        outputs[rounds_per_prefill] = [sequence.ids for sequence in sequences]
    assert outputs[4] == outputs[0]
    assert num_prefills[4] < 0.6 * num_prefills[0]
    assert longest_waits[4] <= 4 * 8 + 1
