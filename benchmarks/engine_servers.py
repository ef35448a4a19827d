"""Measure what a drafter gains in running engines: `eval url=` for every server of a list.

    PYTHONPATH=. python benchmarks/engine_servers.py benchmarks/engine_servers.yaml \
        --work <folder> --suites <folder> --questions 8 [--only REGEX] [--list]

The list has groups of one engine and one format of weights. A group has a command that starts the
engine, to which the options of each server with drafts, or those of the baseline without drafts,
are appended. For each server the script starts baseline and server, sends the same questions to
both (`./launch.sh eval url=... baseline=...`, one request at a time, greedy), and stops them.
`{port}`, `{work}` and `{python}` in commands are replaced; {work} is a folder with the engines and
the converted weights.

A finished server is not measured again, unless its result in <work>/results is deleted. The table
at the end has, over the answers of all question sets: tokens per round; the median tokens per
second of a request of the baseline and of the server; the median of their ratio with its 95 %
interval (bootstrap over answers); and how many answers equal those of the baseline.
"""

import argparse
import os
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import yaml

from infer.evaluation.metrics import compute_median_speedup
from infer.evaluation.results import read_result
from infer.evaluation.served_results import AnswerTiming, ServedResult
from infer.evaluation.tables import format_interval, format_markdown_table

ROOT = Path(__file__).resolve().parent.parent
SERVER_PORT = 8100
BASELINE_PORT = 8101
MAX_START_SECONDS = 300
SERVER_TABLE_COLUMNS = (
    "engine",
    "weights",
    "drafts",
    "τ, tokens per round",
    "baseline, tokens/s",
    "with drafts, tokens/s",
    "speedup [95 % interval]",
    "answers equal to the baseline's",
)


@dataclass(frozen=True)
class ServerCommand:
    """One server of the list, and the baseline that it is compared with."""

    engine: str
    weights: str
    drafts: str
    command: str
    baseline: str

    @property
    def slug(self) -> str:
        """The server's name as part of a file name."""
        name = f"{self.engine} {self.weights} {self.drafts}"
        return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def read_server_list(path: Path) -> list[ServerCommand]:
    """Read the list of servers."""
    content = yaml.safe_load(path.read_text())

    def fill(command: str) -> str:
        for name in ("llama_options", "llama_drafter"):
            command = command.replace(f"{{{name}}}", content[name])
        return command

    servers = []
    for group in content["groups"]:
        start = fill(group["command"])
        for drafts, options in group["servers"].items():
            servers.append(
                ServerCommand(
                    group["engine"],
                    group["weights"],
                    drafts,
                    f"{start} {fill(options)}",
                    f"{start} {group['baseline']}",
                )
            )
    return servers


@contextmanager
def run_server(command: str, port: int, log: Path, work: Path) -> Iterator[None]:
    """Run a server inside the context, which is entered as soon as the server answers."""
    filled = command.format(port=port, work=work, python=sys.executable)
    with log.open("w") as output:
        process = subprocess.Popen(
            shlex.split(filled), stdout=output, stderr=output, start_new_session=True, cwd=ROOT
        )
    try:
        wait_until_ready(process, port, log)
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def wait_until_ready(process: subprocess.Popen, port: int, log: Path) -> None:
    """Wait until the server answers. Raises RuntimeError if it ends or takes too long."""
    deadline = time.monotonic() + MAX_START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            if httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(1)
    raise RuntimeError(f"the server did not start; the end of {log}: {log.read_text()[-2000:]}")


def measure_server(server: ServerCommand, args: argparse.Namespace) -> None:
    """Run `eval url=` for a server and its baseline, unless its result exists."""
    out = args.work / "results" / server.slug
    if (out / "served.json").exists():
        return
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with (
        run_server(server.baseline, BASELINE_PORT, out / "baseline.log", args.work),
        run_server(server.command, SERVER_PORT, out / "server.log", args.work),
    ):
        subprocess.run(
            [
                sys.executable,
                "infer/main.py",
                "eval",
                f"url=http://127.0.0.1:{SERVER_PORT}",
                f"baseline=http://127.0.0.1:{BASELINE_PORT}",
                "suite=files",
                f"suite.folder={args.suites}",
                f"suite.max_questions={args.questions}",
                "suite.temperatures=[0.0]",
                f"evaluation.max_new_tokens={args.tokens}",
                f"out={out}",
            ],
            cwd=ROOT,
            check=True,
            stdout=subprocess.DEVNULL,
        )
    print(f"{server.slug}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)


def list_cells(server: ServerCommand, result: ServedResult) -> list[str]:
    """Return the cells of a server's table row, over the answers of all question sets."""
    answers: list[list[AnswerTiming]] = [[], []]
    accepted = rounds = same = 0
    for each in result.sets:
        assert each.baseline is not None
        answers[0] += each.server.answers
        answers[1] += each.baseline.answers
        same += each.identical_outputs or 0
        if each.server.acceptance is not None:
            accepted += each.server.acceptance.accepted
            rounds += each.server.acceptance.rounds
    speeds = [[answer.tokens / answer.seconds for answer in each] for each in answers]
    speedup, interval = compute_median_speedup(*speeds)
    return [
        server.engine,
        server.weights,
        server.drafts,
        f"{1 + accepted / rounds:.2f}" if rounds else "-",
        f"{statistics.median(speeds[1]):.1f}",
        f"{statistics.median(speeds[0]):.1f}",
        f"{speedup:.2f}{format_interval(interval)}",
        f"{same} of {len(answers[0])}",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("servers", type=Path, help="YAML file with the list of servers")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--suites", type=Path, required=True, help="folder of question sets")
    parser.add_argument("--questions", type=int, default=8, help="questions of each set")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens of each answer")
    parser.add_argument("--only", default="", help="regular expression for names of servers")
    parser.add_argument("--list", action="store_true", help="print the names and end")
    args = parser.parse_args()
    servers = [each for each in read_server_list(args.servers) if re.search(args.only, each.slug)]
    if args.list:
        print("\n".join(each.slug for each in servers))
        return
    rows = []
    for server in servers:
        try:
            measure_server(server, args)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            print(f"{server.slug}: {error}", file=sys.stderr, flush=True)
            continue
        file = args.work / "results" / server.slug / "served.json"
        result = read_result(file, ServedResult)
        if result.interruption:
            print(f"{server.slug}: {result.interruption}", file=sys.stderr)
        rows.append(list_cells(server, result))
    print(format_markdown_table(SERVER_TABLE_COLUMNS, rows))


if __name__ == "__main__":
    main()
