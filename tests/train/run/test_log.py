"""What a run says: its terminal's line, and what it leaves at Weights & Biases, where nothing stops
it."""

import json
import re
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from infer.utils.progress import SECONDS_BETWEEN_LINES
from infer.utils.redact import HIDDEN
from train.config import TrainConfig
from train.processes import start_processes
from train.run.log import RunLog

LINE = {"step": 1, "loss": None, "agreement": [0.5], "prefix": 1.5, "tokens_per_second": 9.0}


@pytest.mark.parametrize("steps, told", [(72, [12]), (10, [3, 10])])
def test_the_first_steps_say_how_long_the_rest_takes(run_here, tmp_path, capsys, steps, told):
    """Long before the first line would be due where there is no terminal."""
    start_processes(torch.device("cpu"))
    log = RunLog(TrainConfig(), tmp_path, 0, steps)
    assert SECONDS_BETWEEN_LINES > 20
    for step in range(1, min(20, steps) + 1):
        log.step(LINE | {"step": step})
    printed = capsys.readouterr().out.splitlines()
    assert [int(re.search(r"training: (\d+) of", line)[1]) for line in printed] == told
    assert " left, " in printed[0]
    assert printed[0].endswith(
        "loss not finite, agreement by position 50 %, batch τ 1.50, 9 tokens/s"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == min(20, steps)


@pytest.mark.robustness  # wandb starts a process of its own
def test_offline_the_report_is_kept_for_later_without_secrets(
    small, run_here, monkeypatch, tmp_path, capfd
):
    """The real wandb, without a network: what it writes is looked through, too."""
    key = "0123456789abcdef0123456789abcdef01234567"
    hub = "hf_" + "Q" * 30
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["main.py", f"evaluation.ngrams={hub}"])
    config = small("wandb=true", "optim.steps=1", "self_check=false")
    config.target.model_config = {"note": hub}
    run = run_here(config)
    (record,) = run.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while (
        b"tau/ddtree4" not in record.read_bytes()
    ):  # a process of wandb's own writes it, in its own time
        assert time.monotonic() < deadline
        time.sleep(0.05)
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not [
        file
        for file in written
        if key.encode() in file.read_bytes() or hub.encode() in file.read_bytes()
    ]
    assert json.loads((run / "config.json").read_text())["target"]["model_config"]["note"] == HIDDEN
    printed = capfd.readouterr()
    assert key not in printed.out + printed.err and "wandb stopped working" not in printed.out
    assert record.parent.name.endswith((run / "wandb_id").read_text())
    (page,) = record.parent.glob("files/media/html/*")
    assert "<h1>Drafter " in page.read_text()


@pytest.fixture
def wandb(monkeypatch):
    """A module in its place, which breaks as it is told."""
    module = ModuleType("wandb")
    module.api = SimpleNamespace(api_key="0123456789")
    module.Settings = lambda **options: options
    module.calls = []
    module.logged = []
    module.broken = None

    def init(**options):
        module.calls.append(options)
        if module.broken == options["mode"]:
            raise ConnectionError("no network")
        return SimpleNamespace(
            log=log, finish=lambda: module.logged.append("finish"), id=options["id"]
        )

    def log(line, step):
        if module.broken == "log":
            raise RuntimeError("server error")
        module.logged.append(step)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    return module


@pytest.mark.parametrize(
    "broken, logged, said",
    [
        ("online", [], "wandb is left out, WANDB_MODE=offline needs no network: no network"),
        ("log", [], "wandb stopped working and is left out from here on: server error"),
    ],
)
def test_what_breaks_there_does_not_stop_a_run(
    run_here, wandb, tmp_path, capsys, broken, logged, said
):
    wandb.broken = broken
    start_processes(torch.device("cpu"))
    log = RunLog(TrainConfig(wandb=True), tmp_path, 0, 2)
    for step in (1, 2):
        log.step(LINE | {"step": step})
    log.close(None)
    assert wandb.logged == logged and said in capsys.readouterr().out


def test_a_resumed_run_is_the_same_run_there(run_here, wandb, tmp_path):
    start_processes(torch.device("cpu"))
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        RunLog(TrainConfig(wandb=True), folder, 0, 2)
    ids = [options["id"] for options in wandb.calls]
    assert ids[0] == ids[1] != ids[2] and all(
        options["resume"] == "allow" for options in wandb.calls
    )
