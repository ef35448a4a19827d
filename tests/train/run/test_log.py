"""The log of a run: lines in the terminal, and Weights & Biases, whose errors do not stop a run."""

import json
import re
import sys
import time
from types import ModuleType, SimpleNamespace

import pytest
import torch

from infer.utils.progress import SECONDS_BETWEEN_PROGRESS_LINES
from infer.utils.redact import REDACTED_TEXT
from train.config import TrainConfig
from train.processes import start_process_group
from train.run.log import RunLog

STEP_METRICS = {
    "step": 1,
    "loss": None,
    "agreement": [0.5],
    "prefix": 1.5,
    "tokens_per_second": 9.0,
}


@pytest.mark.parametrize("num_steps, printed_steps", [(72, [12]), (10, [3, 10])])
def test_an_early_line_estimates_the_remaining_time(
    run_here, tmp_path, capsys, num_steps, printed_steps
):
    """Long before the first line is due without a terminal."""
    start_process_group(torch.device("cpu"))
    log = RunLog(TrainConfig(), tmp_path, 0, num_steps)
    assert SECONDS_BETWEEN_PROGRESS_LINES > 20
    for step in range(1, min(20, num_steps) + 1):
        log.write_step(STEP_METRICS | {"step": step})
    printed = capsys.readouterr().out.splitlines()
    steps = [int(re.search(r"training: (\d+) of", line)[1]) for line in printed]
    assert steps == printed_steps
    assert " left, " in printed[0]
    assert printed[0].endswith(
        "loss not finite, agreement by position 50 %, batch τ 1.50, 9 tokens/s"
    )
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == min(20, num_steps)


@pytest.mark.robustness  # wandb starts another process
def test_offline_the_report_is_stored_without_secrets(
    small, run_here, monkeypatch, tmp_path, capfd
):
    """With the real wandb, without a network. Its files are searched for secrets, too."""
    key = "0123456789abcdef0123456789abcdef01234567"
    hub_token = "hf_" + "Q" * 30
    monkeypatch.setenv("WANDB_API_KEY", key)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["main.py", f"evaluation.ngrams={hub_token}"])
    config = small("wandb=true", "optim.steps=1", "self_check=false")
    config.target.model_config = {"note": hub_token}
    run = run_here(config)
    (record,) = run.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60
    while b"tau/ddtree4" not in record.read_bytes():  # another process writes it
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for file in tmp_path.rglob("*"):
        if file.is_file():
            content = file.read_bytes()
            assert key.encode() not in content, file
            assert hub_token.encode() not in content, file
    assert (
        json.loads((run / "config.json").read_text())["target"]["model_config"]["note"]
        == REDACTED_TEXT
    )
    printed = capfd.readouterr()
    assert key not in printed.out + printed.err and "wandb failed" not in printed.out
    assert record.parent.name.endswith((run / "wandb_id").read_text())
    (page,) = record.parent.glob("files/media/html/*")
    assert "<h1>Drafter " in page.read_text()


@pytest.fixture
def wandb(monkeypatch):
    """A replacement of the module. `broken` names the call that fails: a mode of init, or log."""
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
    "broken, logged, message",
    [
        ("online", [], "wandb could not be started and is not used (no network)"),
        ("log", [], "wandb failed (server error) and is not used from now on"),
    ],
)
def test_errors_of_wandb_do_not_stop_a_run(
    run_here, wandb, tmp_path, capsys, broken, logged, message
):
    wandb.broken = broken
    start_process_group(torch.device("cpu"))
    log = RunLog(TrainConfig(wandb=True), tmp_path, 0, 2)
    for step in (1, 2):
        log.write_step(STEP_METRICS | {"step": step})
    log.finish_wandb_run(None)
    assert wandb.logged == logged and message in capsys.readouterr().out


def test_a_resumed_run_continues_its_wandb_run(run_here, wandb, tmp_path):
    start_process_group(torch.device("cpu"))
    for folder in (tmp_path, tmp_path, tmp_path / "other"):
        folder.mkdir(exist_ok=True)
        RunLog(TrainConfig(wandb=True), folder, 0, 2)
    ids = [options["id"] for options in wandb.calls]
    assert ids[0] == ids[1] != ids[2]
    assert all(options["resume"] == "allow" for options in wandb.calls)
