"""Conditional heads: their formulas, exact normalisation, lossless decoding, and what they leave as
it was."""

from itertools import product

import pytest
import torch

from infer import load_drafter
from infer.api import decode
from infer.config import DecodeOptions, DrafterConfig, HeadConfig
from infer.drafters.base import DraftedBlock, drop_copies
from infer.drafters.heads import draft
from infer.drafters.heads.draft import ConditionalDraft, behind, teach
from infer.drafters.heads.table import HEADS, head_options
from infer.engine.sampling import Sampling, judge_on_noise
from infer.formats.checkpoint import save_drafter
from infer.formats.compatibility import check_folder
from infer.formats.export import export_drafter
from infer.trees.ddtree import ddtree
from infer.trees.tree import Proposal

KINDS = {
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
def with_head(make_tiny):
    """(kind, block size, ...) -> a tiny target, and a drafter for it with such a head, random."""

    def make(kind: str, block_size: int = 4, random: bool = True, **options):
        target, drafter = make_tiny(block_size=block_size, head=KINDS[kind], **options)
        generator = torch.Generator().manual_seed(1)
        for parameter in drafter.conditional_head.parameters():
            if random:
                parameter.data = 0.7 * torch.randn(parameter.shape, generator=generator)
        return target, drafter.eval().requires_grad_(False)

    return make


def drafted(target, drafter, rows: int = 2) -> tuple[torch.Tensor, DraftedBlock]:
    """Bonus tokens, and a block behind random context."""
    generator = torch.Generator().manual_seed(4)
    state = drafter.state(rows, 20)
    features = torch.randn(rows, 5, drafter.fc.in_features, generator=generator)
    with state.add(rows) as begun:
        drafter.update_context(
            target, features, torch.zeros(rows, 5, dtype=torch.long), [5] * rows, begun
        )
    bonus = torch.randint(97, (rows,), generator=generator)
    return bonus, drafter.draft_block(target, bonus, state)


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_the_best_of_all_prefixes_under_the_heads_probabilities(with_head, kind):
    """All tokens are candidates, and every prefix of two is scored. Formulas:
    tests/infer/formats/test_layouts.py."""
    target, drafter = with_head(kind, 3)
    bonus, block = drafted(target, drafter)
    steps = ConditionalDraft(drafter, target, bonus, block, candidates=97)
    tree = ddtree(Proposal(bonus, block.marginals, 40, steps=steps))
    greedy, _ = steps.chain(2)
    for row, first in enumerate(bonus.tolist()):
        every = DraftedBlock(*(part[row : row + 1].expand(97, -1, -1) for part in block))
        found = behind(
            drafter, target, every, torch.tensor([[first, token] for token in range(97)])
        )  # (97, 2, V)
        score = {(x,): float(found[0, 0, x]) for x in range(97)}
        score |= {
            (x, y): score[(x,)] + float(found[x, 1, y]) for x, y in product(range(97), repeat=2)
        }
        best = sorted(score, key=score.get, reverse=True)[:40]
        paths = [()]
        for node in range(1, 41):
            paths.append((*paths[int(tree.parents[row, node])], int(tree.tokens[row, node])))
        assert set(paths[1:]) == set(best)
        assert torch.allclose(
            tree.log_probs[row, 1:], torch.tensor([score[p] for p in paths[1:]]), atol=2e-5
        )
        x, y = greedy[row].tolist()
        assert x == found[0, 0].argmax() and y == found[x, 1].argmax()


@pytest.mark.parametrize("kind", KINDS)
def test_a_float32_head_is_taught_by_a_bfloat16_target(with_head, kind):
    """As in training, where the head's weights stay float32 and the target's states are not."""
    target, drafter = with_head(kind)
    states = torch.randn(3, 4, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    before = torch.arange(12).view(3, 4)
    whole, half = (teach(drafter, target, given, before) for given in (states.float(), states))
    for ours, theirs in ((half.read, whole.read), (half.correction, whole.correction)):
        assert theirs is None or torch.allclose(ours.float(), theirs, rtol=0.05, atol=0.1)


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_keep_the_whole_vocabularys_normalisation(with_head, kind, monkeypatch):
    """Under noise too: each candidate's probability is the one among all tokens; a true prefix
    teaches the same."""
    target, drafter = with_head(kind, 5)
    bonus, block = drafted(target, drafter)
    noise = (
        torch.randn(2, 5, 97, generator=torch.Generator().manual_seed(2))
        * torch.tensor([1.0, 0.0])[:, None, None]
    )
    options = Sampling.of(
        [DecodeOptions(temperature=0.7, top_k=20), DecodeOptions()], 97, bonus.device
    )
    for judge in (None, judge_on_noise(options, noise, None)):
        few = ConditionalDraft(drafter, target, bonus, block, judge, 5)
        many = ConditionalDraft(drafter, target, bonus, block, judge, 97)
        assert torch.equal(few.tokens, many.tokens[..., : few.tokens.shape[-1]])
        which = torch.tensor([[0, 2], [1, 3]])
        memories = [steps.begin()[1] for steps in (few, many)]
        for slot in range(1, 4):
            parts = []
            for i, steps in enumerate((few, many)):
                if memories[i] is not None and slot == 1:
                    memories[i] = memories[i].expand(-1, 2, -1)
                found, memories[i] = steps.extend(slot, which, memories[i])
                parts.append(found)
            assert torch.allclose(parts[0], parts[1][..., : parts[0].shape[-1]], atol=1e-5)
            assert torch.allclose(parts[1].exp().sum(-1), torch.ones(2, 2), atol=1e-5)
    plain = ConditionalDraft(drafter, target, bonus, block, None, 97)
    normalised = []

    def counted(scores: torch.Tensor, *at, **kept) -> torch.Tensor:
        normalised.append(scores)
        return torch.logsumexp(scores, *at, **kept)

    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "logsumexp", counted)
        tokens, log_probs = plain.chain(4)
    assert (
        len(normalised) <= 1
    )  # those of all slots at once: on a GPU each is half a dozen launches
    taught = behind(drafter, target, block, torch.cat([bonus[:, None], tokens[:, :-1]], 1))
    assert torch.allclose(taught.gather(2, tokens[..., None])[..., 0], log_probs, atol=1e-5)
    assert torch.equal(taught.argmax(-1), tokens)


@pytest.mark.parametrize("kind", ["gated", "selector"])
def test_no_more_scores_are_made_at_a_time_than_there_is_room_for(with_head, kind, monkeypatch):
    """Room for three queries of both rows, less than a block has slots: the same candidates and
    table as at once."""
    target, drafter = with_head(kind, 6)
    bonus, block = drafted(target, drafter)
    judged = []
    noise = torch.randn(2, 6, 97, generator=torch.Generator().manual_seed(2))
    judge = judge_on_noise(
        Sampling.of([DecodeOptions(temperature=0.7)] * 2, 97, bonus.device), noise, None
    )

    def noted(scores: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        judged.append(scores.numel())
        return judge(scores, slots)

    at_once = ConditionalDraft(drafter, target, bonus, block, noted, 5)
    expected = at_once.table
    assert max(judged) > (room := 2 * 3 * 97)
    judged.clear()
    monkeypatch.setattr(draft, "CHUNK", 2 * room)
    in_pieces = ConditionalDraft(drafter, target, bonus, block, noted, 5)
    assert torch.equal(in_pieces.tokens, at_once.tokens)
    for found, right in zip(in_pieces.table, expected, strict=True):
        assert torch.allclose(found, right, atol=1e-6)
    assert max(judged) <= room


@pytest.mark.parametrize("kind", KINDS)
def test_every_head_with_every_tree_writes_what_plain_decoding_writes(with_head, ngrams, kind):
    anchor = kind in ("gated", "gru", "selector")
    fusion = kind in ("vanilla", "xpress")
    target, drafter = with_head(kind, depth=3, sample_from_anchor=anchor, layer_fusion=fusion)
    prompts = [[3, 8, 1], [60, 2, 2, 9, 41]]
    for sampled in ({}, {"temperature": 0.8, "seed": 4, "repetition_penalty": 1.2}):
        wanted = [
            text.ids
            for text in decode(target, None, prompts, DecodeOptions(12, method="plain", **sampled))
        ]
        ways = [("ddtree", 40), ("static", 6)] if sampled else [("chain", 3), ("ddtree", 9)]
        ways += [("ddtree", "auto")] * (kind == "rnn" and not sampled)
        for method, budget in ways:
            options = DecodeOptions(12, method=method, budget=budget, **sampled)
            assert [text.ids for text in decode(target, drafter, prompts, options)] == wanted, (
                method,
                budget,
            )
        options = DecodeOptions(12, budget=20, ngrams=str(ngrams), **sampled)
        assert [text.ids for text in decode(target, drafter, prompts, options)] == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_head_leaves_the_drafter_as_it_is_and_is_read_back(
    with_head, make_tiny, tmp_path, kind
):
    target, drafter = with_head(kind, random=False)
    _, without = make_tiny(block_size=4)
    bonus, block = drafted(target, drafter)
    other, theirs = drafted(target, without.eval())
    assert torch.equal(bonus, other)
    torch.testing.assert_close(block.marginals, theirs.marginals)
    before = torch.randint(
        97, block.marginals.shape[:2], generator=torch.Generator().manual_seed(8)
    )
    known = block.marginals > -torch.inf
    if KINDS[kind].top_k:
        known = block.marginals >= block.marginals.topk(KINDS[kind].top_k).values[..., -1:]
    expected = block.marginals.masked_fill(~known, -torch.inf).log_softmax(-1)
    assert torch.allclose(behind(drafter, target, block, before)[known], expected[known], atol=1e-5)

    target, drafter = with_head(kind)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    again = load_drafter(tmp_path / "saved")
    assert (
        HeadConfig(**head_options(again.own)) == KINDS[kind]
        and again.state_dict().keys() == drafter.state_dict().keys()
    )
    assert torch.equal(behind(again, target, block, before), behind(drafter, target, block, before))


@pytest.mark.parametrize(
    "head, word",
    [
        ({"name": "bilinear"}, "drafter.head.name=bilinear"),
        ({"name": "markov", "kind": "lstm"}, "kind=lstm"),
        ({"name": "selector", "kind": "rnn"}, "drafter.head.kind=rnn is an option of head=markov"),
        ({"name": "markov", "top_k": 4}, "drafter.head.top_k=4 is an option of head=selector"),
        ({"rank": 9}, "drafter.head.rank=9"),
        ({"name": "markov", "rank": 0}, "rank=0"),
    ],
)
def test_heads_that_do_not_exist_are_refused(head, word):
    with pytest.raises(ValueError, match=word):
        DrafterConfig(head=HeadConfig(**head)).check()


def test_dart_refuses_options_that_are_not_its_own():
    for options in ({"causal": True}, {"sample_from_anchor": True}):
        with pytest.raises(ValueError, match="drafter=dart has no such thing"):
            DrafterConfig(family="dart", layers=1, **options).check()


def test_every_head_is_tested_here():
    assert {head.name for head in KINDS.values()} == set(HEADS)


VLLM, SGLANG, SPECULATORS, AUTHORS = range(4)
EXPORTS = [  # kind, format, what the drafter has besides, and the engines that would load it
    ("vanilla", "dspark", {"sample_from_anchor": True}, {VLLM, SGLANG}),
    ("gated", "dspark", {"sample_from_anchor": True}, {VLLM, SGLANG}),
    ("rnn", "specforge", {"sample_from_anchor": True}, {VLLM, SGLANG}),
    ("gated", "specforge", {"sample_from_anchor": True}, {VLLM, SGLANG}),
    ("gru", "specforge", {"sample_from_anchor": True}, {SGLANG}),
    ("gated", "speculators", {}, {SPECULATORS}),
    ("rnn", "speculators", {"sample_from_anchor": True}, {SPECULATORS}),
    ("selector", "speculators", {"conv_kernel_size": 2}, {SPECULATORS}),
    ("selector of all", "speculators", {}, {SPECULATORS}),
    ("xpress", "speculators", {}, {SPECULATORS}),
    ("xpress", "speculators", {"sample_from_anchor": True}, {SPECULATORS}),
    ("selector", "dflash2", {"conv_kernel_size": 2}, {VLLM, SGLANG, AUTHORS}),
    ("selector of all", "dflash2", {}, {VLLM, SGLANG, AUTHORS}),
]


@pytest.mark.parametrize("kind, format, options, takers", EXPORTS)
def test_heads_are_exported_for_their_engines_and_read_back_bit_for_bit(
    with_head, tmp_path, kind, format, options, takers
):
    target, drafter = with_head(kind, **options)
    bonus, block = drafted(target, drafter)
    before = torch.randint(
        97, block.marginals.shape[:2], generator=torch.Generator().manual_seed(8)
    )
    expected = behind(drafter, target, block, before)
    export_drafter(drafter, format, target, tmp_path / "out")
    verdicts = check_folder(tmp_path / "out")
    assert {i for i, verdict in enumerate(verdicts[:-1]) if not verdict.problems} == takers, list(
        map(str, verdicts)
    )
    again = load_drafter(tmp_path / "out")
    _, theirs = drafted(target, again)
    found = behind(again, target, theirs, before)
    if again.own.get("conv_kernel_size") and not drafter.own.get(
        "conv_kernel_size"
    ):  # others that change nothing
        assert torch.allclose(found, expected, atol=1e-4)
    else:
        assert torch.equal(found, expected)
    drop_copies(again, target)  # and is trained on without them
    weights = again.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in drafter.state_dict().items())


def test_no_engine_is_given_a_drafter_that_it_would_run_in_another_way(
    with_head, make_tiny, tmp_path
):
    target, drafter = with_head("vanilla")
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    verdicts = {verdict.engine: verdict.problems for verdict in check_folder(tmp_path / "saved")}
    assert verdicts.pop("blockdraft") == [] and all(verdicts.values())
    said = [
        " ".join(problems)
        for engine, problems in verdicts.items()
        if "vLLM (" in engine or "SGLang" in engine
    ]
    assert len(said) == 2 and all("without the conditional head" in each for each in said)
    plain = make_tiny()[1]
    wide = with_head("selector of all")[1]
    wide.conditional_head.top_k = 5000
    wrong = [
        (drafter, "dflash", "use format=dspark or specforge or speculators"),
        (drafter, "dspark", "its first slot does not draft"),
        (plain, "dflash2", "without a conditional head: use format=dflash or"),
        (wide, "dflash2", "chooses among 5000 tokens.*drafter.head.top_k=16"),
        (with_head("rnn")[1], "speculators", "reads the bonus token's slot there"),
        (with_head("swiglu")[1], "speculators", "no format has"),
    ]
    for each, format, word in wrong:
        with pytest.raises(ValueError, match=word):
            export_drafter(each, format, target, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_convolutions_start_as_the_identity_and_are_read_back(make_tiny, tmp_path):
    """Their formula: tests/infer/formats/test_layouts.py."""
    target, plain = make_tiny(block_size=5)
    _, drafter = make_tiny(block_size=5, conv_kernel_size=3)
    drafter.load_state_dict(plain.state_dict(), strict=False)
    bonus, block = drafted(target, drafter.eval())
    assert torch.allclose(block.marginals, drafted(target, plain.eval())[1].marginals, atol=1e-6)
    generator = torch.Generator().manual_seed(6)
    for parameter in drafter.layers[1].mlp_conv.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "saved")
    again = load_drafter(tmp_path / "saved")
    assert torch.equal(drafted(target, again)[1].marginals, drafted(target, drafter)[1].marginals)
