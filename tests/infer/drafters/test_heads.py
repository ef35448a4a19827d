"""Conditional heads: their formulas, exact normalisation, lossless decoding, export, and initial
weights that change nothing."""

from itertools import product

import pytest
import torch

from infer import load_drafter
from infer.api import decode_prompts
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.drafters.base import DraftedBlock
from infer.drafters.build import remove_copied_embedding_and_head
from infer.drafters.heads import draft
from infer.drafters.heads.draft import (
    ConditionalDraft,
    teacher_force_head,
    teacher_forced_log_probs,
)
from infer.drafters.heads.table import CONDITIONAL_HEADS, read_head_options
from infer.engine.sampling import SamplingTensors, make_score_transform
from infer.formats.checkpoint import save_drafter
from infer.formats.compatibility import check_engines
from infer.formats.export import export_drafter
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import Proposal

TARGET_VOCAB_SIZE = 97
TREE_NODES = 40
HEAD_CONFIGS = {
    "vanilla": HeadConfig("markov", rank=6),
    "gated": HeadConfig("markov", kind="gated", rank=6, confidence_head=True),
    "rnn": HeadConfig("markov", kind="rnn", rank=6),
    "selector of all": HeadConfig("selector", rank=6),
    "selector": HeadConfig("selector", rank=6, top_k=9),
    "swiglu": HeadConfig("swiglu", hidden_size=10),
    "gru": HeadConfig("gru", rank=6, hidden_size=10),
    "xpress": HeadConfig("xpress", rank=6),
}


@pytest.fixture(scope="module")
def make_drafter_with_head(make_tiny):
    """Return a function that makes a tiny target and a drafter for it with one of HEAD_CONFIGS,
    whose weights are random or initial ones."""

    def make(head: str, block_size: int = 4, random: bool = True, **options):
        target, drafter = make_tiny(block_size=block_size, head=HEAD_CONFIGS[head], **options)
        if random:
            generator = torch.Generator().manual_seed(1)
            for parameter in drafter.conditional_head.parameters():
                parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
        return target, drafter.eval().requires_grad_(False)

    return make


def draft_after_random_context(target, drafter, rows: int = 2) -> tuple[torch.Tensor, DraftedBlock]:
    """Return random bonus tokens (rows,) and the blocks after them and a random context."""
    generator = torch.Generator().manual_seed(4)
    state = drafter.allocate_state(rows, 20)
    features = torch.randn(rows, 5, drafter.fc.in_features, generator=generator)
    tokens = torch.zeros(rows, 5, dtype=torch.long)
    with state.add(rows) as new_rows:
        drafter.update_context(target, features, tokens, [5] * rows, new_rows)
    bonus = torch.randint(TARGET_VOCAB_SIZE, (rows,), generator=generator)
    return bonus, drafter.draft_block(target, bonus, state)


def random_previous_tokens(block: DraftedBlock) -> torch.Tensor:
    """Return random tokens (B, L) before the slots of a block."""
    generator = torch.Generator().manual_seed(8)
    return torch.randint(TARGET_VOCAB_SIZE, block.marginals.shape[:2], generator=generator)


def tree_paths(tree, row: int) -> list[tuple[int, ...]]:
    """Return the tokens on the path to each drafted node of a batch row's tree."""
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, tree.tokens.shape[1]):
        parent = int(tree.parents[row, node])
        paths.append((*paths[parent], int(tree.tokens[row, node])))
    return paths[1:]


@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_tree_has_the_most_probable_prefixes_under_the_head(make_drafter_with_head, head):
    """All tokens are candidates, and all prefixes of one and two tokens are scored.

    tests/infer/formats/test_layouts.py tests the formulas.
    """
    target, drafter = make_drafter_with_head(head, 3)
    bonus, block = draft_after_random_context(target, drafter)
    steps = ConditionalDraft(drafter, target, bonus, block, candidates=TARGET_VOCAB_SIZE)
    tree = build_ddtree(Proposal(bonus, block.marginals, TREE_NODES, conditionals=steps))
    greedy_chain, _ = steps.draft_greedy_chain(2)
    tokens = range(TARGET_VOCAB_SIZE)
    for row, bonus_token in enumerate(bonus.tolist()):
        # One copy of the block for each token at the first position.
        copies = DraftedBlock(
            block.marginals[row].expand(TARGET_VOCAB_SIZE, -1, -1),
            block.states[row].expand(TARGET_VOCAB_SIZE, -1, -1),
        )
        previous_tokens = torch.tensor([[bonus_token, token] for token in tokens])
        log_probs = teacher_forced_log_probs(drafter, target, copies, previous_tokens)

        scores = {(first,): float(log_probs[0, 0, first]) for first in tokens}
        for first, second in product(tokens, repeat=2):
            scores[first, second] = scores[(first,)] + float(log_probs[first, 1, second])
        best_prefixes = sorted(scores, key=lambda prefix: scores[prefix], reverse=True)

        paths = tree_paths(tree, row)
        assert set(paths) == set(best_prefixes[:TREE_NODES])
        expected = torch.tensor([scores[path] for path in paths])
        assert torch.allclose(tree.log_probs[row, 1:], expected, atol=2e-5)
        first, second = greedy_chain[row].tolist()
        assert first == log_probs[0, 0].argmax()
        assert second == log_probs[first, 1].argmax()


@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_a_float32_head_accepts_bfloat16_states(make_drafter_with_head, head):
    """In training, the head's weights are float32 while the target may be bfloat16."""
    target, drafter = make_drafter_with_head(head)
    states = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    previous_tokens = torch.arange(12).view(3, 4)
    expected = teacher_force_head(drafter, target, states.float(), previous_tokens)
    output = teacher_force_head(drafter, target, states, previous_tokens)
    assert torch.allclose(output.head_input.float(), expected.head_input, rtol=0.05, atol=0.1)
    if expected.low_rank_correction is not None:
        assert torch.allclose(
            output.low_rank_correction.float(), expected.low_rank_correction, rtol=0.05, atol=0.1
        )


@pytest.mark.parametrize("noisy", [False, True])
@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_log_probs_do_not_depend_on_the_number_of_candidates(make_drafter_with_head, head, noisy):
    """A candidate's probability is normalised over all tokens, with noise too."""
    target, drafter = make_drafter_with_head(head, 5)
    bonus, block = draft_after_random_context(target, drafter)
    transform = None
    if noisy:
        noise = torch.randn(2, 5, TARGET_VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
        noise[1] = 0.0  # the second row is greedy
        options = [DecodeOptions(temperature=0.7, top_k=20), DecodeOptions()]
        sampling = SamplingTensors.from_options(options, TARGET_VOCAB_SIZE, bonus.device)
        transform = make_score_transform(sampling, noise, None)

    small_draft = ConditionalDraft(drafter, target, bonus, block, transform, 5)
    large_draft = ConditionalDraft(drafter, target, bonus, block, transform, TARGET_VOCAB_SIZE)
    num_candidates = small_draft.tokens.shape[-1]
    assert torch.equal(small_draft.tokens, large_draft.tokens[..., :num_candidates])
    candidate_indices = torch.tensor([[0, 2], [1, 3]])
    _, small_state = small_draft.compute_first_log_probs()
    _, large_state = large_draft.compute_first_log_probs()
    if small_state is not None:  # the state of one prefix, for both candidates
        small_state = small_state.expand(-1, 2, -1)
        large_state = large_state.expand(-1, 2, -1)
    for slot in range(1, 4):
        small_log_probs, small_state = small_draft.compute_next_log_probs(
            slot, candidate_indices, small_state
        )
        large_log_probs, large_state = large_draft.compute_next_log_probs(
            slot, candidate_indices, large_state
        )
        assert torch.allclose(small_log_probs, large_log_probs[..., :num_candidates], atol=1e-5)
        assert torch.allclose(large_log_probs.exp().sum(-1), torch.ones(2, 2), atol=1e-5)


@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_a_chain_has_the_log_probs_of_teacher_forcing(make_drafter_with_head, head, monkeypatch):
    target, drafter = make_drafter_with_head(head, 5)
    bonus, block = draft_after_random_context(target, drafter)
    steps = ConditionalDraft(drafter, target, bonus, block, None, TARGET_VOCAB_SIZE)
    normalised_scores = []

    def count_normalisation(scores: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        normalised_scores.append(scores)
        return torch.logsumexp(scores, *args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "logsumexp", count_normalisation)
        tokens, log_probs = steps.draft_greedy_chain(4)
    # All slots are normalised at once: each call is half a dozen kernel launches on a GPU.
    assert len(normalised_scores) <= 1

    previous_tokens = torch.cat([bonus[:, None], tokens[:, :-1]], 1)
    expected = teacher_forced_log_probs(drafter, target, block, previous_tokens)
    expected_of_chain = expected.gather(2, tokens[..., None])[..., 0]
    assert torch.allclose(expected_of_chain, log_probs, atol=1e-5)
    assert torch.equal(expected.argmax(-1), tokens)


@pytest.mark.parametrize("head", ["gated", "selector"])
def test_scores_in_memory_are_bounded(make_drafter_with_head, head, monkeypatch):
    """With memory for three queries of both rows, candidates and table stay the same."""
    target, drafter = make_drafter_with_head(head, 6)
    bonus, block = draft_after_random_context(target, drafter)
    noise = torch.randn(2, 6, TARGET_VOCAB_SIZE, generator=torch.Generator().manual_seed(2))
    sampling = SamplingTensors.from_options(
        [DecodeOptions(temperature=0.7)] * 2, TARGET_VOCAB_SIZE, bonus.device
    )
    apply_noise = make_score_transform(sampling, noise, None)
    score_sizes = []

    def transform(scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        score_sizes.append(scores.numel())
        return apply_noise(scores, slots)

    expected = ConditionalDraft(drafter, target, bonus, block, transform, 5)
    expected_table = expected.candidate_log_probs
    max_size = 2 * 3 * TARGET_VOCAB_SIZE
    assert max(score_sizes) > max_size

    score_sizes.clear()
    monkeypatch.setattr(draft, "MAX_HEAD_SCORE_TENSOR_ELEMENTS", 2 * max_size)
    bounded = ConditionalDraft(drafter, target, bonus, block, transform, 5)
    assert torch.equal(bounded.tokens, expected.tokens)
    for log_probs, expected_log_probs in zip(
        bounded.candidate_log_probs, expected_table, strict=True
    ):
        assert torch.allclose(log_probs, expected_log_probs, atol=1e-6)
    assert max(score_sizes) <= max_size


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_outputs_are_those_of_baseline_decoding(make_drafter_with_head, ngrams, head, sampled):
    """With every head and every tree."""
    target, drafter = make_drafter_with_head(
        head,
        depth=3,
        sample_from_anchor=head in ("gated", "gru", "selector"),
        layer_fusion=head in ("vanilla", "xpress"),
    )
    prompts = [[3, 8, 1], [60, 2, 2, 9, 41]]
    sampling = {}
    methods = [{"method": "chain", "budget": 3}, {"method": "ddtree", "budget": 9}]
    if head == "rnn":
        methods.append({"method": "ddtree", "budget": "auto"})
    if sampled:
        sampling = {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2}
        methods = [{"method": "ddtree", "budget": 40}, {"method": "static", "budget": 6}]
    methods.append({"budget": 20, "ngrams": str(ngrams)})

    baseline = decode_prompts(target, None, prompts, DecodeOptions(12, method="plain", **sampling))
    expected = [output.ids for output in baseline]
    for method in methods:
        options = DecodeOptions(12, **method, **sampling)
        outputs = decode_prompts(target, drafter, prompts, options)
        assert [output.ids for output in outputs] == expected, method


@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_initial_head_weights_change_nothing(make_drafter_with_head, make_tiny, head):
    target, drafter = make_drafter_with_head(head, random=False)
    _, drafter_without_head = make_tiny(block_size=4)
    bonus, block = draft_after_random_context(target, drafter)
    expected_bonus, expected_block = draft_after_random_context(target, drafter_without_head.eval())
    assert torch.equal(bonus, expected_bonus)
    torch.testing.assert_close(block.marginals, expected_block.marginals)

    choices = block.marginals > -torch.inf
    top_k = HEAD_CONFIGS[head].top_k
    if top_k:
        choices = block.marginals >= block.marginals.topk(top_k).values[..., -1:]
    expected = block.marginals.masked_fill(~choices, -torch.inf).log_softmax(-1)
    previous_tokens = random_previous_tokens(block)
    log_probs = teacher_forced_log_probs(drafter, target, block, previous_tokens)
    assert torch.allclose(log_probs[choices], expected[choices], atol=1e-5)


@pytest.mark.parametrize("head", HEAD_CONFIGS)
def test_a_saved_head_is_loaded_again(make_drafter_with_head, tmp_path, head):
    target, drafter = make_drafter_with_head(head)
    _, block = draft_after_random_context(target, drafter)
    previous_tokens = random_previous_tokens(block)
    expected = teacher_forced_log_probs(drafter, target, block, previous_tokens)

    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    loaded = load_drafter(tmp_path / "saved")
    assert HeadConfig(**read_head_options(loaded.family_config)) == HEAD_CONFIGS[head]
    assert loaded.state_dict().keys() == drafter.state_dict().keys()
    log_probs = teacher_forced_log_probs(loaded, target, block, previous_tokens)
    assert torch.equal(log_probs, expected)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ({"name": "bilinear"}, "drafter.head.name=bilinear"),
        ({"name": "markov", "kind": "lstm"}, "kind=lstm"),
        ({"name": "selector", "kind": "rnn"}, "drafter.head.kind=rnn is an option of head=markov"),
        ({"name": "markov", "top_k": 4}, "drafter.head.top_k=4 is an option of head=selector"),
        ({"rank": 9}, "drafter.head.rank=9"),
        ({"name": "markov", "rank": 0}, "rank=0"),
    ],
)
def test_wrong_head_options_are_refused(head, message):
    with pytest.raises(ValueError, match=message):
        DrafterConfig(head=HeadConfig(**head)).check()


@pytest.mark.parametrize("option", ["causal", "sample_from_anchor"])
def test_dart_refuses_options_of_other_families(option):
    options = DrafterConfig(family="dart", layers=1, **{option: True})
    with pytest.raises(ValueError, match="drafter=dart does not have this option"):
        options.check()


def test_every_head_is_tested_here():
    assert {head.name for head in HEAD_CONFIGS.values()} == set(CONDITIONAL_HEADS)


# Words in the names of engines, see `infer.formats.compatibility`.
VLLM_ENGINE = "vLLM (method"
SGLANG_ENGINE = "SGLang"
SPECULATORS_ENGINE = "speculators"
AUTHORS_ENGINE = "authors"
HEAD_EXPORTS = [  # head, format, other options of the drafter, and the engines that load it
    ("vanilla", "dspark", {"sample_from_anchor": True}, {VLLM_ENGINE, SGLANG_ENGINE}),
    ("gated", "dspark", {"sample_from_anchor": True}, {VLLM_ENGINE, SGLANG_ENGINE}),
    ("rnn", "specforge", {"sample_from_anchor": True}, {VLLM_ENGINE, SGLANG_ENGINE}),
    ("gated", "specforge", {"sample_from_anchor": True}, {VLLM_ENGINE, SGLANG_ENGINE}),
    ("gru", "specforge", {"sample_from_anchor": True}, {SGLANG_ENGINE}),
    ("gated", "speculators", {}, {SPECULATORS_ENGINE}),
    ("rnn", "speculators", {"sample_from_anchor": True}, {SPECULATORS_ENGINE}),
    ("selector", "speculators", {"conv_kernel_size": 2}, {SPECULATORS_ENGINE}),
    ("selector of all", "speculators", {}, {SPECULATORS_ENGINE}),
    ("xpress", "speculators", {}, {SPECULATORS_ENGINE}),
    ("xpress", "speculators", {"sample_from_anchor": True}, {SPECULATORS_ENGINE}),
    ("selector", "dflash2", {"conv_kernel_size": 2}, {VLLM_ENGINE, SGLANG_ENGINE, AUTHORS_ENGINE}),
    ("selector of all", "dflash2", {}, {VLLM_ENGINE, SGLANG_ENGINE, AUTHORS_ENGINE}),
]


@pytest.mark.parametrize(("head", "export_format", "options", "expected_engines"), HEAD_EXPORTS)
def test_exported_heads_load_in_engines_and_here(
    make_drafter_with_head, tmp_path, head, export_format, options, expected_engines
):
    target, drafter = make_drafter_with_head(head, **options)
    _, block = draft_after_random_context(target, drafter)
    previous_tokens = random_previous_tokens(block)
    expected = teacher_forced_log_probs(drafter, target, block, previous_tokens)
    export_drafter(drafter, export_format, target, tmp_path / "out")

    *verdicts, _ = check_engines(tmp_path / "out")  # the last one is this project's
    engines = [verdict.engine for verdict in verdicts if not verdict.problems]
    assert len(engines) == len(expected_engines), [str(verdict) for verdict in verdicts]
    for word in expected_engines:
        assert any(word in engine for engine in engines), [str(verdict) for verdict in verdicts]

    loaded = load_drafter(tmp_path / "out")
    _, loaded_block = draft_after_random_context(target, loaded)
    log_probs = teacher_forced_log_probs(loaded, target, loaded_block, previous_tokens)
    had_convolutions = bool(drafter.family_config.get("conv_kernel_size"))
    has_convolutions = bool(loaded.family_config.get("conv_kernel_size"))
    if has_convolutions and not had_convolutions:  # identity convolutions, with rounding
        assert torch.allclose(log_probs, expected, atol=1e-4)
    else:
        assert torch.equal(log_probs, expected)

    remove_copied_embedding_and_head(loaded, target)
    loaded_weights = loaded.state_dict()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded_weights[name], weight), name


def test_engines_without_conditional_heads_are_reported(make_drafter_with_head, tmp_path):
    _, drafter = make_drafter_with_head("vanilla")
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    problems = {verdict.engine: verdict.problems for verdict in check_engines(tmp_path / "saved")}
    assert problems.pop("blockdraft") == []
    assert all(problems.values())
    serving_engines = [
        engine for engine in problems if VLLM_ENGINE in engine or SGLANG_ENGINE in engine
    ]
    assert len(serving_engines) == 2
    for engine in serving_engines:
        assert "without the conditional head" in " ".join(problems[engine])


def test_exports_that_engines_would_run_differently_are_refused(
    make_drafter_with_head, make_tiny, tmp_path
):
    target, markov_drafter = make_drafter_with_head("vanilla")
    _, drafter_without_head = make_tiny()
    _, selector_drafter = make_drafter_with_head("selector of all")
    selector_drafter.conditional_head.top_k = 5000
    _, rnn_drafter = make_drafter_with_head("rnn")
    _, swiglu_drafter = make_drafter_with_head("swiglu")
    cases = [
        (markov_drafter, "dflash", "use format=dspark or specforge or speculators"),
        (markov_drafter, "dspark", "it drafts no token at the position of the bonus token"),
        (drafter_without_head, "dflash2", "without a conditional head: use format=dflash or"),
        (selector_drafter, "dflash2", "chooses among 5000 tokens.*set drafter.head.top_k"),
        (rnn_drafter, "speculators", "its conditional head is recurrent"),
        (swiglu_drafter, "speculators", "no format supports it"),
    ]
    for drafter, export_format, message in cases:
        with pytest.raises(ValueError, match=message):
            export_drafter(drafter, export_format, target, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_convolutions_start_as_the_identity_and_are_loaded_again(make_tiny, tmp_path):
    """tests/infer/formats/test_layouts.py tests their formula."""
    target, drafter_without_convolutions = make_tiny(block_size=5)
    _, drafter = make_tiny(block_size=5, conv_kernel_size=3)
    drafter.load_state_dict(drafter_without_convolutions.state_dict(), strict=False)
    _, expected = draft_after_random_context(target, drafter_without_convolutions.eval())
    _, block = draft_after_random_context(target, drafter.eval())
    assert torch.allclose(block.marginals, expected.marginals, atol=1e-6)

    generator = torch.Generator().manual_seed(6)
    for parameter in drafter.layers[1].mlp_conv.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    _, expected = draft_after_random_context(target, drafter)
    _, block = draft_after_random_context(target, load_drafter(tmp_path / "saved"))
    assert torch.equal(block.marginals, expected.marginals)
