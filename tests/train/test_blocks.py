"""The trained block: equal to blocks run alone, blind to the future, equal to the cached inference
block."""

import itertools
import math

import pytest
import torch
from datasets import Dataset
from transformers import Gemma2Config

from infer.attention import masks
from infer.attention.masks import block_mask, packed_mask
from infer.config import DrafterConfig
from infer.drafters.base import head_weight, new_drafter
from infer.kernels.reference import attention
from infer.targets.target import Target
from train.batches import draw_blocks
from train.blocks import anchor_room, draw_anchors, lay_out
from train.config import ObjectiveConfig, TrainConfig
from train.divergences import DIVERGENCES
from train.run.state import most_anchors
from train.step import block_loss, draft_states

K = 4  # block size
FAMILIES = pytest.mark.parametrize(
    "family",
    [{"family": "dflash"}, {"family": "dart"}, {"family": "dflash", "layer_fusion": True}],
    ids=["dflash", "dart", "dflare"],
)


def packed(lengths: list[list[int]], total: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """Rows of random documents of the given lengths, padded to `total`; a few tokens carry no
    loss."""
    generator = torch.Generator().manual_seed(seed)
    rows = {name: [] for name in ("ids", "positions", "documents", "loss")}
    for row in lengths:
        padding = total - sum(row)
        rows["ids"].append(torch.randint(90, (total,), generator=generator))
        rows["positions"].append(
            torch.cat([*(torch.arange(n) for n in row), torch.zeros(padding, dtype=torch.long)])
        )
        numbers = [torch.full((n,), i) for i, n in enumerate(row)]
        rows["documents"].append(torch.cat([*numbers, torch.full((padding,), -1)]))
        loss = torch.rand(total, generator=generator) < 0.9
        loss[total - padding :] = False
        rows["loss"].append(loss)
    return {name: torch.stack(columns) for name, columns in rows.items()}


def jitter(rows: int, slots: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, slots, generator=torch.Generator().manual_seed(seed))


def some_blocks(rows: dict[str, torch.Tensor], slots: int, seed: int = 0):
    anchors, valid = draw_anchors(
        rows["loss"], rows["documents"], jitter(len(rows["ids"]), slots, seed)
    )
    return lay_out(rows, anchors, valid, K)


def config(divergence: str = "kl") -> TrainConfig:
    result = TrainConfig(objective=ObjectiveConfig(divergence=divergence, chunk_rows=7))
    result.drafter.block_size = K
    return result


def slow(drafter, target, features, ids):
    """States (L, D) of the block behind a prefix: features of all tokens but the last, the bonus
    token."""
    prefix = len(ids) - 1
    block = target.embed(drafter.block_ids(ids[-1:]))
    positions = torch.arange(prefix)[None]
    return drafter(features, positions, block, torch.arange(prefix, prefix + K)[None], None)[0, 1:]


def slow_loss(drafter, target, rows, blocks, divergence: str) -> torch.Tensor:
    """Every anchor's block alone: its document's prefix through the target and the drafter, one
    block at a time."""
    total = torch.zeros((), dtype=target.dtype)
    for b in range(len(rows["ids"])):
        for n in range(blocks.anchors.shape[1]):
            if not blocks.valid[b, n]:
                continue
            anchor = int(blocks.anchors[b, n])
            document = rows["documents"][b] == rows["documents"][b, anchor]
            begin = int(document.nonzero()[0])
            end = int(document.nonzero()[-1]) + 1
            ids = rows["ids"][b, begin:end]
            with torch.no_grad():
                out = target.model(ids[None], output_hidden_states=True)
            teacher = out.logits[0].log_softmax(-1)
            prefix = anchor - begin
            features = torch.cat([out.hidden_states[k + 1] for k in drafter.layer_ids], -1)[
                :, :prefix
            ]
            hidden = slow(drafter, target, features, ids[: prefix + 1])  # (L, D)
            for t in range(1, K):
                if prefix + t >= len(ids) or not rows["loss"][b, anchor + t]:
                    continue
                student = (head_weight(drafter, target) @ hidden[t - 1]).log_softmax(-1)
                p = teacher[prefix + t - 1]
                kl = (p.exp() * (p - student)).sum()
                total = total + 0.6 ** (t - 1) * (
                    kl if divergence == "kl" else -student[ids[prefix + t]]
                )
    return total


@pytest.mark.parametrize("divergence, fusion", [("kl", None), ("cross_entropy", True)])
def test_shared_mask_equals_blocks_run_alone(make_tiny, divergence, fusion):
    """DART's blocks are those that decoding drafts, see below, and in its own layout:
    infer/formats/test_layouts.py."""
    target, drafter = make_tiny(torch.float64, K, layer_fusion=fusion)
    rows = packed([[13, 9, 6], [20, 3], [28]], total=30)
    blocks = some_blocks(rows, slots=9)
    assert blocks.valid.any(1).all()
    assert not blocks.supervised.all()

    loss = block_loss(drafter, target, rows, blocks, config(divergence)).loss
    loss.backward()
    fast = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    alone = slow_loss(drafter, target, rows, blocks, divergence)
    alone.backward()

    assert loss.item() == pytest.approx(alone.item(), rel=1e-5)
    for name, p in drafter.named_parameters():
        assert p.grad.norm() > 0, name
        assert (fast[name] - p.grad).norm() < 1e-5 * p.grad.norm(), name


def test_anchors_are_sorted_allowed_and_spread_over_documents():
    rows = packed([[200, 40, 10], [3, 2, 100], [1, 1, 1]], total=256, seed=3)
    rows["loss"][1, :50] = False
    anchors, valid = draw_anchors(rows["loss"], rows["documents"], jitter(3, 32))
    assert (anchors[:, 1:] >= anchors[:, :-1]).all()
    for b in range(3):
        used = anchors[b][valid[b]]
        assert len(set(used.tolist())) == len(used)
        for a in used.tolist():
            assert rows["loss"][b, a] and rows["loss"][b, a + 1]
            assert (
                rows["documents"][b, a - 1]
                == rows["documents"][b, a]
                == rows["documents"][b, a + 1]
            )
    assert valid[0].all()
    assert set(rows["documents"][0][anchors[0]].tolist()) == {
        0,
        1,
        2,
    }  # even the shortest has its share
    assert not valid[2].any()


def test_no_anchor_is_drawn_twice():
    """600 candidates, 512 slots: 512 different ones; every candidate is drawn about as often as
    another."""
    rows = packed([[603]], total=640)
    seen = torch.zeros(640)
    rows["loss"] = rows["documents"] >= 0
    for seed in range(60):
        anchors, valid = draw_anchors(rows["loss"], rows["documents"], jitter(1, 512, seed))
        assert valid.all() and len(set(anchors[0].tolist())) == 512
        seen[anchors[0]] += 1
    assert seen[1:602].min() > 30 and seen[0] == seen[602:].sum() == 0


@pytest.mark.parametrize(
    "slots, wanted", [(400, [100, 48, 0, 98]), (246, [100, 48, 0, 98]), (123, [50, 24, 0, 49])]
)
def test_a_document_has_at_most_its_share(slots, wanted):
    """Documents of 300, 50, 2 and 100 tokens, at most 100 anchors each: the small ones have all
    that they can have, and where there are fewer slots, all have fewer by the same part."""
    rows = packed([[300, 50, 2, 100]], total=512)
    rows["loss"] = rows["documents"] >= 0
    anchors, valid = draw_anchors(
        rows["loss"], rows["documents"], jitter(1, slots), per_document=100
    )
    used = anchors[valid].tolist()
    found = [sum(rows["documents"][0, a].item() == n for a in used) for n in range(4)]
    assert len(set(used)) == len(used) and all(
        abs(a - b) <= 2 for a, b in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("per_document", [None, 1, 3])
def test_slots_that_no_row_has_room_for_draw_nothing(per_document):
    """A run leaves them out: what it draws is the same."""
    rows = packed([[9, 14], [20], [2, 2, 30]], 40)
    room = anchor_room(rows["loss"], rows["documents"], per_document)
    drawn = jitter(3, 38)
    anchors, valid = draw_anchors(rows["loss"], rows["documents"], drawn, per_document)
    assert torch.equal(valid.sum(1), room) and room.min() > 0
    few, all_valid = draw_anchors(
        rows["loss"], rows["documents"], drawn[:, : room.max()], per_document
    )
    assert torch.equal(few[all_valid], anchors[valid])
    dataset = Dataset.from_dict({name: column.tolist() for name, column in rows.items()})
    settings = TrainConfig(anchors_per_sequence=38, anchors_per_document=per_document)
    settings.data.length = 40
    assert most_anchors(dataset, settings) == room.max() < 38


def test_every_anchor_counts_once_however_many_slots_there_are():
    """Four candidates, nine slots: the slots that repeat one are unused, and carry no loss."""
    rows = packed([[12]], total=16)
    rows["loss"] = torch.zeros(1, 16, dtype=torch.bool)
    rows["loss"][0, 3:8] = True
    anchors, valid = draw_anchors(rows["loss"], rows["documents"], torch.full((1, 9), 0.5))
    blocks = lay_out(rows, anchors, valid, K)
    assert valid.sum() == 4 and anchors[valid].tolist() == [3, 4, 5, 6]
    assert not blocks.supervised[~valid].any()
    assert blocks.supervised.sum((0, 2))[valid[0]].tolist() == [3, 3, 2, 1]


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_which_labels_of_a_block_with_gaps_are_learnt(kind):
    """A plain loop over anchors: DSpark's authors end a block before its first label without loss
    (DeepSpec's and SpecForge's `eval_mask`), all others leave that label out and go on behind
    it."""
    rows = packed([[20, 9], [30]], total=32, seed=1)
    settings = config(kind)
    settings.drafter.block_size = 8
    settings.anchors_per_sequence = 12
    rows["loss"] = torch.rand(2, 32, generator=torch.Generator().manual_seed(1)) < 0.8
    blocks = draw_blocks(rows, settings, 0)
    expected = torch.zeros_like(blocks.supervised)
    for b, n in blocks.valid.nonzero().tolist():
        anchor = int(blocks.anchors[b, n])
        for t in range(1, 8):
            if anchor + t >= 32 or rows["documents"][b, anchor + t] != rows["documents"][b, anchor]:
                break
            if rows["loss"][b, anchor + t]:
                expected[b, n, t - 1] = True
            elif kind == "ce_l1":
                break
    assert torch.equal(blocks.supervised, expected)


@FAMILIES
def test_gradients_to_what_a_block_must_not_see_are_exactly_zero(make_tiny, family):
    target, drafter = make_tiny(block_size=K, **family)
    rows = packed([[14, 16]], total=32, seed=6)
    rows["loss"][:, :30] = True
    blocks = some_blocks(rows, 6)
    features = target.packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    ).context
    features = features.clone().requires_grad_()
    tokens, *rest = drafter.inputs(target, rows["ids"], rows["positions"], blocks.anchors)
    tokens = tokens.clone().requires_grad_()  # embedded: DFlash's blocks, DART's next tokens
    starts = (blocks.anchors - drafter.anchor_offset).clamp(min=0)
    masks = [
        block_mask(starts, rows["documents"], drafter.num_queries, *view)
        for view in drafter.attention_patterns
    ]
    hidden = drafter(features, rows["positions"], tokens, *rest, *masks).unflatten(
        1, (6, drafter.num_queries)
    )
    for n in range(6):
        drafted = hidden[0, n, drafter.first_draft_slot :].sum()
        to_features, to_tokens = torch.autograd.grad(drafted, (features, tokens), retain_graph=True)
        anchor = int(blocks.anchors[0, n])
        document = rows["documents"][0] == rows["documents"][0, anchor]
        visible = document & (torch.arange(32) < anchor)
        assert (to_features[0, ~visible] == 0).all()
        assert (to_features[0, visible].abs().sum(-1) > 0).all()
        if (
            family["family"] == "dart"
        ):  # the token after every visible position: up to the bonus token
            assert (to_tokens[0, ~visible] == 0).all()
            assert (to_tokens[0, visible].abs().sum(-1) > 0).all()
        else:
            to_blocks = to_tokens.view(6, K, -1)
            assert (to_blocks[[m for m in range(6) if m != n]] == 0).all()
            assert (to_blocks[n].abs().sum(-1) > 0).all()


@FAMILIES
def test_trained_block_equals_cached_inference_block(make_tiny, family):
    """The block that decoding drafts, its context taken in piece by piece, has the trained block's
    logits."""
    target, drafter = make_tiny(torch.float64, K, **family)
    rows = packed([[24]], total=24, seed=7)
    rows["loss"][:] = True
    blocks = some_blocks(rows, 6)
    with torch.no_grad():
        given = target.packed_features(
            rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
        )
        states = draft_states(drafter, target, rows, blocks, given)[:, drafter.first_draft_slot :]
        trained = (states @ head_weight(drafter, target).T).log_softmax(-1)  # (N, L, V)
        features = given.context
        ids = rows["ids"]
        for n in range(6):
            anchor = int(blocks.anchors[0, n])
            for cut in {1, (anchor + 1) // 2, anchor}:
                state = drafter.state(1, 40)
                with state.add(1) as row:
                    drafter.update_context(target, features[:, :cut], ids[:, :cut], [cut], row)
                drafter.draft_block(target, ids[:, cut], state)  # leaves no trace
                if cut < anchor:
                    drafter.update_context(
                        target, features[:, cut:anchor], ids[:, cut:anchor], [anchor - cut], state
                    )
                marginals = drafter.draft_block(target, ids[:, anchor], state).marginals
                assert torch.allclose(
                    marginals[0].double(), trained[n], atol=1e-5
                )  # marginals are float32


def blocks_see(starts, documents, width: int, causal: bool, window: int | None) -> torch.Tensor:
    """What blocks see of context and blocks, (B, N * W, T + N * W), place by place."""
    rows, length = documents.shape
    queries = starts.shape[1] * width
    seen = torch.zeros(rows, queries, length + queries, dtype=torch.bool)
    for b, q, kv in itertools.product(range(rows), range(queries), range(length + queries)):
        block = q // width
        slot = q % width
        other = (kv - length) % width
        start = int(starts[b, block])
        if kv < length:
            inside = kv < start and documents[b, kv] == documents[b, start]
            distance = start + slot - kv
        else:
            inside = (kv - length) // width == block and (other <= slot or not causal)
            distance = slot - other
        seen[b, q, kv] = inside and (window is None or abs(distance) < window)
    return seen


def seen_through(mask) -> torch.Tensor:
    """What FlexAttention sees under a block mask, (B, Q, S): all of whole tiles, of the others what
    the predicate says."""
    rows, (queries, keys) = mask.kv_indices.shape[0], mask.seq_lengths
    b, q, kv = torch.meshgrid(
        *(torch.arange(size) for size in (rows, queries, keys)), indexing="ij"
    )
    inside = mask.mask_mod(b, None, q, kv)
    side = mask.BLOCK_SIZE[0]
    seen = torch.zeros(rows, queries, keys, dtype=torch.bool)
    for kind in ("", "full_"):
        counts, indices = (
            getattr(mask, f"{kind}kv_{part}")[:, 0] for part in ("num_blocks", "indices")
        )
        for b, i in itertools.product(range(rows), range(counts.shape[1])):
            for j in indices[b, i, : counts[b, i]].tolist():
                tile = b, slice(i * side, (i + 1) * side), slice(j * side, (j + 1) * side)
                assert not seen[tile].any()  # no tile is listed twice
                seen[tile] = True if kind else inside[tile]
    return seen


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (False, 5), (True, 5)])
def test_ranges_are_what_a_double_loop_sees(monkeypatch, causal, window):
    """Of blocks in two documents, with an unused slot and padding, and of packed rows;
    FlexAttention's tiles of 8 that lengths do not divide. The tables by keys are the transposed
    tables by queries, as torch makes them."""
    monkeypatch.setattr(masks, "TILE", 8)
    documents = torch.tensor([[0] * 9 + [1] * 18 + [-1] * 3, [0] * 20 + [-1] * 10])
    positions = torch.tensor([[*range(9), *range(18), *range(3)], [*range(20), *range(10)]])
    starts = torch.tensor([[0, 3, 7, 12, 22], [1, 2, 9, 18, 18]])
    blocks = block_mask(starts, documents, 3, causal, window)
    expected = blocks_see(starts, documents, 3, causal, window)
    assert blocks.keys == 45
    assert torch.equal(blocks.dense[:, 0], expected) and torch.equal(
        seen_through(blocks.tiles), expected
    )
    assert expected.any(-1).all()  # no query sees nothing, so no softmax is NaN
    packed = packed_mask(positions, documents, window, chunked=causal)
    places = torch.arange(30)
    expected = (documents[:, :, None] == documents[:, None]) & (places <= places[:, None])
    if window:
        chunks = positions // window
        apart = positions[:, :, None] - positions[:, None]
        expected &= chunks[:, :, None] == chunks[:, None] if causal else apart < window
    assert torch.equal(packed.dense[:, 0], expected) and torch.equal(
        seen_through(packed.tiles), expected
    )
    assert bool(packed.tiles.full_kv_num_blocks.any()) == (window is None)
    for one in (blocks.tiles, packed.tiles):
        kv = (one.kv_num_blocks, one.kv_indices, one.full_kv_num_blocks, one.full_kv_indices)
        theirs = type(one).from_kv_blocks(
            *kv, BLOCK_SIZE=8, mask_mod=one.mask_mod, seq_lengths=one.seq_lengths
        )
        for name in ("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"):
            assert torch.equal(getattr(one, name), getattr(theirs, name))


@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 5)])
def test_the_mask_in_pieces_is_the_whole_mask(monkeypatch, causal, window):
    """In two rows, one with anchors in two documents and an unused slot, forward and backward."""
    monkeypatch.setattr(masks, "GROUP", 2 * K)
    generator = torch.Generator().manual_seed(0)
    documents = torch.tensor([[0] * 9 + [1] * 15, [0] * 20 + [-1] * 4])
    starts = torch.tensor([[0, 3, 7, 12, 22], [1, 2, 9, 18, 18]])
    q = torch.randn(2, 4, 5 * K, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 24 + 5 * K, 8, generator=generator, dtype=torch.float64)
    found = []
    seen = blocks_see(starts, documents, K, causal, window)
    for mask in (seen[:, None], block_mask(starts, documents, K, causal, window)):
        parts = [part.clone().requires_grad_() for part in (q, k, v)]
        out = attention(*parts, mask)
        found.append([out, *torch.autograd.grad(out.square().sum(), parts)])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("family", ["dflash", "dart"])
def test_training_sees_the_logits_that_decoding_sees(random_target, family):
    """Of a target with sliding windows and soft-capped logits: the loss is that of logits after the
    cap, from states whose context came through the windows."""
    target = random_target(
        Gemma2Config(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=256,
            query_pre_attn_scalar=8,
            sliding_window=3,
            layer_types=["sliding_attention", "full_attention"] * 2,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
        )
    )
    options = DrafterConfig(
        family=family, layers=1, target_layer_ids=[0, 1, 2], block_size=K, mask_token_id=96
    )
    drafter = new_drafter(options, target)
    drafter.initialize(target, torch.Generator().manual_seed(1), warm=True)
    rows = packed([[12, 11]], total=25)
    blocks = some_blocks(rows, 5)
    settings = config()
    loss = block_loss(drafter, target, rows, blocks, settings).loss
    features = target.packed_features(
        rows["ids"], rows["positions"], rows["documents"], drafter.layer_ids
    )
    states = draft_states(drafter, target, rows, blocks, features)[
        :, drafter.first_draft_slot :
    ].flatten(0, 1)
    products = states @ head_weight(drafter, target).T
    log_q = (3 * torch.tanh(products / 3)).log_softmax(-1).unflatten(0, blocks.labels.shape)
    rows_of_teacher = []
    begin = 0
    for length in (12, 11):
        rows_of_teacher.append(target.model(rows["ids"][:, begin : begin + length]).logits[0])
        begin += length
    log_p = torch.cat(rows_of_teacher).log_softmax(-1)[blocks.teacher_rows.clamp(max=22)]
    worth = blocks.supervised * settings.objective.gamma ** torch.arange(K - 1)
    expected = ((log_p.exp() * (log_p - log_q)).sum(-1) * worth).sum()
    assert blocks.supervised.sum() > 6
    assert loss.item() == pytest.approx(expected.item(), rel=1e-4)


@FAMILIES
def test_layers_computed_again_give_the_same_gradients_bit_by_bit(make_tiny, family):
    rows = packed([[9, 14], [20]], 24)
    found = []
    for again in (False, True):
        target, drafter = make_tiny(**family)
        drafter.recompute = again
        block_loss(drafter, target, rows, some_blocks(rows, 6), config()).loss.backward()
        found.append({name: p.grad for name, p in drafter.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and len(found[0]) > 5
    assert all(torch.equal(grad, found[1][name]) for name, grad in found[0].items())


@pytest.mark.parametrize("family", ["dflash", "dart"])
@pytest.mark.parametrize("spread", [0.02, 0.5])
def test_a_drafter_that_starts_from_noise_guesses_nearly_uniformly(random_qwen3, family, spread):
    """A head tied to an embedding of large numbers gave the token that enters a block all
    probability: the first loss on SmolLM2 was five times a uniform guess's."""
    target = Target(random_qwen3(tie_word_embeddings=True, num_hidden_layers=6))
    with torch.no_grad():
        target.embedding.weight.normal_(std=spread, generator=torch.Generator().manual_seed(0))
    layers = 1 if family == "dart" else 2
    options = DrafterConfig(family=family, layers=layers, block_size=K, mask_token_id=96)
    drafter = new_drafter(options, target)
    drafter.initialize(target, torch.Generator().manual_seed(0), warm=False)
    rows = packed([[20, 9]], total=32)
    blocks = some_blocks(rows, 12)
    found = block_loss(drafter, target, rows, blocks, config("cross_entropy")).rows[
        blocks.supervised.flatten(0, 1)
    ]
    assert abs(found.mean().item() - math.log(97)) < 0.3
