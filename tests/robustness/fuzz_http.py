"""Fuzzes the server over real sockets, in one process: hostile requests among well-formed ones
whose answers are known.

    python tests/robustness/fuzz_http.py --requests 50000

A small random target and drafter with the embedded tokenizer, with a key.
Fails (exit code 1) on a wrong answer, a 500, an answer that is no HTTP or no JSON, an exception
that the server logs, a task, text, row or connection left over, or memory that has grown by more
than `--margin`.
"""

import argparse
import asyncio
import copy
import gc
import json
import logging
import os
import random
import socket
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from functools import reduce
from operator import getitem
from pathlib import Path

import torch
import uvicorn
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import Engine, generate
from infer.config import DrafterConfig, EngineConfig
from infer.drafters.base import new_drafter
from infer.serving.config import ServerConfig
from infer.serving.guard import network
from infer.serving.protocol import ChatRequest, PromptRequest
from infer.serving.server import create_app
from infer.targets.loading import load_tokenizer
from infer.targets.target import Target

KEY = "a-key-of-the-fuzzer"
PATHS = ["/v1/completions", "/v1/chat/completions"]
FIELDS = [*PromptRequest.model_fields, *ChatRequest.model_fields, "__class__", "_target_"]
DEEP: list = []
for _ in range(300):
    DEEP = [DEEP]
VALUES = [
    *(
        None,
        True,
        False,
        -1,
        0,
        17,
        2**63,
        2**64,
        10**400,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
    ),
    *(
        "",
        "a",
        "\0",
        "\ud800",
        "é" * 50,
        "\U0001f600",
        "a" * 5000,
        "\r\n\r\n",
        "@HUGE@",
        "${oc.env:HOME}",
        "{{7*7}}",
    ),
    *(
        [],
        [[]],
        DEEP,
        [None],
        [True],
        [1.5],
        [2**70],
        [-1],
        [1] * 500,
        ["a"] * 50,
        ["\ud800"],
        [""],
        [[1], [2, 3]],
    ),
    *({}, {"a": {}}, {"include_usage": 1}, {"\ud800": "\ud800"}),
    *(
        [{"role": "user"}],
        [{"role": "user", "content": "x"}] * 40,
        [{"role": "{{", "content": "\ud800"}],
    ),
    *([{"role": "user", "content": [{"type": "text", "text": "x"}]}], [{"role": 1, "content": []}]),
]
FUNCTION = {
    "name": "look",
    "description": "x",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}, "index": 0}
# A request of each kind, whose parts are all there.
WHOLE = {
    PATHS[0]: {"prompt": "x", "max_tokens": 1},
    PATHS[1]: {
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": "y", "reasoning_content": "z", "tool_calls": [CALL]},
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
    },
}
OF_TYPES = [None, True, -1, float("inf"), "\ud800", [None], {}, DEEP]
ALLOWED = {200, 400, 401, 403, 404, 405, 408, 413, 429, 431, 499, 501, 503}


def places(body: object, place: tuple = ()) -> Iterator[tuple]:
    """Yield where the values of a request stand, those within others too."""
    inside = (
        body.items()
        if isinstance(body, dict)
        else enumerate(body)
        if isinstance(body, list)
        else ()
    )
    for key, value in inside:
        yield (*place, key)
        yield from places(value, (*place, key))


def with_wrong_values() -> Iterator[tuple[str, tuple, object, dict]]:
    """Yield (path, place, value, body): at every field of requests, and of their parts, a value of
    every type."""
    for path, model in zip(PATHS, (PromptRequest, ChatRequest), strict=True):
        fields = [(name,) for name in model.model_fields if name not in WHOLE[path]]
        for place in [*fields, *places(WHOLE[path])]:
            for value in OF_TYPES:
                body = copy.deepcopy(WHOLE[path])
                part = reduce(getitem, place[:-1], body)
                part[place[-1]] = value
                yield path, place, value, body


SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
SIZES |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": None,
}


def small(**sizes: object) -> tuple[Target, object]:
    """A random target of two layers with the embedded tokenizer, and a drafter for it."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("embedded")
    room = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    target = Target(Qwen3ForCausalLM(Qwen3Config(**SIZES | room | sizes)), tokenizer, "small")
    drafter = new_drafter(
        DrafterConfig(layers=1, block_size=4, mask_token_id=1, target_layer_ids=[0, 1]), target
    )
    drafter.init_weights(torch.Generator().manual_seed(0))
    return target, drafter.eval().requires_grad_(False)


def known(target: Target, dice: random.Random, count: int) -> list[tuple[str, dict, str]]:
    """Well-formed requests with what the target alone answers: (path, body, text)."""
    found = []
    for _ in range(count):
        words = (
            "".join(dice.choice("def import self.(x)\n ") for _ in range(dice.randrange(1, 12)))
            or "x"
        )
        body = {"max_tokens": dice.randrange(1, 12)}
        options = {"max_new_tokens": body["max_tokens"], "method": "plain"}
        if dice.random() < 0.5:
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": dice.randrange(1000)}
            options |= {"temperature": 0.8, "top_p": 0.9, "seed": body["seed"]}
        else:
            body["temperature"] = 0
        if dice.random() < 0.4:
            messages = [{"role": "user", "content": words}]
            found.append(
                (
                    PATHS[1],
                    body | {"messages": messages},
                    generate(target, None, messages, **options).text,
                )
            )
        else:
            found.append(
                (PATHS[0], body | {"prompt": words}, generate(target, None, words, **options).text)
            )
    return found


def dumps(body: object, dice: random.Random) -> bytes:
    text = json.dumps(body, ensure_ascii=dice.random() < 0.7).replace('"@HUGE@"', "9" * 5000)
    return text.encode(errors="surrogatepass")


def request(
    path: str, content: bytes, *headers: str, method: str = "POST", key: str = KEY
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: here", f"content-length: {len(content)}"]
    lines += [f"authorization: Bearer {key}", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode(errors="surrogateescape") + b"\r\n\r\n" + content


def mutated(content: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, cut out, doubled or put in."""
    out = bytearray(content)
    for _ in range(dice.randrange(1, 5)):
        at = dice.randrange(len(out) + 1)
        kind = dice.randrange(4)
        if kind == 0 and at < len(out):
            out[at] ^= 1 << dice.randrange(8)
        elif kind == 1:
            del out[at : at + dice.randrange(1, 20)]
        elif kind == 2:
            out[at:at] = out[at : at + dice.randrange(1, 20)]
        else:
            out[at:at] = dice.randbytes(dice.randrange(1, 8))
    return bytes(out)


class Client:
    """One connection after the other, and what came of its requests."""

    def __init__(
        self, port: int, cases: list[tuple[str, dict, str]], seed: int, seen: Counter
    ) -> None:
        self.port = port
        self.cases = cases
        self.dice = random.Random(seed)
        self.seen = seen
        self.reader = self.writer = None
        self.faults: list[str] = []

    async def connect(self) -> None:
        if self.writer is None or self.writer.is_closing() or self.reader.at_eof():
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    def hang_up(self) -> None:
        """Closes without a goodbye: the server sees a reset, and no port of ours waits."""
        if self.writer is not None:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
            self.writer.transport.abort()
        self.writer = None

    async def answer(self) -> tuple[int, bytes]:
        """The next response on the connection: status and body. (0, b"") where it was closed
        instead."""
        try:
            head = await self.reader.readuntil(b"\r\n\r\n")
            status = int(head.split()[1])
            if status == 100:
                return await self.answer()
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:-2])
            body = b""
            if fields.get(b"transfer-encoding") == b"chunked":
                while size := int(await self.reader.readline(), 16):
                    body += (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
            else:
                body = await self.reader.readexactly(int(fields.get(b"content-length", 0)))
            if fields.get(b"connection") == b"close":
                self.hang_up()
            return status, body
        except (asyncio.IncompleteReadError, ConnectionError):
            self.hang_up()
            return 0, b""

    async def send(self, content: bytes) -> None:
        await self.connect()
        self.writer.write(content)
        with suppress(ConnectionError):
            await self.writer.drain()

    def judge(self, kind: str, status: int, body: bytes, sent: bytes) -> None:
        """Counts an answer, and notes what must not be."""
        self.seen[kind, status] += 1
        wrong = status and status not in ALLOWED
        if status >= 400 and body.startswith(b"{"):
            wrong = wrong or not json.loads(body)["error"]["message"]
        if wrong or b"Traceback" in body:
            self.faults.append(f"{kind}: {status} {body[:200]!r} after {sent[:300]!r}")

    async def good(self) -> None:
        path, body, text = self.dice.choice(self.cases)
        stream = self.dice.random() < 0.5
        sent = request(path, dumps(body | {"stream": stream}, self.dice))
        for _ in range(3):  # a kept connection may be closed by the server just now
            await self.send(sent)
            status, got = await self.answer()
            if status:
                break
        self.judge("well-formed", status, got, sent)
        if status == 429:
            return
        if self.told(path, got, stream) != text:
            self.faults.append(
                f"wrong answer: {self.told(path, got, stream)!r} instead of {text!r} for {body}"
            )

    def told(self, path: str, got: bytes, stream: bool) -> str:
        chunks = [got]
        if stream:
            chunks = [line[6:] for line in got.split(b"\n\n") if line.startswith(b"data: {")]
        text = ""
        try:
            for chunk in chunks:
                for choice in json.loads(chunk)["choices"]:
                    said = choice.get("delta") or choice.get("message") or {}
                    text += choice["text"] if path == PATHS[0] else said.get("content", "")
        except (ValueError, KeyError):
            return f"no answer: {got[:200]!r}"
        return text

    async def leaving(self) -> None:
        path, body, _ = self.dice.choice(self.cases)
        await self.send(
            request(
                path,
                dumps(body | {"stream": self.dice.random() < 0.5, "max_tokens": 40}, self.dice),
            )
        )
        if self.dice.random() < 0.5:
            await asyncio.sleep(self.dice.random() * 0.02)
        self.hang_up()
        self.seen["left while it is written", 0] += 1

    async def field(self) -> None:
        path, body, _ = self.dice.choice(self.cases)
        body = dict(body)
        for _ in range(self.dice.choice([1, 1, 1, 2, 3])):
            body[self.dice.choice(FIELDS)] = self.dice.choice(VALUES)
        if self.dice.random() < 0.1:
            body["\ud800" if self.dice.random() < 0.5 else "k" * 3000] = 1
        await self.one("hostile field", request(path, dumps(body, self.dice)))

    async def json(self) -> None:
        path, body, _ = self.dice.choice(self.cases)
        content = mutated(dumps(body, self.dice), self.dice)
        if self.dice.random() < 0.3:
            some = [
                b"",
                b"[" * 5000,
                b"{" * 5000,
                b"null",
                b"1e999",
                b"\xff\xfe{",
                b'"',
                b'{"a":' * 900,
                b"9" * 9000,
            ]
            content = self.dice.choice(some)
        await self.one("broken JSON", request(path, content))

    async def one(self, kind: str, sent: bytes) -> None:
        await self.send(sent)
        status, got = await self.answer()
        self.judge(kind, status, got, sent)

    async def kind(self) -> None:
        path, body, _ = self.dice.choice(self.cases)
        types = [
            "text/plain",
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-16",
            "",
            "é",
        ]
        sent = request(path, dumps(body, self.dice))
        name = self.dice.choice(types).encode("latin1")
        await self.one(
            "content type",
            sent.replace(b"content-type: application/json", b"content-type: " + name),
        )

    async def key(self) -> None:
        path, body, _ = self.dice.choice(self.cases)
        wrong = self.dice.choice(["", KEY[:-1], KEY + "x", KEY.upper(), "é", "a" * 4000])
        sent = request(path, dumps(body, self.dice), key=wrong)
        await self.send(sent)
        status, got = await self.answer()
        self.judge("wrong key", status, got, sent)
        if status not in (0, 400, 401):
            self.faults.append(f"let in without the key: {status} {got[:100]!r}")

    async def large(self) -> None:
        path = self.dice.choice(PATHS)
        size = self.dice.choice([20_001, 40_000, 200_000])
        if self.dice.random() < 0.5:
            await self.one("oversized", request(path, b'{"prompt": "' + b"x" * size + b'"}'))
        else:
            head = request(path, b"").replace(b"content-length: 0", b"transfer-encoding: chunked")
            await self.one(
                "oversized",
                head
                + b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(size // 1024))
                + b"0\r\n\r\n",
            )
        self.hang_up()

    async def announced(self) -> None:
        """A size that is said and whose bytes never come: it is answered, and the connection is
        closed."""
        path, _, _ = self.dice.choice(self.cases)
        size = self.dice.choice([20_001, 2**31, 2**63, 2**64 - 1, 10**19, 10**25])
        head = request(path, b"")
        if self.dice.random() < 0.5:
            sent = head.replace(b"content-length: 0", b"content-length: %d" % size)
        else:
            sent = head.replace(b"content-length: 0", b"transfer-encoding: chunked")
            sent += b"1;x\r\n{\r\n" * self.dice.choice([0, 1, 20_000]) + b"%x\r\n" % size
        await self.send(sent)
        status, got = await self.answer()
        self.judge("announced", status, got, sent)
        if status not in (0, 400, 413) or self.writer is not None:
            self.faults.append(
                f"announced: {status}, and the connection is open, after {sent[:300]!r}"
            )


KINDS = {
    Client.good: 15,
    Client.leaving: 4,
    Client.field: 26,
    Client.json: 16,
    Client.kind: 6,
    Client.key: 6,
    Client.large: 2,
    Client.announced: 2,
}


class Faults(logging.Handler):
    """What the server logs as an error: exceptions that it did not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record)[-1500:])


def resident() -> float:
    """Megabytes of this process in memory, garbage collected."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


async def settled(service, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not (service.inside or service.engine.busy or service.worker.open):
            return True
        await asyncio.sleep(0.05)
    return False


async def fuzz(requests: int, clients: int, seed: int, margin: float) -> list[str]:
    """Runs it all; returns what went wrong."""
    target, drafter = small()
    cases = known(target, random.Random(seed), 60)
    engine = Engine(target, drafter, EngineConfig("ddtree", 6, max_num_seqs=8), 64)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ServerConfig(port=port, max_requests=150, max_body_bytes=20_000)
    app = create_app(engine, options)
    server = uvicorn.Server(network(app, options))
    service = app.state.service
    logs = Faults()
    logging.getLogger().addHandler(logs)
    logging.getLogger("uvicorn").addHandler(logs)
    logging.getLogger("uvicorn.error").setLevel(logging.ERROR)
    loop_faults: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda _, context: loop_faults.append(str(context))
    )
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    seen: Counter = Counter()
    everyone = [Client(port, cases, seed + i, seen) for i in range(clients)]
    names = list(KINDS)
    left = requests

    async def run(client: Client) -> None:
        nonlocal left
        while left > 0 and len(client.faults) < 5:
            left -= 1
            (what,) = client.dice.choices(names, KINDS.values())
            await asyncio.wait_for(what(client), 60)

    tasks_before = len(asyncio.all_tasks())
    memory = []
    begun = time.monotonic()
    for share in (0.1, 0.3, 0.3, 0.3):  # the first tenth warms up
        left = int(requests * share)
        await asyncio.gather(*(run(client) for client in everyone))
        for client in everyone:
            client.hang_up()
        faults = [] if await settled(service) else ["texts are left in work"]
        await asyncio.sleep(0.3)
        memory.append(resident())
        print(f"{sum(seen.values())} answers, {memory[-1]:.0f} MB", flush=True)
    ended = time.monotonic() + 10  # by then every kept connection is closed
    while server.server_state.connections and time.monotonic() < ended:
        await asyncio.sleep(0.1)
    faults += (
        [fault for client in everyone for fault in client.faults] + logs.messages + loop_faults
    )
    if engine.runner.memory.cache.lengths or engine.scheduler.waiting or engine.scheduler.writing:
        faults.append("the engine still holds rows")
    if (
        server.server_state.connections
        or server.server_state.tasks
        or len(asyncio.all_tasks()) > tasks_before
    ):
        faults.append(
            f"left over: {len(server.server_state.connections)} connections, {asyncio.all_tasks()}"
        )
    if not service.worker.is_alive():
        faults.append("the engine's thread is dead")
    if memory[-1] - memory[0] > margin:
        faults.append(
            f"memory has grown from {memory[0]:.0f} to {memory[-1]:.0f} MB, by more than {margin:.0f}"
        )
    server.should_exit = True
    await serving
    for kind in sorted({kind for kind, _ in seen}):
        counts = {status: count for (name, status), count in sorted(seen.items()) if name == kind}
        shown = ", ".join(f"{status or 'none'} {count}" for status, count in counts.items())
        print(f"{kind:<28}{shown}")
    took = time.monotonic() - begun
    print(
        f"{sum(seen.values())} answers to {requests} requests by {clients} clients in {took:.0f} s"
    )
    print(
        f"memory {memory[0]:.0f} MB after a tenth, {memory[-1]:.0f} MB at the end (margin {margin:.0f})"
    )
    print(f"{len(faults)} faults")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=50_000)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--margin", type=float, default=40.0, help="megabytes that memory may grow by"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.environ["BLOCKDRAFT_API_KEY"] = KEY
    faults = asyncio.run(fuzz(args.requests, args.clients, args.seed, args.margin))
    for fault in faults[:20]:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if faults else 0)


if __name__ == "__main__":
    main()
