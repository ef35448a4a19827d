"""Failures around a run: disks, other runs, evaluations, data, and processes. Each test causes one
of them."""

import errno
import itertools
import json
import math
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

import infer.evaluation.metrics as metrics
import train.loop as loop
import train.run.checkpoints as checkpoints
import train.run.evaluation as evaluation
import train.run.prepare as prepare
from data.packing import load_packed_dataset
from infer import load_drafter, load_target
from infer.drafters.dflash.model import DFlash
from infer.utils.errors import RunAborted
from infer.utils.files import hold_lock_file
from infer.utils.redact import REDACTED_TEXT, redact, redact_text
from train.batches import BatchPrefetcher
from train.config import FeaturesConfig, TrainConfig
from train.features import StoredFeatures, write_features
from train.processes import start_process_group
from train.run.checkpoints import (
    find_newest_resumable_folder,
    list_checkpoints,
    list_rolling_states,
    parse_step,
)
from train.run.folder import config_to_json, digest_dataset, refuse_other_run, run_folder
from train.run.initial import load_drafter_weights
from train.run.log import read_step_metrics
from train.run.state import load_frozen_target

COMPARED_METRICS = ("step", "loss", "prefix", "agreement", "lr", "grad_norm")
RESUMED_AFTER_TWO_STEPS = "resuming after step 2"


def call_after_step(monkeypatch, step: int, action) -> None:
    """Call a function after the given step, counted from 1, of the next run."""
    original_train_step = loop.train_step
    steps = itertools.count(1)

    def train_step(*arguments):
        metrics = original_train_step(*arguments)
        if next(steps) == step:
            action()
        return metrics

    monkeypatch.setattr(loop, "train_step", train_step)


def send_sigterm() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt() -> None:
    raise KeyboardInterrupt


def fail_to_load(*arguments):
    pytest.fail("loaded")


def replace_training_state(monkeypatch) -> None:
    """Let checkpoints be saved without an engine."""
    state = {"norm.weight": torch.ones(3)}
    monkeypatch.setattr(checkpoints, "gather_training_state", lambda drafter, engine: state)


def save_state(run: Path, step: int) -> Path:
    return checkpoints.save_rolling_state(run, step, None, None)


def read_results(run: Path) -> tuple:
    """Return the metrics of all steps, the last checkpoint's tensors as bytes, and the
    evaluations."""
    metrics = [[line[key] for key in COMPARED_METRICS] for line in read_step_metrics(run)]
    last = list_checkpoints(run)[-1]
    files = [file.read_bytes() for file in sorted(last.rglob("*.safetensors"))]
    evaluations = []
    for result in evaluation.read_evaluations(run):
        evaluations.append([(method.name, method.tau, method.rounds) for method in result.methods])
    return metrics, files, evaluations


def write_mixture(tmp_path: Path) -> list[str]:
    """Write two data sets, and return the options of a run on their mixture."""
    parts = []
    for name, weight in (("a", 1), ("b", 2)):
        file = tmp_path / f"{name}.jsonl"
        lines = []
        for i in range(60):
            response = f" {'xyz'[i % 3]} and {i * i} " * 8
            lines.append(json.dumps({"prompt": f"{name} {i} is", "response": response}) + "\n")
        file.write_text("".join(lines))
        parts.append(f"{{path: {file}, weight: {weight}}}")
    parts_option = f"data.datasets=[{', '.join(parts)}]"
    return ["data=mixture", "data.path=null", parts_option, "data.max_examples=null"]


def store_features(tmp_path: Path, config: TrainConfig) -> list[str]:
    """Store the features of a run's data, and return the options of a run that uses them."""
    target = load_target(config.target.path)
    dataset = load_packed_dataset(config.data, target.tokenizer, target.tokenizer_digest)
    options = FeaturesConfig(out=str(tmp_path / "features"), target=config.target, data=config.data)
    write_features(options, target, (2,), dataset, lambda stored, total: None)
    return [f"features={options.out}", "drafter.target_layer_ids=[2]"]


@pytest.mark.robustness
def test_stopped_and_killed_at_any_step_the_run_ends_the_same(
    small, run_here, tmp_path, monkeypatch, capsys
):
    """After a SIGTERM, and after a kill between checkpoints; evaluations are the same, too."""
    options = [
        *store_features(tmp_path, small()),
        "optim.steps=8",
        "checkpoints=2",
        "self_check=false",
    ]
    expected = read_results(run_here(small(*options, "name=uninterrupted")))
    with monkeypatch.context() as patch:
        call_after_step(patch, 2, send_sigterm)
        run = run_here(small(*options))
    assert "stopped by SIGTERM after step 2" in capsys.readouterr().out
    assert [path.name for path in list_rolling_states(run)] == ["rolling-00000002"]
    assert not list_checkpoints(run)
    with monkeypatch.context() as patch:
        call_after_step(patch, 5, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_here(small(*options, "save_interval_minutes=1e-9"))
    assert [path.name for path in list_rolling_states(run)] == ["rolling-00000006"]
    (run / "checkpoints" / ".rolling-00000007").mkdir()  # half-written when it was killed
    assert read_results(run_here(small(*options))) == expected
    assert not list_rolling_states(run) and not list((run / "checkpoints").glob(".*"))


@pytest.mark.robustness
def test_the_best_drafter_is_kept_and_old_states_are_not(small, run_here, monkeypatch):
    taus = {1: 1.5, 2: 4.0, 3: 1.2, 4: 1.1}
    monkeypatch.setattr(
        metrics, "is_significantly_better", lambda a, b: taus[a.step] > taus[b.step]
    )
    run = run_here(small("optim.steps=4", "checkpoints=4"))
    assert (run / "checkpoints" / "best").readlink().name == "step-00000002"
    assert (run / "checkpoints" / "best" / "drafter" / "model.safetensors").is_file()
    with_state = [folder for folder in list_checkpoints(run) if (folder / "state").exists()]
    assert [parse_step(folder) for folder in with_state] == [3, 4]
    (run / "checkpoints" / "best").unlink()  # killed between the evaluation and the link
    (run / "checkpoints" / ".best").symlink_to("half")
    shutil.copytree(
        run / "checkpoints" / "step-00000004" / "state",
        run / "checkpoints" / "rolling-00000003" / "state",
    )
    run_here(small("optim.steps=4", "checkpoints=4"))
    assert (run / "checkpoints" / "best").readlink().name == "step-00000002"
    assert not list_rolling_states(run) and not (run / "checkpoints" / ".best").is_symlink()


def test_a_run_that_was_copied_with_links_followed_says_what_to_delete(
    small, run_here, tmp_path, monkeypatch
):
    options = ["optim.steps=1", "self_check=false"]
    run = run_here(small(*options))
    copy = shutil.copytree(run, tmp_path / "copies" / "small")  # follows links
    options += [f"runs_dir={tmp_path}/copies"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "load_frozen_target", fail_to_load)
        with pytest.raises(
            ValueError, match="checkpoints/best must be a link .* Delete the folder"
        ):
            run_here(small(*options))
    shutil.rmtree(copy / "checkpoints" / "best")
    assert (run_here(small(*options)) / "checkpoints" / "best").is_symlink()


def make_disk_error(number: int) -> OSError:
    return OSError(number, os.strerror(number), "model.safetensors")


@pytest.mark.parametrize(
    "error",
    [
        make_disk_error(errno.ENOSPC),
        make_disk_error(errno.EDQUOT),
        make_disk_error(errno.EROFS),
        SafetensorError("I/O error: No space left on device"),
    ],
    ids=["full", "quota", "read-only", "safetensors"],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_a_sentence(
    tmp_path, monkeypatch, error
):
    start_process_group(torch.device("cpu"))
    replace_training_state(monkeypatch)
    (tmp_path / "run").mkdir()
    before = save_state(tmp_path / "run", 1)

    def save_file(tensors, path):
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoints, "save_file", save_file)
    with pytest.raises(
        RunAborted, match=r"^rolling-00000002 of .* could not be written: .*same command again"
    ) as raised:
        save_state(tmp_path / "run", 2)
    assert "\n" not in str(raised.value)
    assert find_newest_resumable_folder(tmp_path / "run") == (before, [])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "rolling-00000001"
    ]


def test_folders_that_a_user_puts_beside_the_checkpoints_are_left_alone(tmp_path, monkeypatch):
    start_process_group(torch.device("cpu"))
    replace_training_state(monkeypatch)
    run = tmp_path / "run"
    run.mkdir()
    folder = run / "checkpoints"
    other_names = [
        "step-abc",
        "step-",
        "step-00000009-old",
        "step-00000009 (copy)",
        "rolling-abc",
        "step-1e3",
        "steps-4",
    ]
    for name in other_names:
        (folder / name / "state").mkdir(parents=True)
    (folder / "step-00000099").touch()  # a file
    newest = [save_state(run, step) for step in (1, 2)][-1]
    assert find_newest_resumable_folder(run) == (newest, [])
    assert list_rolling_states(run) == [newest]
    assert list_checkpoints(run) == []
    for name in other_names:
        assert (folder / name / "state").is_dir()


def test_a_run_folder_that_vanishes_ends_the_run_and_is_not_made_again(
    small, run_here, tmp_path, monkeypatch
):
    call_after_step(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "small"))
    with pytest.raises(
        RunAborted, match=r"metrics\.jsonl could not be written: No such file or directory"
    ):
        run_here(small("optim.steps=4"))
    assert not (tmp_path / "small").exists()
    replace_training_state(monkeypatch)
    with pytest.raises(RunAborted, match="could not be written: No such file"):
        save_state(tmp_path / "small", 2)
    assert not (tmp_path / "small").exists()


def test_two_runs_in_one_folder_and_a_read_only_one_are_refused_before_models_load(
    small, run_here, monkeypatch
):
    monkeypatch.setattr(prepare, "load_frozen_target", fail_to_load)
    config = small()
    run = run_folder(config)
    run.mkdir()
    with (
        hold_lock_file(run / "lock", str(run), "name="),
        pytest.raises(ValueError, match=rf"is being written by process {os.getpid()} on "),
    ):
        run_here(config)
    with pytest.raises(ValueError, match=r"/proc/runs/small cannot be written \(.*with runs_dir="):
        run_here(small("runs_dir=/proc/runs"))
    (run / "config.json").write_text('{"na')
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        run_here(config)


def write_texts(file: Path, count: int) -> None:
    lines = []
    for i in range(count):
        text = f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)
        lines.append(json.dumps({"text": text}) + "\n")
    file.write_text("".join(lines))


@pytest.fixture
def stopped_run(small, run_here, tmp_path, shallow, monkeypatch):
    """The folder of a run, with its own target and data, that was stopped after two steps, and a
    function that resumes it."""
    shutil.copytree(shallow, tmp_path / "target")
    write_texts(tmp_path / "texts.jsonl", 100)
    options = [
        "data=jsonl",
        f"data.path={tmp_path}/texts.jsonl",
        "data.max_examples=null",
        "self_check=false",
    ]
    options += [f"target.path={tmp_path}/target", "optim.steps=3"]
    with monkeypatch.context() as patch:
        call_after_step(patch, 2, send_sigterm)
        run = run_here(small(*options))
    return run, lambda: run_here(small(*options))


def test_resuming_notices_other_rows_under_the_same_path(stopped_run, tmp_path, capsys):
    run, resume = stopped_run
    write_texts(tmp_path / "texts.jsonl", 80)
    before = sorted(run.rglob("*"))
    with pytest.raises(
        ValueError, match=r"started with other files under the same paths \(data.rows, data.content"
    ):
        resume()
    assert sorted(run.rglob("*")) == before
    shorter_content = (tmp_path / "texts.jsonl").read_text()
    write_texts(tmp_path / "texts.jsonl", 100)
    content = (tmp_path / "texts.jsonl").read_text()
    assert content != shorter_content
    (tmp_path / "texts.jsonl").write_text(content.replace("def f7(", "def g7("))  # one letter
    with pytest.raises(ValueError, match=r"\(data.content differ\)"):
        resume()
    write_texts(tmp_path / "texts.jsonl", 100)  # the same content, with a new timestamp
    resume()
    assert RESUMED_AFTER_TWO_STEPS in capsys.readouterr().out


@pytest.mark.robustness
def test_a_run_goes_on_with_the_defaults_it_began_with(small, run_here, capsys, monkeypatch):
    """The checkpoint records the drafter's feature layers."""
    options = ["optim.steps=3", "checkpoints=2", "self_check=false"]
    with monkeypatch.context() as patch:
        patch.setattr(
            DFlash, "default_layer_ids", staticmethod(lambda target_layers, layers: [0, 1])
        )
        call_after_step(patch, 2, send_sigterm)
        run = run_here(small(*options))
    drafter = load_drafter(run / "checkpoints" / "step-00000002" / "drafter")
    assert drafter.layer_ids == (0, 1) != tuple(DFlash.default_layer_ids(4, 1))
    weights = {name: tensor for name, tensor in drafter.state_dict().items() if name != "fc.weight"}
    with pytest.raises(
        ValueError, match=r"rolling-1 contains the weights of another drafter \(.*fc.weight"
    ):
        load_drafter_weights(drafter, weights, Path("rolling-1"))
    run_here(small(*options))
    assert RESUMED_AFTER_TWO_STEPS in capsys.readouterr().out
    assert load_drafter(run / "checkpoints" / "step-00000003" / "drafter").layer_ids == (0, 1)


@pytest.mark.parametrize("changed", ["weights", "config"])
def test_resuming_notices_another_target_under_the_same_path(stopped_run, tmp_path, changed):
    _, resume = stopped_run
    if changed == "weights":
        weights = tmp_path / "target" / "model.safetensors"
        tensors = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        file = tmp_path / "target" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=rf"\(target.{changed} differ\)"):
        resume()


def test_a_run_of_an_earlier_version_goes_on_and_gets_a_record(stopped_run, tmp_path, capsys):
    run, resume = stopped_run
    record = (run / "sources.json").read_text()
    (run / "sources.json").unlink()
    resume()
    assert RESUMED_AFTER_TWO_STEPS in capsys.readouterr().out
    assert (run / "sources.json").read_text() == record


def test_stored_features_and_their_rows_are_the_same_data(small, run_here, tmp_path):
    options = store_features(tmp_path, small())
    config = small(*options)
    target = load_frozen_target(config, torch.device("cpu"), torch.float32)
    dataset = load_packed_dataset(config.data, target.tokenizer, target.tokenizer_digest)
    assert digest_dataset(dataset) == digest_dataset(StoredFeatures(config.features))


def test_a_run_that_is_refused_leaves_nothing(small, run_here, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": ""}\n' * 3)
    options = ["data=jsonl", "data.max_examples=null", f"data.path={tmp_path}/one.jsonl"]
    with pytest.raises(ValueError):
        run_here(small(*options, "self_check=false", "optim.steps=2"))
    assert not (tmp_path / "small").exists()
    run = run_here(small("optim.steps=1", "self_check=false"))
    assert list_checkpoints(run)


def test_a_failure_before_the_first_step_leaves_nothing(small, run_here, tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(
        '{"name": "of a run that was killed while it loaded"}'
    )

    def fail_to_build(*arguments):
        assert (tmp_path / "small/sources.json").exists()
        raise RuntimeError("no engine")

    monkeypatch.setattr(prepare, "build_engine", fail_to_build)
    with pytest.raises(RuntimeError, match="no engine"):
        run_here(small("optim.steps=1"))
    assert not (tmp_path / "small").exists()


class TestEvaluations:
    def test_failed_ones_are_reported_and_training_continues(
        self, small, run_here, monkeypatch, capfd
    ):
        errors = [
            torch.OutOfMemoryError("out of memory"),
            OSError("the hub is down"),
            KeyError("a defect"),
        ]
        original_decode_all = evaluation.measure_prompt_sets

        def measure_prompt_sets(*arguments):
            num_checkpoints = len(list_checkpoints(run_folder(config)))
            if num_checkpoints <= len(errors):
                raise errors[num_checkpoints - 1]
            return original_decode_all(*arguments)

        config = small("optim.steps=4", "checkpoints=4", "self_check=false")
        monkeypatch.setattr(evaluation, "measure_prompt_sets", measure_prompt_sets)
        run = run_here(config)
        page = (run / "report" / "report.html").read_text()
        printed = capfd.readouterr().out
        for step, error in enumerate(errors, 1):
            name = type(error).__name__
            assert (
                f"The evaluation at step {step} failed, and training continues. The error is "
                f"{name}: {error}"
            ) in printed
            assert f"The evaluation at step {step} failed: {name}" in page
            failure_file = run / f"checkpoints/step-{step:08d}/evaluation/failed.txt"
            assert "Traceback" in failure_file.read_text()
        assert [result.step for result in evaluation.read_evaluations(run)] == [4]

    def test_the_last_one_is_tried_again_by_the_same_command(
        self, small, run_here, monkeypatch, capfd
    ):
        config = small("optim.steps=1", "self_check=false")
        with monkeypatch.context() as patch:
            patch.setattr(evaluation, "measure_prompt_sets", lambda *arguments: 1 / 0)
            run = run_here(config)
        assert "No checkpoint was evaluated" in capfd.readouterr().out
        run_here(config)
        assert [result.step for result in evaluation.read_evaluations(run)] == [1]
        assert not evaluation.describe_failed_evaluations(run)

    def test_outputs_that_differ_from_baseline_decoding_are_the_runs_result(
        self, small, run_here, monkeypatch, capfd
    ):
        original_decode_all = evaluation.measure_prompt_sets

        def measure_prompt_sets(*arguments):
            results = original_decode_all(*arguments)
            results[0][2].sequences[0].ids[-1] += 1
            return results

        monkeypatch.setattr(evaluation, "measure_prompt_sets", measure_prompt_sets)
        with pytest.raises(
            RunAborted, match=r"differ from baseline decoding in float32 \(step 1, 2\)"
        ):
            run_here(small("optim.steps=2", "checkpoints=2", "self_check=false"))
        assert capfd.readouterr().out.count("!!! NOT LOSSLESS at step") == 2


def test_secrets_are_known_by_name_by_shape_and_by_the_environment(monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    monkeypatch.setenv("SORT_KEY", "id")
    tree = {
        "api_key": "x",
        "HF_TOKEN": "y",
        "mask_token_id": 5,
        "prompt_tokens": 8,
        "a": [{"password": "z"}],
        "t": None,
    }
    assert redact(tree) == tree | {
        "api_key": REDACTED_TEXT,
        "HF_TOKEN": REDACTED_TEXT,
        "a": [{"password": REDACTED_TEXT}],
    }
    assert (
        redact_text("a correct horse, id hf_abcdefghijklmnopqrst")
        == f"a {REDACTED_TEXT}, id {REDACTED_TEXT}"
    )
    assert (
        redact_text("https://me:pass@host/path sk-abcdefghijklmnopqrst")
        == f"https://{REDACTED_TEXT}@host/path {REDACTED_TEXT}"
    )
    assert (
        redact_text("https://host:8000/a hf_hub mask-token")
        == "https://host:8000/a hf_hub mask-token"
    )


class TestDamagedData:
    class BrokenDataset:
        cache_files = [{"filename": "cache-123.arrow"}]

        def __len__(self) -> int:
            return 9

        def __getitem__(self, indices):
            raise OSError("Expected to read 1040 metadata bytes")

    def test_a_file_that_cannot_be_read_stops_the_run_and_is_named(self, run_here):
        start_process_group(torch.device("cpu"))
        prefetcher = BatchPrefetcher(self.BrokenDataset(), TrainConfig(), [0], pinned=False)
        with pytest.raises(
            RunAborted, match=r"cannot be read from cache-123\.arrow \(OSError: Expected to read"
        ):
            prefetcher.next_step()

    def test_a_damaged_cache_is_named(self, small, run_here, monkeypatch, tmp_path):
        import datasets

        config = small("self_check=false", "optim.steps=1", *write_mixture(tmp_path))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        run_here(config)
        for file in (tmp_path / "cache").rglob("*.arrow"):
            os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(
            ValueError,
            match=r"cache of packed training sequences in .*/cache cannot be used .*delete it",
        ):
            run_here(config)

    def test_a_feature_shard_that_goes_bad_in_the_run_is_named(
        self, small, run_here, tmp_path, monkeypatch
    ):
        options = store_features(tmp_path, small())
        shard = tmp_path / "features" / "shard-00000.safetensors"

        def damage() -> None:
            with shard.open("r+b") as file:
                file.seek(1 << 16)
                file.write(b"\xff" * (shard.stat().st_size - (1 << 16)))

        call_after_step(monkeypatch, 2, damage)
        with pytest.raises(
            RunAborted,
            match=r"shard-00000\.safetensors is altered: the checksum of its packed sequence \d+",
        ):
            run_here(small(*options, "optim.steps=50", "optim.batch_size=1", "self_check=false"))


@pytest.mark.robustness
def test_a_process_that_sleeps_is_named_and_the_run_ends(small_options, start_command, tmp_path):
    """Two processes, the second of which never finishes reading."""
    script = tmp_path / "sleepy.py"
    script.write_text(
        "import os, sys, time\n"
        "import train.batches as batches, train.main as main\n"
        "original_batch = batches.read_batch\n"
        "def batch(dataset, first, count, seed):\n"
        "    if os.environ['RANK'] == '1' and first >= 6: time.sleep(600)\n"
        "    return original_batch(dataset, first, count, seed)\n"
        "batches.read_batch = batch\n"
        "main.main()\n"
    )
    options = [*small_options, f"runs_dir={tmp_path}", "name=sleepy"]
    options += ["self_check=false", "stall_timeout_minutes=0.1"]
    printed = start_command(str(script), options, processes=2).finish(code=3)
    assert (
        "rank 1 has made no progress for 0.1 minutes (stall_timeout_minutes). Its last activity "
        "is 'training: step 4"
    ) in printed
    assert math.isfinite(read_step_metrics(tmp_path / "sleepy")[-1]["loss"])


def test_a_run_goes_on_that_was_written_before_an_option_existed(tmp_path):
    """A new option had its default then, and another value is another configuration. A removed
    option counts only if it changed what was learned."""
    config = TrainConfig(name="old", runs_dir=str(tmp_path))
    recorded = config_to_json(config)
    del recorded["drafter"]["last_layer_output"]
    del recorded["anchors_per_sequence"]
    recorded["removed_option"] = 3
    recorded["data"]["removed_option"] = 3
    del recorded["data"]["max_invalid_fraction"]
    recorded["data"]["bad_rows"] = 100.0  # its earlier name
    run = tmp_path / "old"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(recorded))
    (run / "metrics.jsonl").touch()
    refuse_other_run(config, run)
    # changes no packed sequence
    refuse_other_run(replace(config, data=replace(config.data, max_invalid_fraction=0.5)), run)
    other_drafter = replace(config.drafter, last_layer_output="normed")
    with pytest.raises(ValueError, match=r"drafter.last_layer_output differ"):
        refuse_other_run(replace(config, drafter=other_drafter), run)
    recorded["optim"]["weight_decay"] = 0.1
    (run / "config.json").write_text(json.dumps(recorded))
    with pytest.raises(ValueError, match=r"optim.weight_decay differ"):
        refuse_other_run(config, run)
