"""What goes wrong around a run: disks, other runs, evaluations, wandb, data, processes. Each is
brought about here."""

import errno
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

import infer.evaluation.ruler as ruler
import train.loop as loop
import train.run.checkpoints as state
import train.run.evaluation as hooks
import train.run.folder as run_folder
import train.run.prepare as prepare
from data.packing import packed_rows
from infer import load_drafter, load_target
from infer.drafters.dflash.model import DFlash
from infer.utils.errors import Stopped
from infer.utils.files import locked
from infer.utils.redact import HIDDEN, redact, redact_text
from train.batches import Prefetch
from train.config import FeaturesConfig, TrainConfig
from train.features import StoredRows, write_features
from train.processes import start_processes
from train.run.checkpoints import checkpoints, newest, rolling, step_of
from train.run.folder import plain, refuse_another
from train.run.initial import take_weights
from train.run.log import read_log
from train.run.state import load_frozen

KEYS = ("step", "loss", "prefix", "agreement", "lr", "grad_norm")


def after_steps(monkeypatch, count: int, action) -> None:
    """Does something after so many steps."""
    plain = loop.train_step
    done = [0]

    def step(*arguments):
        metrics = plain(*arguments)
        done[0] += 1
        if done[0] == count:
            action()
        return metrics

    monkeypatch.setattr(loop, "train_step", step)


def interrupt() -> None:
    raise KeyboardInterrupt


def left_by(run: Path) -> tuple:
    """Losses, the last checkpoint's bytes, what was evaluated."""
    last = checkpoints(run)[-1]
    files = [file.read_bytes() for file in sorted(last.rglob("*.safetensors"))]
    evaluations = [
        [(m.name, m.tau, m.rounds) for m in evaluation.methods]
        for evaluation in hooks.evaluations_of(run)
    ]
    return [[line[key] for key in KEYS] for line in read_log(run)], files, evaluations


def mixture(tmp_path: Path) -> list[str]:
    for name in ("a", "b"):
        rows = [
            {"prompt": f"{name} {i} is", "response": f" {'xyz'[i % 3]} and {i * i} " * 8}
            for i in range(60)
        ]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    parts = ", ".join(
        f"{{path: {tmp_path / name}.jsonl, weight: {w}}}" for name, w in (("a", 1), ("b", 2))
    )
    return ["data=mixture", "data.path=null", f"data.datasets=[{parts}]", "data.max_examples=null"]


def features(tmp_path: Path, config: TrainConfig) -> list[str]:
    target = load_target(config.target.path)
    rows = packed_rows(config.data, target.tokenizer, target.tokenizer_digest)
    options = FeaturesConfig(out=str(tmp_path / "features"), target=config.target, data=config.data)
    write_features(options, target, (2,), rows, lambda done, total: None)
    return [f"features={options.out}", "drafter.target_layer_ids=[2]"]


@pytest.mark.robustness
def test_stopped_and_killed_at_any_step_the_run_ends_the_same(
    small, run_here, tmp_path, monkeypatch, capsys
):
    """A SIGTERM, then what a kill leaves, between checkpoints; evaluations are the same ones
    too."""
    options = [*features(tmp_path, small()), "optim.steps=8", "checkpoints=2", "self_check=false"]
    whole = left_by(run_here(small(*options, "name=whole")))
    with monkeypatch.context() as patch:
        after_steps(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run = run_here(small(*options))
    assert "stopped by SIGTERM after step 2" in capsys.readouterr().out
    assert [path.name for path in rolling(run)] == ["rolling-00000002"] and not checkpoints(run)
    with monkeypatch.context() as patch:
        after_steps(patch, 5, interrupt)
        with pytest.raises(KeyboardInterrupt):
            run_here(small(*options, "save_interval_minutes=1e-9"))
    assert [path.name for path in rolling(run)] == ["rolling-00000006"]
    (run / "checkpoints" / ".rolling-00000007").mkdir()  # half-written when it was killed
    assert left_by(run_here(small(*options))) == whole
    assert not rolling(run) and not list((run / "checkpoints").glob(".*"))


@pytest.mark.robustness
def test_the_best_drafter_is_kept_and_old_states_are_not(small, run_here, monkeypatch):
    taus = {1: 1.5, 2: 4.0, 3: 1.2, 4: 1.1}
    monkeypatch.setattr(ruler, "is_better", lambda one, other: taus[one.step] > taus[other.step])
    run = run_here(small("optim.steps=4", "checkpoints=4"))
    assert (run / "checkpoints" / "best").readlink().name == "step-00000002"
    assert (run / "checkpoints" / "best" / "drafter" / "model.safetensors").is_file()
    assert [step_of(path) for path in checkpoints(run) if (path / "state").exists()] == [3, 4]
    (run / "checkpoints" / "best").unlink()  # killed between the evaluation and the link
    (run / "checkpoints" / ".best").symlink_to("half")
    shutil.copytree(
        run / "checkpoints" / "step-00000004" / "state",
        run / "checkpoints" / "rolling-00000003" / "state",
    )
    run_here(small("optim.steps=4", "checkpoints=4"))
    assert (run / "checkpoints" / "best").readlink().name == "step-00000002"
    assert not rolling(run) and not (run / "checkpoints" / ".best").is_symlink()


def test_a_run_that_was_copied_with_links_followed_says_what_to_delete(
    small, run_here, tmp_path, monkeypatch
):
    options = ["optim.steps=1", "self_check=false"]
    copy = shutil.copytree(
        run_here(small(*options)), tmp_path / "copies" / "small"
    )  # follows links
    options += [f"runs_dir={tmp_path}/copies"]
    with monkeypatch.context() as patch:
        patch.setattr(prepare, "load_frozen", lambda *arguments: pytest.fail("loaded"))
        with pytest.raises(ValueError, match="checkpoints/best is a folder where .* delete it"):
            run_here(small(*options))
    shutil.rmtree(copy / "checkpoints" / "best")
    assert (run_here(small(*options)) / "checkpoints" / "best").is_symlink()


def full(number: int):
    return OSError(number, os.strerror(number), "model.safetensors")


@pytest.mark.parametrize(
    "error",
    [
        full(errno.ENOSPC),
        full(errno.EDQUOT),
        full(errno.EROFS),
        SafetensorError("I/O error: No space left on device"),
    ],
    ids=["full", "quota", "read-only", "safetensors"],
)
def test_a_checkpoint_that_cannot_be_written_ends_the_run_in_a_sentence(
    tmp_path, monkeypatch, error
):
    start_processes(torch.device("cpu"))
    monkeypatch.setattr(
        state, "training_state", lambda drafter, engine: {"norm.weight": torch.ones(3)}
    )
    (tmp_path / "run").mkdir()
    before = state.save(tmp_path / "run", 1, None, None)

    def save_file(tensors, path):
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(state, "save_file", save_file)
    with pytest.raises(
        Stopped, match=r"^rolling-00000002 of .* could not be written: .*same command goes on"
    ) as found:
        state.save(tmp_path / "run", 2, None, None)
    assert "\n" not in str(found.value)
    assert newest(tmp_path / "run") == (before, [])
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == [
        "rolling-00000001"
    ]


def test_folders_that_a_user_puts_beside_the_checkpoints_are_left_alone(tmp_path, monkeypatch):
    start_processes(torch.device("cpu"))
    monkeypatch.setattr(
        state, "training_state", lambda drafter, engine: {"norm.weight": torch.ones(3)}
    )
    run = tmp_path / "run"
    run.mkdir()
    folder = run / "checkpoints"
    strange = [
        "step-abc",
        "step-",
        "step-00000009-old",
        "step-00000009 (copy)",
        "rolling-abc",
        "step-1e3",
        "steps-4",
    ]
    for name in strange:
        (folder / name / "state").mkdir(parents=True)
    (folder / "step-00000099").touch()  # a file
    newer = [state.save(run, step, None, None) for step in (1, 2)][-1]
    assert newest(run) == (newer, []) and rolling(run) == [newer] and checkpoints(run) == []
    for name in strange:
        assert (folder / name / "state").is_dir()


def test_a_run_folder_that_vanishes_ends_the_run_and_is_not_made_again(
    small, run_here, tmp_path, monkeypatch
):
    after_steps(monkeypatch, 2, lambda: shutil.rmtree(tmp_path / "small"))
    with pytest.raises(
        Stopped, match=r"metrics\.jsonl could not be written: No such file or directory"
    ):
        run_here(small("optim.steps=4"))
    assert not (tmp_path / "small").exists()
    monkeypatch.setattr(
        state, "training_state", lambda drafter, engine: {"norm.weight": torch.ones(3)}
    )
    with pytest.raises(Stopped, match="could not be written: No such file"):
        state.save(tmp_path / "small", 2, None, None)
    assert not (tmp_path / "small").exists()


def test_two_runs_in_one_folder_and_a_read_only_one_are_refused_before_models_load(
    small, run_here, monkeypatch
):
    monkeypatch.setattr(prepare, "load_frozen", lambda *arguments: pytest.fail("loaded"))
    config = small()
    run = run_folder.run_folder(config)
    run.mkdir()
    with (
        locked(run / "lock", str(run), "name="),
        pytest.raises(ValueError, match=rf"is being written by process {os.getpid()} on "),
    ):
        run_here(config)
    with pytest.raises(
        ValueError, match=r"/proc/runs/small cannot be written \(.*choose another runs_dir="
    ):
        run_here(small("runs_dir=/proc/runs"))
    (run / "config.json").write_text('{"na')
    (run / "checkpoints").mkdir()
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        run_here(config)


def texts(file: Path, count: int) -> None:
    rows = [{"text": f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def stopped(small, run_here, tmp_path, shallow, monkeypatch):
    """A run on a target and a file of its own that was stopped after two steps: its folder, and how
    to go on."""
    shutil.copytree(shallow, tmp_path / "target")
    texts(tmp_path / "texts.jsonl", 100)
    options = [
        "data=jsonl",
        f"data.path={tmp_path}/texts.jsonl",
        "data.max_examples=null",
        "self_check=false",
    ]
    options += [f"target.path={tmp_path}/target", "optim.steps=3"]
    with monkeypatch.context() as patch:
        after_steps(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run = run_here(small(*options))
    return run, lambda: run_here(small(*options))


def test_resuming_notices_other_rows_under_the_same_path(stopped, tmp_path, capsys):
    run, go_on = stopped
    texts(tmp_path / "texts.jsonl", 80)
    before = sorted(run.rglob("*"))
    with pytest.raises(
        ValueError,
        match=r"begun with other contents under the same paths \(data.rows, data.content",
    ):
        go_on()
    assert sorted(run.rglob("*")) == before
    content = (tmp_path / "texts.jsonl").read_text()
    texts(tmp_path / "texts.jsonl", 100)
    assert content != (whole := (tmp_path / "texts.jsonl").read_text())
    (tmp_path / "texts.jsonl").write_text(whole.replace("def f7(", "def g7("))  # one letter
    with pytest.raises(ValueError, match=r"\(data.content differ\)"):
        go_on()
    texts(tmp_path / "texts.jsonl", 100)  # the same again, of another time
    go_on()
    assert "going on after step 2" in capsys.readouterr().out


@pytest.mark.robustness
def test_a_run_goes_on_with_the_defaults_it_began_with(small, run_here, capsys, monkeypatch):
    """What the drafter tapped stands in a checkpoint; how many processes tokenised changes
    nothing."""
    options = ["optim.steps=3", "checkpoints=2", "self_check=false"]
    with monkeypatch.context() as patch:
        patch.setattr(
            DFlash, "default_layer_ids", staticmethod(lambda target_layers, layers: [0, 1])
        )
        after_steps(patch, 2, lambda: os.kill(os.getpid(), signal.SIGTERM))
        run = run_here(small(*options))
    drafter = load_drafter(run / "checkpoints" / "step-00000002" / "drafter")
    assert drafter.layer_ids == (0, 1) != tuple(DFlash.default_layer_ids(4, 1))
    weights = {name: tensor for name, tensor in drafter.state_dict().items() if name != "fc.weight"}
    with pytest.raises(
        ValueError, match="rolling-1 holds the weights of another drafter: .*fc.weight"
    ):
        take_weights(drafter, weights, Path("rolling-1"))
    run_here(small(*options))
    assert "going on after step 2" in capsys.readouterr().out
    assert load_drafter(run / "checkpoints" / "step-00000003" / "drafter").layer_ids == (0, 1)


@pytest.mark.parametrize("part", ["weights", "config"])
def test_resuming_notices_another_target_under_the_same_path(stopped, tmp_path, part):
    _, go_on = stopped
    if part == "weights":
        weights = tmp_path / "target" / "model.safetensors"
        tensors = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
        save_file(tensors, weights, metadata={"format": "pt"})
    else:
        file = tmp_path / "target" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    with pytest.raises(ValueError, match=rf"\(target.{part} differ\)"):
        go_on()


def test_a_run_of_an_earlier_version_goes_on_and_gets_a_record(stopped, tmp_path, capsys):
    run, go_on = stopped
    record = (run / "sources.json").read_text()
    (run / "sources.json").unlink()
    go_on()
    assert "going on after step 2" in capsys.readouterr().out
    assert (run / "sources.json").read_text() == record


def test_stored_features_and_their_rows_are_the_same_data(small, run_here, tmp_path):
    from train.run.folder import rows_digest

    options = features(tmp_path, small())
    config = small(*options)
    target = load_frozen(config, torch.device("cpu"), torch.float32)
    rows = packed_rows(config.data, target.tokenizer, target.tokenizer_digest)
    assert rows_digest(rows) == rows_digest(StoredRows(config.features))


def test_a_run_that_is_refused_leaves_nothing(small, run_here, tmp_path):
    (tmp_path / "one.jsonl").write_text('{"text": ""}\n' * 3)
    wrong = [
        "data=jsonl",
        "data.max_examples=null",
        f"data.path={tmp_path}/one.jsonl",
        "self_check=false",
    ]
    with pytest.raises(ValueError):
        run_here(small(*wrong, "optim.steps=2"))
    assert not (tmp_path / "small").exists()
    run = run_here(small("optim.steps=1", "self_check=false"))
    assert checkpoints(run)


def test_what_fails_before_the_first_step_leaves_nothing(small, run_here, tmp_path, monkeypatch):
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "config.json").write_text(
        '{"name": "of a run that was killed while it loaded"}'
    )
    monkeypatch.setattr(
        prepare,
        "build_engine",
        lambda *arguments: (tmp_path / "small/sources.json").read_text()[:0] / 0,
    )
    with pytest.raises(TypeError):
        run_here(small("optim.steps=1"))
    assert not (tmp_path / "small").exists()


class TestEvaluations:
    def test_those_that_fail_are_told_and_training_goes_on(
        self, small, run_here, monkeypatch, capfd
    ):
        errors = [
            torch.OutOfMemoryError("out of memory"),
            OSError("the hub is down"),
            KeyError("a defect"),
        ]
        plain = hooks.decode_all

        def decode_all(*arguments):
            done = len(checkpoints(run_folder.run_folder(config)))
            if done <= len(errors):
                raise errors[done - 1]
            return plain(*arguments)

        config = small("optim.steps=4", "checkpoints=4", "self_check=false")
        monkeypatch.setattr(hooks, "decode_all", decode_all)
        run = run_here(config)
        page = (run / "report" / "report.html").read_text()
        printed = capfd.readouterr().out
        for step, error in enumerate(errors, 1):
            assert (
                f"evaluating step {step} failed, training goes on: {type(error).__name__}: {error}"
                in printed
            )
            assert f"The evaluation at step {step} failed: {type(error).__name__}" in page
            assert (
                "Traceback"
                in (run / f"checkpoints/step-{step:08d}/evaluation/failed.txt").read_text()
            )
        assert [evaluation.step for evaluation in hooks.evaluations_of(run)] == [4]

    def test_the_last_one_is_tried_again_by_the_same_command(
        self, small, run_here, monkeypatch, capfd
    ):
        config = small("optim.steps=1", "self_check=false")
        with monkeypatch.context() as patch:
            patch.setattr(hooks, "decode_all", lambda *arguments: 1 / 0)
            run = run_here(config)
        assert "No checkpoint was evaluated" in capfd.readouterr().out
        run_here(config)
        assert [evaluation.step for evaluation in hooks.evaluations_of(run)] == [1]
        assert not hooks.failures_of(run)

    def test_other_outputs_than_plain_decodings_are_the_runs_result(
        self, small, run_here, monkeypatch, capfd
    ):
        plain = hooks.decode_all

        def decode_all(*arguments):
            results = plain(*arguments)
            results[0][2].texts[0].ids[-1] += 1
            return results

        monkeypatch.setattr(hooks, "decode_all", decode_all)
        with pytest.raises(Stopped, match=r"differ from plain decoding's in float32 \(step 1, 2\)"):
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
        "api_key": HIDDEN,
        "HF_TOKEN": HIDDEN,
        "a": [{"password": HIDDEN}],
    }
    assert redact_text("a correct horse, id hf_abcdefghijklmnopqrst") == f"a {HIDDEN}, id {HIDDEN}"
    assert (
        redact_text("https://me:pass@host/path sk-abcdefghijklmnopqrst")
        == f"https://{HIDDEN}@host/path {HIDDEN}"
    )
    assert (
        redact_text("https://host:8000/a hf_hub mask-token")
        == "https://host:8000/a hf_hub mask-token"
    )


class TestRows:
    class Broken:
        cache_files = [{"filename": "cache-123.arrow"}]

        def __len__(self) -> int:
            return 9

        def __getitem__(self, indices):
            raise OSError("Expected to read 1040 metadata bytes")

    def test_a_file_that_cannot_be_read_stops_the_run_and_is_named(self, run_here):
        start_processes(torch.device("cpu"))
        prefetch = Prefetch(self.Broken(), TrainConfig(), [0], pinned=False)
        with pytest.raises(
            Stopped, match=r"cannot be read from cache-123\.arrow: OSError: Expected to read"
        ):
            prefetch()

    def test_a_damaged_cache_is_named(self, small, run_here, monkeypatch, tmp_path):
        import datasets

        config = small("self_check=false", "optim.steps=1", *mixture(tmp_path))
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
        run_here(config)
        for file in (tmp_path / "cache").rglob("*.arrow"):
            os.truncate(file, file.stat().st_size // 2)
        with pytest.raises(
            ValueError, match=r"cache of training rows in .*/cache cannot be used .*delete it"
        ):
            run_here(config)

    def test_a_feature_shard_that_goes_bad_in_the_run_is_named(
        self, small, run_here, tmp_path, monkeypatch
    ):
        options = features(tmp_path, small())
        shard = tmp_path / "features" / "shard-00000.safetensors"

        def damage() -> None:
            with shard.open("r+b") as file:
                file.seek(1 << 16)
                file.write(b"\xff" * (shard.stat().st_size - (1 << 16)))

        after_steps(monkeypatch, 2, damage)
        with pytest.raises(Stopped, match=r"shard-00000\.safetensors is altered: its row \d+"):
            run_here(small(*options, "optim.steps=50", "optim.batch_size=1", "self_check=false"))


@pytest.mark.robustness
def test_a_process_that_sleeps_is_named_and_the_run_ends(small_options, start_command, tmp_path):
    """Two processes, the second of which reads for ever."""
    script = tmp_path / "sleepy.py"
    script.write_text(
        "import os, sys, time\n"
        "import train.batches as batches, train.main as main\n"
        "plain = batches.batch\n"
        "def batch(rows, first, count, seed):\n"
        "    if os.environ['RANK'] == '1' and first >= 6: time.sleep(600)\n"
        "    return plain(rows, first, count, seed)\n"
        "batches.batch = batch\n"
        "main.main()\n"
    )
    options = [*small_options, f"runs_dir={tmp_path}", "name=sleepy"]
    options += ["self_check=false", "stall_timeout_minutes=0.1"]
    said = start_command(str(script), options, processes=2).finish(code=3)
    assert (
        "rank 1: nothing has gone on for 0.1 minutes at training: step 4, reading its rows" in said
    )
    assert math.isfinite(read_log(tmp_path / "sleepy")[-1]["loss"])


def test_a_run_goes_on_that_was_written_before_an_option_existed(tmp_path):
    """The option had its default then: another value is another configuration. One that is gone is
    compared only where it had decided what is learnt."""
    config = TrainConfig(name="old", runs_dir=str(tmp_path))
    written = plain(config)
    del written["drafter"]["last_layer_output"], written["anchors_per_sequence"]
    written["gone"] = written["data"]["gone"] = 3
    del written["data"]["max_invalid_fraction"]
    written["data"]["bad_rows"] = 100.0  # its place before
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text(json.dumps(written))
    (tmp_path / "old" / "metrics.jsonl").touch()
    refuse_another(config, tmp_path / "old")
    refuse_another(
        replace(config, data=replace(config.data, max_invalid_fraction=0.5)), tmp_path / "old"
    )  # decides no row
    with pytest.raises(ValueError, match=r"drafter.last_layer_output differ"):
        refuse_another(
            replace(config, drafter=replace(config.drafter, last_layer_output="normed")),
            tmp_path / "old",
        )
    written["optim"]["weight_decay"] = 0.1
    (tmp_path / "old" / "config.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"optim.weight_decay differ"):
        refuse_another(config, tmp_path / "old")
