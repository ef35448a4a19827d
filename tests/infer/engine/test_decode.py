"""The round loop: lossless for every method, budget, block size and batch; sampling exact; ends
where it should."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from infer import generate
from infer.api import decode
from infer.config import DecodeOptions
from infer.engine.sampling import derived_seed
from infer.targets.target import Target
from infer.trees.methods import TREES


def random_prompts(count: int, vocabulary: int = 90, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def plain(target: Target, prompts: list[list[int]], tokens: int, **options) -> list[list[int]]:
    settings = DecodeOptions(method="plain", max_new_tokens=tokens, **options)
    seeds = [derived_seed(settings.seed, number) for number in range(len(prompts))]
    pairs = zip(prompts, seeds, strict=True)
    return [decode(target, None, [prompt], settings, seeds=[seed])[0].ids for prompt, seed in pairs]


@pytest.mark.parametrize(("block_size", "temperature"), [(2, 1.0), (8, 0.0), (16, 1.0)])
def test_every_method_and_budget_writes_what_plain_decoding_writes(
    scripted_drafter, hugging_face, make_tiny, block_size, temperature
):
    target, drafter = make_tiny(block_size=block_size)
    prompts = random_prompts(5)
    expected = plain(target, prompts, 30, temperature=temperature, seed=11)
    if temperature == 0:
        assert expected == [hugging_face(target, prompt, 30) for prompt in prompts]
    known = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    longest = 0
    for method, budget in [
        ("chain", 512),
        ("chain", 1),
        *(("ddtree", budget) for budget in (1, 7, 64, 512)),
    ]:
        options = DecodeOptions(30, temperature, seed=11, method=method, budget=budget)
        scripted = scripted_drafter(known, block_size, 97, skill=0.85)
        together = decode(target, scripted, prompts, options)
        assert [row.ids for row in together] == expected, (method, budget)
        longest = max(longest, *(max(row.commits) for row in together))
        if budget == 7:  # a random drafter, whose guesses are nearly always wrong
            assert [row.ids for row in decode(target, drafter, prompts, options)] == expected, (
                method,
                budget,
            )
    assert longest >= min(block_size, 10)  # (nearly) whole blocks were accepted now and then


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("dflash", 0.9), ("dart", 0.0), pytest.param("dart", 0.9, marks=pytest.mark.robustness)],
)
def test_every_drafter_with_every_tree_writes_what_plain_decoding_writes(
    scripted_drafter, make_tiny, ngrams, family, temperature
):
    """Chain, DDTree, a static tree, continuity and DDTree + n-grams; rows of their own lengths, and
    a penalty."""
    target, drafter = make_tiny(block_size=6, family=family)
    prompts = random_prompts(4, seed=3)
    controls = {"temperature": temperature, "seed": 5, "repetition_penalty": 1.2, "top_p": 0.95}
    expected = plain(target, prompts, 20, **controls)
    known = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    trees = [
        ("chain", 5, None),
        ("ddtree", 20, None),
        ("static", 20, None),
        ("continuity", 59, str(ngrams)),
    ]
    trees += [("ddtree", 20, str(ngrams)), ("ddtree", 20, "text")]
    for method, budget, file in [tree for tree in trees if tree[0] in TREES]:
        options = DecodeOptions(
            20, method=method, budget=budget, ngrams=file, max_num_seqs=2, **controls
        )
        assert [row.ids for row in decode(target, drafter, prompts, options)] == expected, (
            method,
            file,
        )
        options = replace(options, max_num_seqs=4)
        scripted = decode(target, scripted_drafter(known, 6, 97), prompts, options)
        assert [row.ids for row in scripted] == expected, (method, file)
        assert max(row.stats.tau for row in scripted) > 1.5


def test_a_text_is_drafted_from_what_it_said_before(scripted_drafter, make_tiny):
    """A random model soon repeats itself: what a drafter often guesses wrong, the text's own
    n-grams know."""
    target, _ = make_tiny(block_size=6)
    prompts = random_prompts(3, seed=1)
    taus = {}
    expected = plain(target, prompts, 150)
    known = [prompt + text for prompt, text in zip(prompts, expected, strict=True)]
    for continuity in ("none", "text"):
        options = DecodeOptions(150, budget=8, ngrams=continuity, max_num_seqs=3)
        rows = decode(target, scripted_drafter(known, 6, 97, 0.4), prompts, options)
        assert [row.ids for row in rows] == expected
        taus[continuity] = sum(len(row.ids) - 1 for row in rows) / sum(
            row.stats.rounds for row in rows
        )
    assert taus["text"] > 1.2 * taus["none"]


def critical(freedom: int, z: float) -> float:
    """Chi-square quantile by Wilson and Hilferty; z is the normal quantile."""
    return freedom * (1 - 2 / (9 * freedom) + z * (2 / (9 * freedom)) ** 0.5) ** 3


@pytest.mark.robustness
def test_plain_sampling_has_the_exact_distribution_of_the_next_two_tokens(make_tiny):
    """20,000 draws, false alarm rate 1e-4 (z = 3.72)."""
    temperature = 0.7
    target, drafter = make_tiny()
    prompt = [3, 1, 4, 1, 5]
    draws = 20_000
    counts = torch.zeros(97, 97)
    for first in range(0, draws, 2000):
        options = DecodeOptions(2, temperature, method="plain", max_num_seqs=2000)
        rows = decode(
            target, None, [prompt] * 2000, options, seeds=list(range(first, first + 2000))
        )
        for row in rows:
            counts[row.ids[0], row.ids[1]] += 1
        if first == 0:
            options = DecodeOptions(2, temperature, budget=7, max_num_seqs=2000)
            again = decode(target, drafter, [prompt] * 2000, options, seeds=list(range(2000)))
            assert [row.ids for row in again] == [row.ids for row in rows]
    with torch.no_grad():
        one = (target.model(torch.tensor([prompt])).logits[0, -1].double() / temperature).softmax(
            -1
        )
        ids = torch.tensor([[*prompt, token] for token in range(97)])
        two = (target.model(ids).logits[:, -1].double() / temperature).softmax(-1)
    expected = (one[:, None] * two * draws).flatten()
    observed = counts.flatten().double()
    common = expected >= 8
    cells = [*zip(observed[common].tolist(), expected[common].tolist(), strict=True)]
    cells.append((observed[~common].sum().item(), expected[~common].sum().item()))
    statistic = sum((seen - mean) ** 2 / mean for seen, mean in cells)
    assert len(cells) > 30
    assert statistic < critical(len(cells) - 1, 3.72), (statistic, len(cells))


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_ends_at_an_end_token_and_never_past_it(scripted_drafter, make_tiny, method):
    target, _ = make_tiny(block_size=8)
    prompts = random_prompts(4, seed=9)
    free = plain(target, prompts, 40)
    known = [prompt + text for prompt, text in zip(prompts, free, strict=True)]
    end = free[0][17]
    target.model.generation_config.eos_token_id = [end, 95]
    rows = decode(
        target,
        scripted_drafter(known, 8, 97, skill=0.95),
        prompts,
        DecodeOptions(40, method=method, budget=32),
    )
    for row, text in zip(rows, free, strict=True):
        if end in text:
            assert row.ids == text[: text.index(end) + 1]
            assert row.finish == "stop"
        else:
            assert row.ids == text
            assert row.finish == "length"
    target.model.generation_config.eos_token_id = free[0][
        0
    ]  # the very first token: no round is run
    (row,) = decode(
        target,
        scripted_drafter(known[:1], 8, 97),
        prompts[:1],
        DecodeOptions(40, method=method, budget=32),
    )
    assert row.ids == free[0][:1]
    assert row.stats.rounds == 0


@pytest.mark.parametrize("limit", [1, 2, 7, 29])
def test_limit_and_statistics_add_up(scripted_drafter, make_tiny, limit):
    target, _ = make_tiny(block_size=8)
    prompts = random_prompts(2, seed=2)
    known = [p + text for p, text in zip(prompts, plain(target, prompts, 29), strict=True)]
    drafter = scripted_drafter(known, 8, 97, skill=0.9)
    for row in decode(target, drafter, prompts, DecodeOptions(limit, budget=32)):
        stats = row.stats
        assert len(row.ids) == stats.tokens == limit == sum(row.commits)
        assert row.finish == "length"
        assert sum(stats.histogram) == stats.rounds == len(row.commits) - 1
        assert 1 + sum((i + 1) * n for i, n in enumerate(stats.histogram)) == stats.tokens
        if stats.rounds:
            assert stats.tau == (stats.tokens - 1) / stats.rounds
        assert 0 < sum(stats.stage_seconds.values()) <= stats.seconds


def test_stop_strings_cut_text_and_ids(scripted_drafter, shallow_target):
    prompt = "import os\nimport sys\n\n\ndef main():\n    "
    free = generate(shallow_target, None, prompt, method="plain", max_new_tokens=60)
    stop = free.text[20:23]
    answer = generate(shallow_target, None, prompt, method="plain", max_new_tokens=60, stop=[stop])
    assert answer.text == free.text[: free.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.ids == free.ids[: len(answer.ids)]
    assert stop in shallow_target.tokenizer.decode(answer.ids)
    assert stop not in shallow_target.tokenizer.decode(answer.ids[:-1])
    known = [shallow_target.tokenizer(prompt)["input_ids"] + free.ids]
    drafter = scripted_drafter(known, 8, shallow_target.config.vocab_size, skill=0.95)
    assert (
        generate(shallow_target, drafter, prompt, max_new_tokens=60, stop=[stop]).ids == answer.ids
    )


def test_generate_takes_text_ids_or_many(shallow_target):
    ids = shallow_target.tokenizer("import os")["input_ids"]
    one = generate(shallow_target, None, "import os", method="plain", max_new_tokens=8)
    many = generate(
        shallow_target, None, ["import os", "class A"], method="plain", max_new_tokens=8
    )
    assert (
        generate(shallow_target, None, ids, method="plain", max_new_tokens=8).ids
        == one.ids
        == many[0].ids
    )
    assert len(many) == 2
    assert one.prompt_ids == ids
    assert one.text == shallow_target.tokenizer.decode(one.ids, skip_special_tokens=True)


def test_options_that_make_no_sense_are_refused_with_the_value(make_tiny):
    target, drafter = make_tiny()
    for options, word in [
        ({"method": "tree"}, "tree"),
        ({"method": "ddtree+ngrams"}, "ngrams=<n-gram file>"),
        ({"method": "chain", "ngrams": "x"}, "ngrams=x"),
        ({"method": "chain", "ngrams": "text"}, "method=ddtree"),
        ({"ngrams": "missing.ngrams"}, "missing.ngrams"),
        ({"method": "static", "width": 0}, "width=0"),
        ({"method": "static", "width": 9, "budget": 8}, "width=9"),
        ({"budget": 0}, "budget=0"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"max_new_tokens": 600}, "512"),
        ({"stop": ["x"]}, "tokenizer"),
        ({"stop": [""]}, "empty"),
    ]:
        with pytest.raises((ValueError, FileNotFoundError), match=word):
            generate(target, drafter, [1, 2, 3], **options)
    with pytest.raises(ValueError, match="drafter"):
        generate(target, None, [1, 2, 3], method="chain")
    with pytest.raises(ValueError, match="at least one token"):
        generate(target, drafter, [[1], []])
    with pytest.raises(ValueError, match="tokenizer"):
        generate(target, drafter, "text")
    with pytest.raises(
        ValueError, match=r"bfloat16, the target's float32: load_drafter\(folder, target.dtype\)"
    ):
        generate(target, deepcopy(drafter).bfloat16(), [1, 2, 3])


@pytest.mark.parametrize("method", ["plain", "ddtree", "static"])
def test_texts_of_one_call_have_seeds_of_their_own(make_tiny, method):
    """Each is what its derived seed writes alone; the first has the seed that was given."""
    target, drafter = make_tiny()
    options = {"method": method, "budget": 9, "temperature": 1.0, "max_new_tokens": 12}
    many = generate(target, drafter, [[5, 6, 7]] * 5, seed=11, **options)
    assert len({tuple(answer.ids) for answer in many}) == 5
    seeds = [derived_seed(11, i) for i in range(5)]
    assert seeds[0] == 11 and len(set(seeds)) == 5 and all(0 <= seed < 2**53 for seed in seeds)
    for seed, answer in zip(seeds, many, strict=True):
        assert generate(target, drafter, [5, 6, 7], seed=seed, **options).ids == answer.ids


def test_derived_seeds_do_not_meet():
    seeds = {derived_seed(seed, index) for seed in (0, 1, 2, -1, 2**61) for index in range(1, 300)}
    assert len(seeds) == 5 * 299
