"""The round loop: lossless for every method, budget, block size and batch; exact sampling; correct
ends."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch

from infer import generate
from infer.api import decode_prompts
from infer.config import DecodeOptions
from infer.engine.sampling import derive_seed
from infer.targets.target import Target
from infer.trees.methods import TREE_METHODS


def random_prompts(count: int, vocabulary: int = 90, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
    return [
        torch.randint(vocabulary, (length,), generator=generator).tolist() for length in lengths
    ]


def decode_baseline(
    target: Target, prompts: list[list[int]], max_new_tokens: int, **options
) -> list[list[int]]:
    """Return the outputs of baseline decoding of each prompt alone."""
    settings = DecodeOptions(method="plain", max_new_tokens=max_new_tokens, **options)
    outputs = []
    for number, prompt in enumerate(prompts):
        seed = derive_seed(settings.seed, number)
        outputs.append(decode_prompts(target, None, [prompt], settings, seeds=[seed])[0].ids)
    return outputs


def concatenate(prompts: list[list[int]], outputs: list[list[int]]) -> list[list[int]]:
    return [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]


@pytest.mark.parametrize(("block_size", "temperature"), [(2, 1.0), (8, 0.0), (16, 1.0)])
def test_every_method_and_budget_is_lossless(
    scripted_drafter, hugging_face, make_tiny, block_size, temperature
):
    target, drafter = make_tiny(block_size=block_size)
    prompts = random_prompts(5)
    expected = decode_baseline(target, prompts, 30, temperature=temperature, seed=11)
    if temperature == 0:
        assert expected == [hugging_face(target, prompt, 30) for prompt in prompts]
    scripts = concatenate(prompts, expected)
    max_commit = 0
    methods = [("chain", 512), ("chain", 1)]
    methods += [("ddtree", budget) for budget in (1, 7, 64, 512)]
    for method, budget in methods:
        options = DecodeOptions(30, temperature, seed=11, method=method, budget=budget)
        scripted = scripted_drafter(scripts, block_size, 97, skill=0.85)
        sequences = decode_prompts(target, scripted, prompts, options)
        assert [sequence.ids for sequence in sequences] == expected, (method, budget)
        max_commit = max(max_commit, *(max(sequence.commits) for sequence in sequences))
        if budget == 7:
            # A random drafter, whose drafts are nearly always wrong.
            sequences = decode_prompts(target, drafter, prompts, options)
            assert [sequence.ids for sequence in sequences] == expected, (method, budget)
    assert max_commit >= min(block_size, 10)  # (nearly) whole blocks were accepted at times


@pytest.mark.parametrize(
    ("family", "temperature"),
    [("dflash", 0.9), ("dart", 0.0), pytest.param("dart", 0.9, marks=pytest.mark.robustness)],
)
def test_every_drafter_with_every_tree_is_lossless(
    scripted_drafter, make_tiny, ngrams, family, temperature
):
    """Chain, DDTree, a static tree, continuity and DDTree + n-grams, with prompts of different
    lengths and a repetition penalty."""
    target, drafter = make_tiny(block_size=6, family=family)
    prompts = random_prompts(4, seed=3)
    sampling_options = {
        "temperature": temperature,
        "seed": 5,
        "repetition_penalty": 1.2,
        "top_p": 0.95,
    }
    expected = decode_baseline(target, prompts, 20, **sampling_options)
    scripts = concatenate(prompts, expected)
    trees = [
        ("chain", 5, None),
        ("ddtree", 20, None),
        ("static", 20, None),
        ("continuity", 59, str(ngrams)),
    ]
    trees += [("ddtree", 20, str(ngrams)), ("ddtree", 20, "text")]
    for method, budget, file in trees:
        if method not in TREE_METHODS:
            continue
        options = DecodeOptions(
            20, method=method, budget=budget, ngrams=file, max_num_seqs=2, **sampling_options
        )
        sequences = decode_prompts(target, drafter, prompts, options)
        assert [sequence.ids for sequence in sequences] == expected, (method, file)
        options = replace(options, max_num_seqs=4)
        sequences = decode_prompts(target, scripted_drafter(scripts, 6, 97), prompts, options)
        assert [sequence.ids for sequence in sequences] == expected, (method, file)
        assert max(sequence.stats.tau for sequence in sequences) > 1.5


def test_ngrams_of_the_sequence_itself_raise_tau(scripted_drafter, make_tiny):
    """A random model soon repeats itself, so n-grams of the sequence correct a bad drafter."""
    target, _ = make_tiny(block_size=6)
    prompts = random_prompts(3, seed=1)
    taus = {}
    expected = decode_baseline(target, prompts, 150)
    scripts = concatenate(prompts, expected)
    for continuity in ("none", "text"):
        options = DecodeOptions(150, budget=8, ngrams=continuity, max_num_seqs=3)
        sequences = decode_prompts(target, scripted_drafter(scripts, 6, 97, 0.4), prompts, options)
        assert [sequence.ids for sequence in sequences] == expected
        tokens = sum(len(sequence.ids) - 1 for sequence in sequences)
        rounds = sum(sequence.stats.rounds for sequence in sequences)
        taus[continuity] = tokens / rounds
    assert taus["text"] > 1.2 * taus["none"]


def chi_square_quantile(degrees: int, z: float) -> float:
    """Return the chi-square quantile for the normal quantile z, after Wilson and Hilferty."""
    variance = 2 / (9 * degrees)
    return degrees * (1 - variance + z * variance**0.5) ** 3


@pytest.mark.robustness
def test_sampling_has_the_exact_distribution_of_the_next_two_tokens(make_tiny):
    """20,000 draws, false alarm rate 1e-4 (z = 3.72)."""
    temperature = 0.7
    target, drafter = make_tiny()
    prompt = [3, 1, 4, 1, 5]
    draws = 20_000
    counts = torch.zeros(97, 97)
    for first in range(0, draws, 2000):
        options = DecodeOptions(2, temperature, method="plain", max_num_seqs=2000)
        seeds = list(range(first, first + 2000))
        baseline = decode_prompts(target, None, [prompt] * 2000, options, seeds=seeds)
        for sequence in baseline:
            counts[sequence.ids[0], sequence.ids[1]] += 1
        if first == 0:
            options = DecodeOptions(2, temperature, budget=7, max_num_seqs=2000)
            drafted = decode_prompts(target, drafter, [prompt] * 2000, options, seeds=seeds)
            assert [sequence.ids for sequence in drafted] == [sequence.ids for sequence in baseline]
    with torch.no_grad():
        first_logits = target.model(torch.tensor([prompt])).logits[0, -1].double()
        first_probabilities = (first_logits / temperature).softmax(-1)
        ids = torch.tensor([[*prompt, token] for token in range(97)])
        second_logits = target.model(ids).logits[:, -1].double()
        second_probabilities = (second_logits / temperature).softmax(-1)
    expected = (first_probabilities[:, None] * second_probabilities * draws).flatten()
    observed = counts.flatten().double()
    common = expected >= 8
    cells = [*zip(observed[common].tolist(), expected[common].tolist(), strict=True)]
    cells.append((observed[~common].sum().item(), expected[~common].sum().item()))
    statistic = sum((count - mean) ** 2 / mean for count, mean in cells)
    assert len(cells) > 30
    assert statistic < chi_square_quantile(len(cells) - 1, 3.72), (statistic, len(cells))


@pytest.mark.parametrize("method", ["plain", "chain", "ddtree"])
def test_ends_at_an_end_token_and_never_past_it(scripted_drafter, make_tiny, method):
    target, _ = make_tiny(block_size=8)
    prompts = random_prompts(4, seed=9)
    endless = decode_baseline(target, prompts, 40)
    scripts = concatenate(prompts, endless)
    end = endless[0][17]
    target.model.generation_config.eos_token_id = [end, 95]
    options = DecodeOptions(40, method=method, budget=32)
    drafter = scripted_drafter(scripts, 8, 97, skill=0.95)
    sequences = decode_prompts(target, drafter, prompts, options)
    for sequence, endless_ids in zip(sequences, endless, strict=True):
        if end in endless_ids:
            assert sequence.ids == endless_ids[: endless_ids.index(end) + 1]
            assert sequence.finish_reason == "stop"
        else:
            assert sequence.ids == endless_ids
            assert sequence.finish_reason == "length"

    # If the first token is an end token, there is no round.
    target.model.generation_config.eos_token_id = endless[0][0]
    drafter = scripted_drafter(scripts[:1], 8, 97)
    (sequence,) = decode_prompts(target, drafter, prompts[:1], options)
    assert sequence.ids == endless[0][:1]
    assert sequence.stats.rounds == 0


@pytest.mark.parametrize("limit", [1, 2, 7, 29])
def test_limit_and_statistics_add_up(scripted_drafter, make_tiny, limit):
    target, _ = make_tiny(block_size=8)
    prompts = random_prompts(2, seed=2)
    scripts = concatenate(prompts, decode_baseline(target, prompts, 29))
    drafter = scripted_drafter(scripts, 8, 97, skill=0.9)
    for sequence in decode_prompts(target, drafter, prompts, DecodeOptions(limit, budget=32)):
        stats = sequence.stats
        assert len(sequence.ids) == stats.tokens == limit == sum(sequence.commits)
        assert sequence.finish_reason == "length"
        assert sum(stats.histogram) == stats.rounds == len(sequence.commits) - 1
        assert 1 + sum((i + 1) * n for i, n in enumerate(stats.histogram)) == stats.tokens
        if stats.rounds:
            assert stats.tau == (stats.tokens - 1) / stats.rounds
        assert 0 < sum(stats.stage_seconds.values()) <= stats.seconds


def test_stop_strings_cut_text_and_ids(scripted_drafter, shallow_target):
    prompt = "import os\nimport sys\n\n\ndef main():\n    "
    endless = generate(shallow_target, None, prompt, method="plain", max_new_tokens=60)
    stop = endless.text[20:23]
    answer = generate(shallow_target, None, prompt, method="plain", max_new_tokens=60, stop=[stop])
    assert answer.text == endless.text[: endless.text.index(stop)]
    assert answer.finish_reason == "stop"
    assert answer.ids == endless.ids[: len(answer.ids)]
    assert stop in shallow_target.tokenizer.decode(answer.ids)
    assert stop not in shallow_target.tokenizer.decode(answer.ids[:-1])
    scripts = [shallow_target.tokenizer(prompt)["input_ids"] + endless.ids]
    drafter = scripted_drafter(scripts, 8, shallow_target.config.vocab_size, skill=0.95)
    assert (
        generate(shallow_target, drafter, prompt, max_new_tokens=60, stop=[stop]).ids == answer.ids
    )


def test_generate_accepts_text_ids_or_a_list(shallow_target):
    ids = shallow_target.tokenizer("import os")["input_ids"]
    options = {"method": "plain", "max_new_tokens": 8}
    from_text = generate(shallow_target, None, "import os", **options)
    from_ids = generate(shallow_target, None, ids, **options)
    from_list = generate(shallow_target, None, ["import os", "class A"], **options)
    assert from_ids.ids == from_text.ids == from_list[0].ids
    assert len(from_list) == 2
    assert from_text.prompt_ids == ids
    expected_text = shallow_target.tokenizer.decode(from_text.ids, skip_special_tokens=True)
    assert from_text.text == expected_text


def test_invalid_options_are_refused_with_their_value(make_tiny):
    target, drafter = make_tiny()
    for options, message in [
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
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            generate(target, drafter, [1, 2, 3], **options)
    with pytest.raises(ValueError, match="drafter"):
        generate(target, None, [1, 2, 3], method="chain")
    with pytest.raises(ValueError, match="at least one token"):
        generate(target, drafter, [[1], []])
    with pytest.raises(ValueError, match="tokenizer"):
        generate(target, drafter, "text")
    with pytest.raises(
        ValueError,
        match=r"bfloat16 and the target's weights are float32.*load_drafter\(folder, target",
    ):
        generate(target, deepcopy(drafter).bfloat16(), [1, 2, 3])


@pytest.mark.parametrize("method", ["plain", "ddtree", "static"])
def test_sequences_of_one_call_have_different_seeds(make_tiny, method):
    """Each output is that of its derived seed alone. The first sequence has the given seed."""
    target, drafter = make_tiny()
    options = {"method": method, "budget": 9, "temperature": 1.0, "max_new_tokens": 12}
    outputs = generate(target, drafter, [[5, 6, 7]] * 5, seed=11, **options)
    assert len({tuple(output.ids) for output in outputs}) == 5
    seeds = [derive_seed(11, i) for i in range(5)]
    assert seeds[0] == 11 and len(set(seeds)) == 5 and all(0 <= seed < 2**53 for seed in seeds)
    for seed, output in zip(seeds, outputs, strict=True):
        assert generate(target, drafter, [5, 6, 7], seed=seed, **options).ids == output.ids


def test_derived_seeds_are_distinct():
    seeds = {derive_seed(seed, index) for seed in (0, 1, 2, -1, 2**61) for index in range(1, 300)}
    assert len(seeds) == 5 * 299
