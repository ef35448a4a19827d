# ruff: noqa: E402
"""Sampled answers are the same file whoever writes them, however often they are killed.

    python tests/robustness/answers.py --prompts 400 --kills 6

`regenerate` answers prompts of one length at temperature 1: at one go; again in other batches; killed with `kill -9` at
random moments and begun again; and through three servers, each of which answers a third of the rows. Exit code 1 if a
file differs.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])  # or this file's folder would be searched first
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from infer import Engine, load_target
from infer.config import DecodeOptions, EngineConfig
from infer.serving.clients import by_server
from infer.serving.config import ServerConfig
from infer.serving.dialogue import Row
from infer.serving.regenerate import by_engine, regenerate
from infer.serving.server import Server, create_app, network

TOKENS = 12  # of a prompt
SAMPLED = DecodeOptions(max_new_tokens=8, temperature=1.0, seed=3, method="plain", rows=32)
CAPACITY = TOKENS + SAMPLED.max_new_tokens


def one_length(target, count: int) -> list[Row]:
    """Different prompts of TOKENS tokens, which survive decoding and encoding."""
    dice, found = random.Random(0), {}
    while len(found) < count:
        text = f"def f{dice.randrange(10**6)}(x, y={dice.randrange(100)}):\n    return x"
        prompt = target.tokenizer.decode(target.tokenizer(text)["input_ids"][:TOKENS])
        if len(target.tokenizer(prompt)["input_ids"]) == TOKENS:
            found[prompt] = None
    return [Row(index, prompt) for index, prompt in enumerate(found)]


def killed(target, rows: list[Row], out: Path, kills: int) -> None:
    """Write the answers in child processes that are killed behind random numbers of lines, and to the end then."""
    dice = random.Random(1)
    for kill in range(kills + 1):
        child = os.fork()
        if not child:
            regenerate(rows, by_engine(target, None, SAMPLED, CAPACITY), out, {}, 0)
            os._exit(0)
        lines = len(rows) + 1 if kill == kills else (kill + dice.random()) * len(rows) / (kills + 1)
        while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            if out.exists() and out.read_bytes().count(b"\n") >= lines:
                os.kill(child, signal.SIGKILL)
                break
            time.sleep(0.002)
        _, status = os.waitpid(child, 0)
        print(f"  {'killed' if status else 'ended'} behind {out.read_bytes().count(bytes([10]))} lines", flush=True)


def by_three_servers(target, rows: list[Row], out: Path) -> None:
    """Each server has its own engine, with its own number of rows."""
    for first in range(3):
        engine, bound = Engine(target, None, EngineConfig("plain", rows=5 + 7 * first), CAPACITY), threading.Event()
        app = create_app(engine, ServerConfig(port=1))
        config = network(app, ServerConfig(port=1))
        config.port = 0
        server = Server(config, app.state.service, bound.set)
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        bound.wait()
        url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
        regenerate(rows[first::3], by_server(url, SAMPLED, 16), out.with_suffix(f".{first}"), {}, 0)
        server.should_exit = True
        thread.join()
    parts = [out.with_suffix(f".{first}").read_text().splitlines(keepends=True) for first in range(3)]
    out.write_text("".join(sorted(sum(parts, []), key=lambda line: json.loads(line)["index"])))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=400)
    parser.add_argument("--kills", type=int, default=6)
    options = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target("embedded")
    rows, digests = one_length(target, options.prompts), set()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        regenerate(rows, by_engine(target, None, SAMPLED, CAPACITY), out / "once", {}, 0)
        regenerate(rows, by_engine(target, None, replace(SAMPLED, rows=7), CAPACITY), out / "again", {}, 0)
        killed(target, rows, out / "killed", options.kills)
        by_three_servers(target, rows, out / "served")
        for name in ("once", "again", "killed", "served"):
            content = (out / name).read_bytes()
            digest = hashlib.sha256(content).hexdigest()
            digests.add(digest)
            answers = len({json.loads(line)["response"] for line in content.splitlines()})
            print(f"{name:<8}{content.count(bytes([10]))} rows, {answers} different answers, {digest[:12]}")
    print("one file" if len(digests) == 1 else f"{len(digests)} different files")
    return len(digests) > 1


if __name__ == "__main__":
    sys.exit(main())
