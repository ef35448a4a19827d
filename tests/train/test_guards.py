"""Guards of training: steps that are not finite are skipped, and the self-check finds errors."""

import itertools
import json
import math
from contextlib import closing
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

import infer.drafters.blocks as drafted_blocks
import train.loop as loop
import train.step as training_step
from data.packing import load_packed_dataset
from infer import load_target
from infer.config import DrafterConfig
from infer.utils.errors import RunAborted
from train.batches import BatchPrefetcher, draw_blocks
from train.config import FeaturesConfig, ObjectiveConfig, TrainConfig
from train.engine import build_engine, gather_training_state
from train.features import compute_row_checksum, write_features, write_manifest
from train.objective import BlockLoss
from train.processes import start_process_group
from train.run.log import read_step_metrics
from train.run.state import resolve_precision
from train.selfcheck import TrainingLossCheck


def break_steps(failures: dict[int, str], states: list):
    """Return a `train_step` whose loss or gradient is not finite in some steps.

    failures: step, counted from 1 -> "loss" or "gradient". The training states before and after
    each step are appended to `states`.
    """
    original_train_step = training_step.train_step
    original_block_loss = training_step.compute_block_loss
    steps = itertools.count(1)

    def train_step(drafter, engine, *arguments):
        failure = failures.get(next(steps))

        def compute_block_loss(*loss_arguments) -> BlockLoss:
            result = original_block_loss(*loss_arguments)
            if failure == "gradient":
                result.loss.register_hook(lambda gradient: gradient * math.nan)
            factor = math.inf if failure == "loss" else 1
            return result._replace(loss=result.loss * factor)

        before = gather_training_state(drafter, engine)
        training_step.compute_block_loss = compute_block_loss
        metrics = original_train_step(drafter, engine, *arguments)
        training_step.compute_block_loss = original_block_loss
        states.append((before, gather_training_state(drafter, engine)))
        return metrics

    return train_step


@pytest.mark.parametrize(
    "stage", [0, *(pytest.param(stage, marks=pytest.mark.robustness) for stage in (1, 2, 3))]
)
def test_a_step_that_is_not_finite_changes_nothing_at_any_stage(
    small, run_here, monkeypatch, capsys, stage
):
    states: list = []
    monkeypatch.setattr(loop, "train_step", break_steps({2: "loss", 4: "gradient"}, states))
    run = run_here(small("optim.steps=5", "optim.micro_batch_size=1", f"deepspeed.stage={stage}"))
    for step, (before, after) in enumerate(states, 1):
        is_unchanged = all(torch.equal(before[name], after[name]) for name in before)
        assert is_unchanged == (step in (2, 4)), step
        assert all(value.isfinite().all() for value in after.values())
    lines = read_step_metrics(run)
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [2, 4]
    assert [line["step"] for line in lines if line["loss"] is None] == [2]
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    printed = capsys.readouterr().out
    assert "step 2 is skipped, because its loss and gradient are not finite" in printed
    assert "step 4 is skipped, because its gradient is not finite" in printed


def test_too_many_skipped_steps_stop_the_run(small, run_here, monkeypatch, tmp_path):
    """With stored features that contain an infinite value and have valid checksums."""
    monkeypatch.setattr(loop, "MAX_CONSECUTIVE_SKIPPED_STEPS", 3)
    config = small("optim.steps=9", "self_check=false")
    config.features = str(tmp_path / "features")
    config.drafter.target_layer_ids = [2]
    target = load_target(config.target.path)
    dataset = load_packed_dataset(config.data, target.tokenizer, target.tokenizer_digest)
    dataset = dataset.select(range(4))
    options = FeaturesConfig(out=config.features, target=config.target, data=config.data)
    write_features(options, target, (2,), dataset, lambda stored, total: None)
    shard = tmp_path / "features" / "shard-00000.safetensors"
    stored = load_file(shard)
    stored["context"][:, 5, 0, 7] = math.inf
    save_file(stored, shard)
    manifest = json.loads((shard.parent / "manifest.json").read_text())
    checksums = []
    for row in range(len(dataset)):
        checksums.append(
            compute_row_checksum({name: column[row] for name, column in stored.items()})
        )
    manifest["shards"][0]["checksums"] = checksums
    write_manifest(shard.parent, manifest)

    with pytest.raises(
        RunAborted,
        match=r"step 3 is skipped, because its loss and.* \d+, \d+\..*3 steps in a row were",
    ):
        run_here(config)
    assert [line["grad_norm"] for line in read_step_metrics(tmp_path / "small")] == [None] * 3


class RandomDataset:
    """A training set of random packed sequences, each with two documents."""

    def __init__(self, count: int, length: int) -> None:
        generator = torch.Generator().manual_seed(0)
        documents = (torch.arange(length) > length // 3).long().expand(count, -1)
        positions = torch.arange(length).expand(count, -1)
        first_length = length // 3 + 1  # of the first document
        self.columns = {
            "ids": torch.randint(90, (count, length), generator=generator),
            "positions": torch.where(documents > 0, positions - first_length, positions),
            "documents": documents,
            "loss": torch.rand(count, length, generator=generator) < 0.9,
        }

    def __len__(self) -> int:
        return len(self.columns["ids"])

    def __getitem__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        return {name: column[indices] for name, column in self.columns.items()}


def run_self_check(make_tiny, family: dict, dtype=torch.float32, **objective) -> str:
    start_process_group(torch.device("cpu"))
    target, drafter = make_tiny(dtype=dtype, **family)
    config = TrainConfig(
        anchors_per_sequence=7,
        drafter=DrafterConfig(block_size=4),
        objective=ObjectiveConfig(**objective),
    )
    config.optim.batch_size = 2
    config.optim.precision = "float32"
    config.objective.chunk_rows = 5
    check = TrainingLossCheck(drafter, target, RandomDataset(6, 30), config)
    assert check.expected.count_nonzero() > 3
    blocks = draw_blocks(check.batch, config, 0)
    result = training_step.compute_block_loss(drafter, target, check.batch, blocks, config)
    return check.compare(result)


def test_a_run_keeps_the_precision_that_it_started_with(monkeypatch, tmp_path):
    """auto is bfloat16 on a processor with AMX; a run resumed on another one stays bfloat16."""
    config = TrainConfig(name="resumed", runs_dir=str(tmp_path))
    cpu = torch.device("cpu")
    for capability, precision in (("amx_bf16", "bfloat16"), ("avx512_bf16", "float32")):
        monkeypatch.setattr(
            torch.cpu, "get_capabilities", partial(dict, {capability: True}), raising=False
        )
        assert resolve_precision(config, cpu) == precision
    run = tmp_path / "resumed"
    run.mkdir()
    (run / "metrics.jsonl").write_text("{}")
    (run / "config.json").write_text('{"optim": {"precision": "bfloat16"}}')
    assert resolve_precision(config, cpu) == "bfloat16"


def test_deepspeeds_hooks_are_not_compiled(run_here, make_tiny):
    """They would break the graph, and one of them synchronises with the device, where dynamo fails
    from the third step on. So they belong to the module around the compiled drafter."""
    drafter = make_tiny()[1]
    start_process_group(torch.device("cpu"))
    engine = build_engine(drafter, TrainConfig(compile=True), torch.device("cpu"))
    assert engine.module._orig_mod is drafter and engine.module._forward_pre_hooks
    assert not any(
        module._forward_pre_hooks or module._forward_hooks for module in drafter.modules()
    )


def test_prefetched_micro_batches_give_the_same_loss(run_here, make_tiny):
    """As blocks and chunks that are computed in the step itself."""
    start_process_group(torch.device("cpu"))
    target, drafter = make_tiny()
    config = TrainConfig(
        anchors_per_sequence=7,
        drafter=DrafterConfig(block_size=4),
        objective=ObjectiveConfig(chunk_rows=5),
    )
    config.optim.batch_size = 2
    with closing(BatchPrefetcher(RandomDataset(6, 30), config, range(3), False)) as prefetcher:
        for step in range(3):
            (micro_batch,) = prefetcher.next_step()
            prefetched = training_step.compute_block_loss(
                drafter,
                target,
                micro_batch.batch,
                micro_batch.blocks,
                config,
                micro_batch.chunk_plan,
            )
            blocks = draw_blocks(micro_batch.batch, config, 2 * step)
            expected = training_step.compute_block_loss(
                drafter, target, micro_batch.batch, blocks, config
            )
            assert torch.equal(prefetched.loss, expected.loss)
            assert torch.equal(prefetched.agrees, expected.agrees)
        assert prefetcher.next_batches.result() == []  # nothing is read after the last step


@pytest.mark.parametrize(
    "family", [{}, {"family": "dart"}, {"sliding_window": 5}, {"draft_vocab_size": 50}]
)
@pytest.mark.parametrize("divergence", ["kl", "cross_entropy", "tv", "acceptance", "lk"])
def test_the_self_check_passes(run_here, make_tiny, family, divergence):
    sentence = run_self_check(make_tiny, family, divergence=divergence)
    assert "differ from the training step by at most" in sentence


def test_the_self_check_passes_in_bfloat16(run_here, make_tiny):
    run_self_check(make_tiny, {}, dtype=torch.bfloat16)


@pytest.mark.parametrize("bug", ["mask", "labels", "states", "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_self_check_finds_bugs(run_here, make_tiny, monkeypatch, bug, dtype):
    original_mask = drafted_blocks.build_training_mask
    original_loss = training_step.compute_loss_from_states
    if bug == "mask":  # a block sees its whole document

        def block_mask(starts, *arguments):
            return original_mask(starts * 0 + 10, *arguments)

        monkeypatch.setattr(drafted_blocks, "build_training_mask", block_mask)
    else:

        def compute_loss(drafter, states, target, batch, blocks, features, config, chunk_plan):
            if bug == "labels":
                blocks = blocks._replace(teacher_rows=blocks.teacher_rows + 1)
            if bug == "states":
                states = states.roll(1, 0)
            result = original_loss(drafter, states, target, batch, blocks, features, config)
            if bug == "nan":
                result = result._replace(divergences=result.divergences * math.nan)
            return result

        monkeypatch.setattr(training_step, "compute_loss_from_states", compute_loss)
    with pytest.raises(RunAborted, match="self-check: .* differ by"):
        run_self_check(make_tiny, {}, dtype=dtype)
