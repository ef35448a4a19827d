"""Whether memory stays flat: training with evaluations, and serving under load, for half an hour
each.

    python tests/robustness/soak.py --checkpoint runs/embedded-dflash/checkpoints/best [--minutes
    30] [--parts train]

Both parts are the project's own commands, run as processes of their own, the default training
configuration with an evaluation every `--steps-between` steps; the server has clients that stream,
wait, and go away in the middle. Resident memory is read once a second. Prints its median in each
tenth of the time, and the growth from the third tenth (when everything has happened at least once)
to the last; the exit code is 1 if that is above `--margin` (5 percent), if training does not stop
as it should, or if the server gives one prompt two answers.
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

from server import ROOT, memory, serving

from data.corpus import stdlib_documents


def watch(process: subprocess.Popen, minutes: float) -> list[float]:
    """Resident memory once a second for so long, or until the process ends."""
    seen = []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end and process.poll() is None:
        seen.append(memory(process.pid))
        time.sleep(1)
    return seen


def report(name: str, seen: list[float], done: str, margin: float) -> bool:
    """Prints the tenths; whether memory was flat."""
    tenths = [seen[len(seen) * i // 10 : len(seen) * (i + 1) // 10] for i in range(10)]
    medians = [statistics.median(tenth) for tenth in tenths]
    growth = medians[-1] / medians[2] - 1
    print(f"{name}: {done}")
    print("  resident MB, median of each tenth: " + " ".join(f"{median:.0f}" for median in medians))
    print(f"  from the third to the last: {growth:+.1%}", flush=True)
    return growth < margin


def train(minutes: float, between: int, margin: float) -> bool:
    """Training with many evaluations, ended by SIGTERM."""
    most = 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, ROOT / "train" / "main.py", f"runs_dir={folder}", "name=soak"]
        command += [f"optim.steps={most}", f"checkpoints={most // between}", "evaluation.prompts=4"]
        command += ["evaluation.max_new_tokens=32", "evaluation.budgets=[16,64]"]
        with open(Path(folder) / "log", "w") as log:
            process = subprocess.Popen(command, stdout=log, stderr=log)
            seen = watch(process, minutes)
            process.send_signal(signal.SIGTERM)
            code = process.wait()
        steps = len((Path(folder) / "soak" / "metrics.jsonl").read_text().splitlines())
        evaluations = len(list((Path(folder) / "soak").rglob("evaluation.json")))
        flat = report(
            "training", seen, f"{steps} steps, {evaluations} evaluations, exit code {code}", margin
        )
        if code != 0:
            print((Path(folder) / "log").read_text()[-2000:])
        return flat and code == 0


class Clients:
    """Clients of one server, until `stop` is set. The answers to one prompt must all be the
    same."""

    def __init__(self, port: int, prompts: list[str]) -> None:
        self.port = port
        self.prompts = prompts
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.answers: dict[tuple[str, int], str] = {}
        self.whole = self.left = self.wrong = self.failed = 0

    def run(self, seed: int) -> None:
        choose = random.Random(seed)
        while not self.stop.is_set():
            prompt = choose.choice(self.prompts)
            tokens = choose.choice([4, 16, 48])
            stream = choose.random() < 0.5
            leave = choose.random() < 0.2
            body = {"prompt": prompt, "max_tokens": tokens, "stream": stream, "temperature": 0}
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
            try:
                connection.request(
                    "POST",
                    "/v1/completions",
                    json.dumps(body),
                    {"Content-Type": "application/json"},
                )
                if leave:
                    time.sleep(choose.random() / 5)
                    text = None
                else:
                    text = self.read(connection.getresponse(), stream)
                self.note((prompt, tokens), text)
            except (OSError, http.client.HTTPException, ValueError, KeyError):
                if not self.stop.is_set():
                    with self.lock:
                        self.failed += 1
            finally:
                connection.close()

    def read(self, response: http.client.HTTPResponse, stream: bool) -> str:
        if not stream:
            return json.loads(response.read())["choices"][0]["text"]
        lines = [line.decode().removeprefix("data: ").strip() for line in response]
        pieces = [json.loads(line) for line in lines if line.startswith("{")]
        return "".join(choice["text"] for piece in pieces for choice in piece["choices"])

    def note(self, asked: tuple[str, int], text: str | None) -> None:
        with self.lock:
            if text is None:
                self.left += 1
            else:
                self.whole += 1
                self.wrong += self.answers.setdefault(asked, text) != text


def serve(minutes: float, checkpoint: str, margin: float) -> bool:
    """A server with twelve clients on eight rows."""
    texts = (document.text for document in stdlib_documents("held_out"))
    prompts = [text[: 100 + 20 * i] for i, text in enumerate(texts) if len(text) > 4000][:40]
    settings = [
        f"checkpoint={checkpoint}",
        "decoding.max_num_seqs=8",
        "decoding.budget=16",
        "target.dtype=float32",
    ]
    with serving(*settings) as (url, process):
        clients = Clients(int(url.rpartition(":")[2]), prompts)
        threads = [
            threading.Thread(target=clients.run, args=(seed,), daemon=True) for seed in range(12)
        ]
        for thread in threads:
            thread.start()
        seen = watch(process, minutes)
        clients.stop.set()
        for thread in threads:
            thread.join()
    done = f"{clients.whole} answers, {clients.left} clients left early, {clients.failed} requests failed"
    done += f", {clients.wrong} answers differ from an earlier one to the same prompt"
    flat = report("serving", seen, done, margin)
    return flat and not clients.wrong and not clients.failed


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
        "--margin", type=float, default=0.05, help="growth that is still flat; short runs need more"
    )
    args = parser.parse_args()
    if "serve" in args.parts and not args.checkpoint:
        parser.error("serving needs --checkpoint")
    os.environ["PYTHONPATH"] = str(ROOT)
    flat = True
    if "train" in args.parts:
        flat &= train(args.minutes, args.steps_between, args.margin)
    if "serve" in args.parts:
        flat &= serve(args.minutes, args.checkpoint, args.margin)
    raise SystemExit(not flat)


if __name__ == "__main__":
    main()
