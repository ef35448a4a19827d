"""Run every program of this folder in a small size: `./launch.sh test -m robustness`.

This takes a few minutes. In full size programs are run by hand, such as
`python tests/robustness/kills.py`; see their `--help`.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.robustness


@pytest.fixture
def run_program(repo):
    """Return a function (name, *arguments) -> output of a program of this folder.

    The program must end with exit code 0.
    """

    def run(name: str, *arguments: str) -> str:
        command = [sys.executable, str(repo / "tests" / "robustness" / f"{name}.py"), *arguments]
        environment = os.environ | {"PYTHONPATH": str(repo), "OMP_NUM_THREADS": "1"}
        process = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=900
        )
        assert process.returncode == 0, f"{process.stdout[-4000:]}\n{process.stderr[-4000:]}"
        return process.stdout

    return run


def test_hostile_command_lines(run_program):
    assert "\n0 faults" in run_program("fuzz_configs", "--lines", "300")


def test_the_fuzz_of_command_lines_detects_failures(load_program, monkeypatch):
    """It fails if a check accepts everything."""
    from infer.utils import hydra_app

    fuzzer = load_program("fuzz_configs")
    assert fuzzer.check_line("chat", ["temperature=inf"], [False]) == (False, [])
    monkeypatch.setattr(hydra_app, "check_numbers", lambda options: None)
    accepted, failures = fuzzer.check_line("chat", ["temperature=inf"], [False])
    assert accepted and failures == ["temperature=inf passes", "a mistake passes"]


def test_hostile_requests(run_program):
    assert "\n0 faults" in run_program(
        "fuzz_http", "--requests", "2000", "--clients", "8", "--margin", "200"
    )


def test_hostile_grammars(run_program):
    assert "\n0 faults" in run_program("hostile_grammars", "--requests", "24", "--quiet", "10")


def test_a_server_with_little_memory(run_program):
    assert "\n0 faults" in run_program("memory", "--requests", "48", "--after", "8")


def test_damaged_files(run_program):
    assert run_program("corrupt", "--cases", "15").count(" 0 faults") == 4


def test_damaged_targets(run_program):
    assert " 0 bugs" in run_program("damaged_targets", "--int8", "--commands", "1")


def test_kills_at_any_moment(run_program):
    assert "bit by bit" in run_program("kills", "--kills", "4", "--seed", "1")


def test_regenerated_answers_survive_kills(start_command, tmp_path):
    """Killed twice, `regenerate` ends with the file of an uninterrupted run: no row is lost or
    repeated."""
    prompts = [f"def f{i}(x" * (1 + i % 3) + str(i) for i in range(120)]
    source, expected_file, killed = (
        tmp_path / name for name in ("rows.jsonl", "whole.jsonl", "killed.jsonl")
    )
    source.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts))
    options = [
        "data=jsonl",
        f"data.path={source}",
        "decoding.max_new_tokens=24",
        "decoding.max_num_seqs=2",
    ]

    def run(out: Path, kill_after_lines: int | None) -> None:
        process = start_command("infer/main.py", ["regenerate", *options, f"out={out}"])
        while kill_after_lines is not None and process.poll() is None:
            if out.exists() and out.read_bytes().count(b"\n") >= kill_after_lines:
                process.kill()
            time.sleep(0.02)
        process.wait()

    run(expected_file, None)
    assert [json.loads(line)["index"] for line in expected_file.read_text().splitlines()] == list(
        range(120)
    )
    for count in (5, 40):
        run(killed, count)
        assert count <= killed.read_bytes().count(b"\n") < 120
    run(killed, None)
    assert killed.read_text() == expected_file.read_text()


def test_disks_that_fail(run_program):
    command = [
        "unshare",
        "--user",
        "--map-root-user",
        "--mount",
        "mount",
        "-t",
        "tmpfs",
        "tmpfs",
        "/mnt",
    ]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no mount namespace here (unshare --user --mount): no disk can be taken away")
    assert "disk full at the second checkpoint" in run_program(
        "disks", "full", "ngrams", "vanishes", "cache"
    )


def test_random_decoding_options_give_the_baselines_output(run_program, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    monkeypatch.setenv(
        "NUMBA_CACHE_DIR", str(tmp_path)
    )  # what is cached elsewhere checks no bounds
    assert "\n0 faults" in run_program("fuzz_trees", "--count", "200")


def test_int8_decoding_gives_the_baselines_output_without_ties(run_program):
    assert "\n0 faults" in run_program("fuzz_trees", "--int8", "--count", "60")


def test_int8_logits_are_bit_equal(run_program):
    assert "\n0 faults" in run_program("bits", "--positions", "400")


def test_weights_that_move_and_change(run_program):
    assert "\n0 faults" in run_program("moved_weights", "--sequences", "20")


def test_every_mutant_still_matches_the_code(load_program):
    """If code that a mutant changes is renamed, update the list in mutants.py."""
    program = load_program("mutants")
    assert [
        misfit for mutant in program.KNOWN_MUTANTS for misfit in program.find_misfits(mutant)
    ] == []


@pytest.mark.parametrize(
    "name",
    [
        "context leaks at the anchor",
        "the target sees other documents",
        "questions carry loss",
        "the walk goes on behind what was refused",
        "a flipped weight is believed",
    ],
)
def test_known_bugs_are_noticed(load_program, name):
    program = load_program("mutants")
    (mutant,) = [mutant for mutant in program.KNOWN_MUTANTS if mutant[0] == name]
    assert program.find_failing_test(mutant)


def test_memory_stays_flat(run_program, embedded, tmp_path: Path):
    from infer import save_drafter
    from infer.config import DrafterConfig
    from infer.drafters.build import create_drafter

    drafter = create_drafter(DrafterConfig(layers=1, block_size=6), embedded)
    drafter.initialize(embedded, torch.Generator().manual_seed(0), warm_start=True)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "drafter")
    sizes = (
        "--minutes",
        "0.7",
        "--margin",
        "0.3",
        "--parts",
        "serve",
    )  # training takes minutes until it is level
    assert "0 requests failed" in run_program(
        "soak", "--checkpoint", str(tmp_path / "drafter"), *sizes
    )


def test_commands_of_readme_and_docs_compose(run_program):
    """Run them all with `--checkpoint runs/.../best`; that takes minutes."""
    assert "; 0 faults" in run_program("docs_commands")
