"""Check that memory does not grow: training with evaluations, and serving under load.

    python tests/robustness/soak.py --checkpoint runs/embedded-dflash/checkpoints/best [--minutes
    30] [--parts train]

Each runs for half an hour, as a process of the project's own commands: the default training
configuration with an evaluation every `--steps-between` steps, and a server whose clients stream,
wait, or disconnect early. Resident memory is read once a second. Prints its median in each
tenth of the time, and the growth from the third tenth (when everything has happened at least once)
to the last; the exit code is 1 if that is above `--margin` (5 percent), if training does not stop
correctly, or if the server gives two different answers to one prompt.
"""

import argparse
import http.client
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from server import SERVER_REPOSITORY, read_memory_mib, run_server

from data.corpus import read_stdlib_documents


def sample_memory(process: subprocess.Popen, minutes: float) -> list[float]:
    """Return the resident memory in MiB, once a second, for `minutes` or until the process ends."""
    samples = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and process.poll() is None:
        samples.append(read_memory_mib(process.pid))
        time.sleep(1)
    return samples


def print_growth(name: str, samples: list[float], description: str, margin: float) -> bool:
    """Print the median of each tenth; return whether the growth is below `margin`."""
    tenths = [samples[len(samples) * i // 10 : len(samples) * (i + 1) // 10] for i in range(10)]
    medians = [statistics.median(tenth) for tenth in tenths]
    growth = medians[-1] / medians[2] - 1
    print(f"{name}: {description}")
    print("  resident MB, median of each tenth: " + " ".join(f"{median:.0f}" for median in medians))
    print(f"  from the third to the last: {growth:+.1%}", flush=True)
    return growth < margin


def soak_training(minutes: float, steps_between: int, margin: float) -> bool:
    """Train with many evaluations until SIGTERM; return whether memory did not grow."""
    unreachable_steps = 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            SERVER_REPOSITORY / "train" / "main.py",
            f"runs_dir={folder}",
            "name=soak",
        ]
        command += [
            f"optim.steps={unreachable_steps}",
            f"checkpoints={unreachable_steps // steps_between}",
            "evaluation.prompts=4",
        ]
        command += ["evaluation.max_new_tokens=32", "evaluation.budgets=[16,64]"]
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            samples = sample_memory(process, minutes)
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        steps = len((Path(folder) / "soak" / "metrics.jsonl").read_text().splitlines())
        evaluations = len(list((Path(folder) / "soak").rglob("evaluation.json")))
        is_flat = print_growth(
            "training",
            samples,
            f"{steps} steps, {evaluations} evaluations, exit code {code}",
            margin,
        )
        if code != 0:
            print((Path(folder) / "log").read_text()[-2000:])
        return is_flat and code == 0


class Clients:
    """Clients of one server until `stop` is set. All answers to one prompt must be equal."""

    def __init__(self, port: int, prompts: list[str]) -> None:
        self.port = port
        self.prompts = prompts
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.answers: dict[tuple[str, int], str] = {}
        self.answered = self.aborted = self.contradictions = self.failed = 0

    def run(self, seed: int) -> None:
        random_numbers = random.Random(seed)
        while not self.stop.is_set():
            prompt = random_numbers.choice(self.prompts)
            tokens = random_numbers.choice([4, 16, 48])
            stream = random_numbers.random() < 0.5
            aborts = random_numbers.random() < 0.2
            body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0}
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                if aborts:
                    time.sleep(random_numbers.random() / 5)
                    text = None
                else:
                    text = self.read_text(connection.getresponse(), stream)
                self.record_answer((prompt, tokens), text)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                if not self.stop.is_set():
                    with self.lock:
                        self.failed += 1
            finally:
                connection.close()

    def read_text(self, response: http.client.HTTPResponse, stream: bool) -> str:
        if not stream:
            return json.loads(response.read())["choices"][0]["text"]
        lines = [line.decode().removeprefix("data: ").strip() for line in response]
        pieces = [json.loads(line) for line in lines if line.startswith("{")]
        return "".join(choice["text"] for piece in pieces for choice in piece["choices"])

    def record_answer(self, request_key: tuple[str, int], text: str | None) -> None:
        with self.lock:
            if text is None:
                self.aborted += 1
            else:
                self.answered += 1
                self.contradictions += self.answers.setdefault(request_key, text) != text


def soak_server(minutes: float, checkpoint: str, margin: float) -> bool:
    """Run a server with twelve clients on eight rows; return whether memory did not grow."""
    texts = (document.text for document in read_stdlib_documents("held_out"))
    prompts = [text[: 100 + 20 * i] for i, text in enumerate(texts) if len(text) > 4000][:40]
    settings = [
        f"checkpoint={checkpoint}",
        "decoding.max_num_seqs=8",
        "decoding.budget=16",
        "target.dtype=float32",
    ]
    with run_server(*settings) as (url, process):
        clients = Clients(int(url.rpartition(":")[2]), prompts)
        threads = [
            threading.Thread(target=clients.run, args=(seed,), daemon=True) for seed in range(12)
        ]
        for thread in threads:
            thread.start()
        samples = sample_memory(process, minutes)
        clients.stop.set()
        for thread in threads:
            thread.join()
    description = f"{clients.answered} answers, {clients.aborted} clients left early, "
    description += f"{clients.failed} requests failed"
    description += (
        f", {clients.contradictions} answers differ from an earlier one to the same prompt"
    )
    is_flat = print_growth("serving", samples, description, margin)
    return is_flat and not clients.contradictions and not clients.failed


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--checkpoint", help="a drafter for the embedded target, to serve")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument(
        "--parts", nargs="+", choices=["train", "serve"], default=["train", "serve"]
    )
    parser.add_argument("--steps-between", type=int, default=50)
    parser.add_argument(
        "--margin", type=float, default=0.05, help="allowed growth; short runs need more"
    )
    args = parser.parse_args()
    if "serve" in args.parts and not args.checkpoint:
        parser.error("serving needs --checkpoint")
    os.environ["PYTHONPATH"] = str(SERVER_REPOSITORY)
    is_flat = True
    if "train" in args.parts:
        is_flat &= soak_training(args.minutes, args.steps_between, args.margin)
    if "serve" in args.parts:
        is_flat &= soak_server(args.minutes, args.checkpoint, args.margin)
    raise SystemExit(not is_flat)


if __name__ == "__main__":
    main()
