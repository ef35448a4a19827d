"""Numbers that are not finite: skipped alike at every stage; losses that jump; the start's
check."""

import json
import math
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

import train.loop as loop
import train.step as training_step
from data.packing import packed_rows
from infer import load_target
from infer.config import DrafterConfig
from infer.drafters import base
from infer.utils.errors import Stopped
from train.batches import Prefetch, draw_blocks
from train.config import FeaturesConfig, ObjectiveConfig, TrainConfig
from train.engine import build_engine, training_state
from train.features import checksum, write_features, write_manifest
from train.objective import RowLoss
from train.processes import start_processes
from train.run.log import read_log
from train.run.state import precision_of
from train.selfcheck import SelfCheck


def poisoned(bad: dict[int, str], states: list):
    """`train_step`, whose loss or gradient is not finite in the given steps; keeps the state before
    and after each."""
    plain = training_step.train_step
    loss_of = training_step.block_loss
    count = [0]

    def poisoned_step(drafter, engine, *rest):
        count[0] += 1
        how = bad.get(count[0])

        def block_loss(*arguments) -> RowLoss:
            found = loss_of(*arguments)
            if how == "gradient":
                found.loss.register_hook(lambda gradient: gradient * math.nan)
            return RowLoss(found.loss * (math.inf if how == "loss" else 1), found.rows, found.agree)

        before = training_state(drafter, engine)
        training_step.block_loss = block_loss
        metrics = plain(drafter, engine, *rest)
        training_step.block_loss = loss_of
        states.append((before, training_state(drafter, engine)))
        return metrics

    return poisoned_step


@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.robustness) for stage in (1, 2, 3))]
)
def test_a_step_that_is_not_finite_changes_nothing_at_any_stage(
    small, run_here, monkeypatch, capsys, stage
):
    states: list = []
    monkeypatch.setattr(loop, "train_step", poisoned({2: "loss", 4: "gradient"}, states))
    run = run_here(small("optim.steps=5", "optim.micro_batch_size=1", f"deepspeed.stage={stage}"))
    for number, (before, after) in enumerate(states, 1):
        same = all(torch.equal(before[name], after[name]) for name in before)
        assert same == (number in (2, 4)), number
        assert all(value.isfinite().all() for value in after.values())
    lines = read_log(run)
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [2, 4]
    assert [line["step"] for line in lines if line["loss"] is None] == [2]
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    said = capsys.readouterr().out
    assert "step 2 is skipped: its loss and gradient are not" in said
    assert "step 4 is skipped: its gradient is" in said


def test_too_many_in_a_row_stop_the_run(small, run_here, monkeypatch, tmp_path):
    """Features with an infinite value, soundly stored: every step meets it."""
    monkeypatch.setattr(loop, "MOST_SKIPPED", 3)
    config = small("optim.steps=9", "self_check=false")
    config.features = str(tmp_path / "features")
    config.drafter.target_layer_ids = [2]
    target = load_target(config.target.path)
    rows = packed_rows(config.data, target.tokenizer, target.tokenizer_digest).select(range(4))
    options = FeaturesConfig(out=config.features, target=config.target, data=config.data)
    write_features(options, target, (2,), rows, lambda done, total: None)
    shard = tmp_path / "features" / "shard-00000.safetensors"
    stored = load_file(shard)
    stored["context"][:, 5, 0, 7] = math.inf
    save_file(stored, shard)
    manifest = json.loads((shard.parent / "manifest.json").read_text())
    manifest["shards"][0]["checksums"] = [
        checksum({name: column[i] for name, column in stored.items()}) for i in range(len(rows))
    ]
    write_manifest(shard.parent, manifest)

    with pytest.raises(
        Stopped,
        match=r"step 3 is skipped: its loss and.*rows of the.* are \d+, \d+\..*were 3 in a row",
    ):
        run_here(config)
    assert [line["grad_norm"] for line in read_log(tmp_path / "small")] == [None] * 3


class Rows:
    """A training set of random rows of two documents."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        documents = (torch.arange(length) > length // 3).long().expand(count, -1)
        places = torch.arange(length).expand(count, -1)
        self.columns = {
            "ids": torch.randint(90, (count, length), generator=generator),
            "positions": torch.where(documents > 0, places - length // 3 - 1, places),
            "documents": documents,
            "loss": torch.rand(count, length, generator=generator) < 0.9,
        }

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def checked(make_tiny, family: dict, dtype=torch.float32, **objective) -> str:
    start_processes(torch.device("cpu"))
    target, drafter = make_tiny(dtype=dtype, **family)
    config = TrainConfig(
        anchors_per_sequence=7,
        drafter=DrafterConfig(block_size=4),
        objective=ObjectiveConfig(**objective),
    )
    config.optim.batch_size = 2
    config.optim.precision = "float32"
    config.objective.chunk_rows = 5
    check = SelfCheck(drafter, target, Rows(6, 30), config)
    assert check.expected.count_nonzero() > 3
    blocks = draw_blocks(check.rows, config, 0)
    return check(training_step.block_loss(drafter, target, check.rows, blocks, config))


def test_a_run_keeps_the_precision_that_it_began_with(monkeypatch, tmp_path):
    """auto is bfloat16 where the processor has AMX; what a run began with it keeps elsewhere."""
    config = TrainConfig(name="kept", runs_dir=str(tmp_path))
    cpu = torch.device("cpu")
    for known, kind in (({"amx_bf16": True}, "bfloat16"), ({"avx512_bf16": True}, "float32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda known=known: known, raising=False)
        assert precision_of(config, cpu) == kind
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "metrics.jsonl").write_text("{}")
    (tmp_path / "kept" / "config.json").write_text('{"optim": {"precision": "bfloat16"}}')
    assert precision_of(config, cpu) == "bfloat16"


def test_deepspeeds_hooks_are_not_compiled(run_here, make_tiny):
    """They break the graph, and from the third step on dynamo fails in one that waits for the
    device: they belong to the module around the compiled drafter."""
    drafter = make_tiny()[1]
    start_processes(torch.device("cpu"))
    engine = build_engine(drafter, TrainConfig(compile=True), torch.device("cpu"))
    assert engine.module._orig_mod is drafter and engine.module._forward_pre_hooks
    assert not any(
        module._forward_pre_hooks or module._forward_hooks for module in drafter.modules()
    )


def test_passes_are_laid_out_ahead(run_here, make_tiny):
    """What was laid out on the host by another thread gives the loss of what the step would have
    laid out."""
    start_processes(torch.device("cpu"))
    target, drafter = make_tiny()
    config = TrainConfig(
        anchors_per_sequence=7,
        drafter=DrafterConfig(block_size=4),
        objective=ObjectiveConfig(chunk_rows=5),
    )
    config.optim.batch_size = 2
    with closing(Prefetch(Rows(6, 30), config, range(3), False)) as prefetch:
        for step in range(3):
            (laid,) = prefetch()
            ahead = training_step.block_loss(
                drafter, target, laid.rows, laid.blocks, config, laid.plan
            )
            now = training_step.block_loss(
                drafter, target, laid.rows, draw_blocks(laid.rows, config, 2 * step), config
            )
            assert torch.equal(ahead.loss, now.loss) and torch.equal(ahead.agree, now.agree)
        assert prefetch.ahead.result() == []  # nothing is read behind the last step


@pytest.mark.parametrize(
    "family", [{}, {"family": "dart"}, {"sliding_window": 5}, {"draft_vocab_size": 50}]
)
@pytest.mark.parametrize("divergence", ["kl", "cross_entropy", "tv", "acceptance", "lk"])
def test_the_start_agrees_with_blocks_computed_alone(run_here, make_tiny, family, divergence):
    assert "computed alone differ from the training step by at most" in checked(
        make_tiny, family, divergence=divergence
    )


def test_the_start_agrees_in_bfloat16(run_here, make_tiny):
    checked(make_tiny, {}, dtype=torch.bfloat16)


@pytest.mark.parametrize("fault", ["mask", "labels", "rows", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_start_notices_what_is_wrong(run_here, make_tiny, monkeypatch, fault, dtype):
    plain_mask = base.block_mask
    plain_score = training_step.score
    if fault == "mask":  # a block sees its whole document
        monkeypatch.setattr(
            base, "block_mask", lambda starts, *rest: plain_mask(starts * 0 + 10, *rest)
        )
    else:

        def score(drafter, drafted, target, rows, blocks, features, config, plan):
            if fault == "labels":
                blocks = blocks._replace(teacher_rows=blocks.teacher_rows + 1)
            drafted = drafted.roll(1, 0) if fault == "rows" else drafted
            found = plain_score(drafter, drafted, target, rows, blocks, features, config)
            return RowLoss(
                found.loss, found.rows * math.nan if fault == "nan" else found.rows, found.agree
            )

        monkeypatch.setattr(training_step, "score", score)
    with pytest.raises(Stopped, match="self-check: .* differ by"):
        checked(make_tiny, {}, dtype=dtype)
