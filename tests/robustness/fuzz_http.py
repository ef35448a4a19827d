"""Fuzz the server over real sockets, in one process, with hostile and well-formed requests.

    python tests/robustness/fuzz_http.py --requests 50000

It serves a small random target and drafter with the embedded tokenizer, and needs an API key. The
answers to well-formed requests are known. Fails (exit code 1) on a wrong answer, a 500, an answer
that is not HTTP or JSON, an exception that the server logs, a task, sequence, row or connection
left over, or memory that has grown by more than `--margin`.
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
from infer.drafters.build import create_drafter
from infer.serving.config import ServerConfig
from infer.serving.guard import build_uvicorn_config
from infer.serving.protocol import ChatRequest, PromptRequest
from infer.serving.server import create_app
from infer.targets.loading import load_tokenizer
from infer.targets.target import Target

FUZZ_API_KEY = "a-key-of-the-fuzzer"
COMPLETION_PATHS = ["/v1/completions", "/v1/chat/completions"]
REQUEST_FIELDS = [*PromptRequest.model_fields, *ChatRequest.model_fields, "__class__", "_target_"]
DEEPLY_NESTED_LIST: list = []
for _ in range(300):
    DEEPLY_NESTED_LIST = [DEEPLY_NESTED_LIST]
HOSTILE_VALUES = [
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
        DEEPLY_NESTED_LIST,
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
TOOL_FUNCTION = {
    "name": "look",
    "description": "x",
    "parameters": {"type": "object", "properties": {}},
    "strict": True,
}
EXAMPLE_TOOL_CALL = {
    "id": "1",
    "type": "function",
    "function": {"name": "look", "arguments": "{}"},
    "index": 0,
}
# A request of each kind that has all fields.
COMPLETE_REQUESTS = {
    COMPLETION_PATHS[0]: {"prompt": "x", "max_tokens": 1},
    COMPLETION_PATHS[1]: {
        "max_tokens": 1,
        "stream": True,
        "stream_options": {"include_usage": True, "include_obfuscation": False},
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {
                "role": "assistant",
                "content": "y",
                "reasoning_content": "z",
                "tool_calls": [EXAMPLE_TOOL_CALL],
            },
            {"role": "tool", "content": "y", "tool_call_id": "1"},
        ],
        "tools": [{"type": "function", "function": TOOL_FUNCTION}],
        "tool_choice": {"type": "function", "function": {"name": "look"}},
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "object"}},
        },
    },
}
VALUES_OF_ALL_TYPES = [None, True, -1, float("inf"), "\ud800", [None], {}, DEEPLY_NESTED_LIST]
ALLOWED_STATUSES = {200, 400, 401, 403, 404, 405, 408, 413, 429, 431, 499, 501, 503}


def find_value_paths(body: object, value_path: tuple = ()) -> Iterator[tuple]:
    """Yield the path (keys and indices) of every value in a request, nested ones included."""
    inside = (
        body.items()
        if isinstance(body, dict)
        else enumerate(body)
        if isinstance(body, list)
        else ()
    )
    for key, value in inside:
        yield (*value_path, key)
        yield from find_value_paths(value, (*value_path, key))


def generate_wrong_values() -> Iterator[tuple[str, tuple, object, dict]]:
    """Yield (URL path, value path, value, body) with a value of each type in each field."""
    for path, model in zip(COMPLETION_PATHS, (PromptRequest, ChatRequest), strict=True):
        fields = [(name,) for name in model.model_fields if name not in COMPLETE_REQUESTS[path]]
        for value_path in [*fields, *find_value_paths(COMPLETE_REQUESTS[path])]:
            for value in VALUES_OF_ALL_TYPES:
                body = copy.deepcopy(COMPLETE_REQUESTS[path])
                container = reduce(getitem, value_path[:-1], body)
                container[value_path[-1]] = value
                yield path, value_path, value, body


SMALL_MODEL_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "initializer_range": 0.3,
}
SMALL_MODEL_SIZES |= {
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "eos_token_id": None,
    "bos_token_id": None,
}


def build_small_models(**sizes: object) -> tuple[Target, object]:
    """Return a random target of two layers with the embedded tokenizer, and a drafter for it."""
    torch.manual_seed(0)
    tokenizer = load_tokenizer("embedded")
    vocabulary_and_length = {"vocab_size": len(tokenizer), "max_position_embeddings": 128}
    target = Target(
        Qwen3ForCausalLM(Qwen3Config(**SMALL_MODEL_SIZES | vocabulary_and_length | sizes)),
        tokenizer,
        "small",
    )
    drafter = create_drafter(
        DrafterConfig(layers=1, block_size=4, mask_token_id=1, target_layer_ids=[0, 1]), target
    )
    drafter.init_weights(torch.Generator().manual_seed(0))
    return target, drafter.eval().requires_grad_(False)


def build_known_requests(
    target: Target, random_numbers: random.Random, count: int
) -> list[tuple[str, dict, str]]:
    """Return well-formed requests as (path, body, text of the baseline's answer)."""
    requests = []
    for _ in range(count):
        words = (
            "".join(
                random_numbers.choice("def import self.(x)\n ")
                for _ in range(random_numbers.randrange(1, 12))
            )
            or "x"
        )
        body = {"max_tokens": random_numbers.randrange(1, 12)}
        options = {"max_new_tokens": body["max_tokens"], "method": "plain"}
        if random_numbers.random() < 0.5:
            body |= {"temperature": 0.8, "top_p": 0.9, "seed": random_numbers.randrange(1000)}
            options |= {"temperature": 0.8, "top_p": 0.9, "seed": body["seed"]}
        else:
            body["temperature"] = 0
        if random_numbers.random() < 0.4:
            messages = [{"role": "user", "content": words}]
            requests.append(
                (
                    COMPLETION_PATHS[1],
                    body | {"messages": messages},
                    generate(target, None, messages, **options).text,
                )
            )
        else:
            requests.append(
                (
                    COMPLETION_PATHS[0],
                    body | {"prompt": words},
                    generate(target, None, words, **options).text,
                )
            )
    return requests


def dump_request(body: object, random_numbers: random.Random) -> bytes:
    """Return a body as JSON, with a huge number instead of the text "@HUGE@"."""
    text = json.dumps(body, ensure_ascii=random_numbers.random() < 0.7).replace(
        '"@HUGE@"', "9" * 5000
    )
    return text.encode(errors="surrogatepass")


def build_http_request(
    path: str, content: bytes, *headers: str, method: str = "POST", key: str = FUZZ_API_KEY
) -> bytes:
    lines = [f"{method} {path} HTTP/1.1", "host: here", f"content-length: {len(content)}"]
    lines += [f"authorization: Bearer {key}", "content-type: application/json", *headers]
    return "\r\n".join(lines).encode(errors="surrogateescape") + b"\r\n\r\n" + content


def mutate_bytes(content: bytes, random_numbers: random.Random) -> bytes:
    """Return the bytes with random ones flipped, removed, repeated or inserted."""
    out = bytearray(content)
    for _ in range(random_numbers.randrange(1, 5)):
        at = random_numbers.randrange(len(out) + 1)
        operation = random_numbers.randrange(4)
        if operation == 0 and at < len(out):
            out[at] ^= 1 << random_numbers.randrange(8)
        elif operation == 1:
            del out[at : at + random_numbers.randrange(1, 20)]
        elif operation == 2:
            out[at:at] = out[at : at + random_numbers.randrange(1, 20)]
        else:
            out[at:at] = random_numbers.randbytes(random_numbers.randrange(1, 8))
    return bytes(out)


class Client:
    """Client that sends random requests, one connection after the other, and checks the answers."""

    def __init__(
        self, port: int, cases: list[tuple[str, dict, str]], seed: int, seen: Counter
    ) -> None:
        self.port = port
        self.cases = cases
        self.random_numbers = random.Random(seed)
        self.seen = seen
        self.reader = self.writer = None
        self.failures: list[str] = []

    async def connect(self) -> None:
        if self.writer is None or self.writer.is_closing() or self.reader.at_eof():
            self.reader, self.writer = await asyncio.open_connection("127.0.0.1", self.port)

    def hang_up(self) -> None:
        """Reset the connection, so that no port is left in TIME_WAIT."""
        if self.writer is not None:
            linger = struct.pack("ii", 1, 0)
            self.writer.get_extra_info("socket").setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, linger
            )
            self.writer.transport.abort()
        self.writer = None

    async def answer(self) -> tuple[int, bytes]:
        """Return status and body of the next response; (0, b"") if the connection closed."""
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

    def check_answer(self, kind: str, status: int, body: bytes, sent: bytes) -> None:
        """Count an answer, and record a failure if it is not a valid one."""
        self.seen[kind, status] += 1
        is_wrong = status and status not in ALLOWED_STATUSES
        if status >= 400 and body.startswith(b"{"):
            is_wrong = is_wrong or not json.loads(body)["error"]["message"]
        if is_wrong or b"Traceback" in body:
            self.failures.append(f"{kind}: {status} {body[:200]!r} after {sent[:300]!r}")

    async def send_well_formed(self) -> None:
        path, body, text = self.random_numbers.choice(self.cases)
        stream = self.random_numbers.random() < 0.5
        sent = build_http_request(
            path, dump_request(body | {"stream": stream}, self.random_numbers)
        )
        for _ in range(3):  # a kept connection may be closed by the server just now
            await self.send(sent)
            status, got = await self.answer()
            if status:
                break
        self.check_answer("well-formed", status, got, sent)
        if status == 429:
            return
        if self.read_answer_text(path, got, stream) != text:
            self.failures.append(
                f"wrong answer: {self.read_answer_text(path, got, stream)!r} instead of {text!r} "
                f"for {body}"
            )

    def read_answer_text(self, path: str, got: bytes, stream: bool) -> str:
        chunks = [got]
        if stream:
            chunks = [line[6:] for line in got.split(b"\n\n") if line.startswith(b"data: {")]
        text = ""
        try:
            for chunk in chunks:
                for choice in json.loads(chunk)["choices"]:
                    message = choice.get("delta") or choice.get("message") or {}
                    text += (
                        choice["text"]
                        if path == COMPLETION_PATHS[0]
                        else message.get("content", "")
                    )
        except (ValueError, KeyError):
            return f"no answer: {got[:200]!r}"
        return text

    async def send_and_leave(self) -> None:
        path, body, _ = self.random_numbers.choice(self.cases)
        await self.send(
            build_http_request(
                path,
                dump_request(
                    body | {"stream": self.random_numbers.random() < 0.5, "max_tokens": 40},
                    self.random_numbers,
                ),
            )
        )
        if self.random_numbers.random() < 0.5:
            await asyncio.sleep(self.random_numbers.random() * 0.02)
        self.hang_up()
        self.seen["left while it is written", 0] += 1

    async def send_hostile_field(self) -> None:
        path, body, _ = self.random_numbers.choice(self.cases)
        body = dict(body)
        for _ in range(self.random_numbers.choice([1, 1, 1, 2, 3])):
            body[self.random_numbers.choice(REQUEST_FIELDS)] = self.random_numbers.choice(
                HOSTILE_VALUES
            )
        if self.random_numbers.random() < 0.1:
            body["\ud800" if self.random_numbers.random() < 0.5 else "k" * 3000] = 1
        await self.send_and_check(
            "hostile field", build_http_request(path, dump_request(body, self.random_numbers))
        )

    async def send_broken_json(self) -> None:
        path, body, _ = self.random_numbers.choice(self.cases)
        content = mutate_bytes(dump_request(body, self.random_numbers), self.random_numbers)
        if self.random_numbers.random() < 0.3:
            broken_contents = [
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
            content = self.random_numbers.choice(broken_contents)
        await self.send_and_check("broken JSON", build_http_request(path, content))

    async def send_and_check(self, kind: str, sent: bytes) -> None:
        await self.send(sent)
        status, got = await self.answer()
        self.check_answer(kind, status, got, sent)

    async def send_content_type(self) -> None:
        path, body, _ = self.random_numbers.choice(self.cases)
        types = [
            "text/plain",
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-16",
            "",
            "é",
        ]
        sent = build_http_request(path, dump_request(body, self.random_numbers))
        name = self.random_numbers.choice(types).encode("latin1")
        await self.send_and_check(
            "content type",
            sent.replace(b"content-type: application/json", b"content-type: " + name),
        )

    async def send_wrong_key(self) -> None:
        path, body, _ = self.random_numbers.choice(self.cases)
        wrong_key = self.random_numbers.choice(
            ["", FUZZ_API_KEY[:-1], FUZZ_API_KEY + "x", FUZZ_API_KEY.upper(), "é", "a" * 4000]
        )
        sent = build_http_request(path, dump_request(body, self.random_numbers), key=wrong_key)
        await self.send(sent)
        status, got = await self.answer()
        self.check_answer("wrong key", status, got, sent)
        if status not in (0, 400, 401):
            self.failures.append(f"let in without the key: {status} {got[:100]!r}")

    async def send_large_request(self) -> None:
        path = self.random_numbers.choice(COMPLETION_PATHS)
        size = self.random_numbers.choice([20_001, 40_000, 200_000])
        if self.random_numbers.random() < 0.5:
            await self.send_and_check(
                "oversized", build_http_request(path, b'{"prompt": "' + b"x" * size + b'"}')
            )
        else:
            head = build_http_request(path, b"").replace(
                b"content-length: 0", b"transfer-encoding: chunked"
            )
            await self.send_and_check(
                "oversized",
                head
                + b"".join(b"400\r\n" + b" " * 1024 + b"\r\n" for _ in range(size // 1024))
                + b"0\r\n\r\n",
            )
        self.hang_up()

    async def send_announced_size(self) -> None:
        """Announce a body that never comes: the server must answer and close the connection."""
        path, _, _ = self.random_numbers.choice(self.cases)
        size = self.random_numbers.choice([20_001, 2**31, 2**63, 2**64 - 1, 10**19, 10**25])
        head = build_http_request(path, b"")
        if self.random_numbers.random() < 0.5:
            sent = head.replace(b"content-length: 0", b"content-length: %d" % size)
        else:
            sent = head.replace(b"content-length: 0", b"transfer-encoding: chunked")
            sent += b"1;x\r\n{\r\n" * self.random_numbers.choice([0, 1, 20_000]) + b"%x\r\n" % size
        await self.send(sent)
        status, got = await self.answer()
        self.check_answer("announced", status, got, sent)
        if status not in (0, 400, 413) or self.writer is not None:
            self.failures.append(
                f"announced: {status}, and the connection is open, after {sent[:300]!r}"
            )


REQUEST_KINDS = {
    Client.send_well_formed: 15,
    Client.send_and_leave: 4,
    Client.send_hostile_field: 26,
    Client.send_broken_json: 16,
    Client.send_content_type: 6,
    Client.send_wrong_key: 6,
    Client.send_large_request: 2,
    Client.send_announced_size: 2,
}


class ErrorLogHandler(logging.Handler):
    """Log handler that collects the errors that the server logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record)[-1500:])


def read_resident_megabytes() -> float:
    """Collect garbage; return the resident memory of this process in megabytes."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


async def wait_until_idle(service, seconds: float = 60) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if not (
            service.active_requests
            or service.engine.has_unfinished_sequences
            or service.worker.open_requests
        ):
            return True
        await asyncio.sleep(0.05)
    return False


async def fuzz(requests: int, clients: int, seed: int, margin: float) -> list[str]:
    """Run the server and all clients; return the failures."""
    target, drafter = build_small_models()
    cases = build_known_requests(target, random.Random(seed), 60)
    engine = Engine(target, drafter, EngineConfig("ddtree", 6, max_num_seqs=8), 64)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ServerConfig(port=port, max_requests=150, max_body_bytes=20_000)
    app = create_app(engine, options)
    server = uvicorn.Server(build_uvicorn_config(app, options))
    service = app.state.service
    logs = ErrorLogHandler()
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
    names = list(REQUEST_KINDS)
    left = requests

    async def run(client: Client) -> None:
        nonlocal left
        while left > 0 and len(client.failures) < 5:
            left -= 1
            (send,) = client.random_numbers.choices(names, REQUEST_KINDS.values())
            await asyncio.wait_for(send(client), 60)

    tasks_before = len(asyncio.all_tasks())
    memory = []
    connection_time = time.monotonic()
    for share in (0.1, 0.3, 0.3, 0.3):  # the first tenth warms up
        left = int(requests * share)
        await asyncio.gather(*(run(client) for client in everyone))
        for client in everyone:
            client.hang_up()
        failures = [] if await wait_until_idle(service) else ["texts are left in work"]
        await asyncio.sleep(0.3)
        memory.append(read_resident_megabytes())
        print(f"{sum(seen.values())} answers, {memory[-1]:.0f} MB", flush=True)
    ended = time.monotonic() + 10  # by then every kept connection is closed
    while server.server_state.connections and time.monotonic() < ended:
        await asyncio.sleep(0.1)
    failures += (
        [fault for client in everyone for fault in client.failures] + logs.messages + loop_faults
    )
    if (
        engine.runner.batch_state.cache.lengths
        or engine.scheduler.waiting
        or engine.scheduler.running
    ):
        failures.append("the engine still holds rows")
    if (
        server.server_state.connections
        or server.server_state.tasks
        or len(asyncio.all_tasks()) > tasks_before
    ):
        failures.append(
            f"left over: {len(server.server_state.connections)} connections, {asyncio.all_tasks()}"
        )
    if not service.worker.is_alive():
        failures.append("the engine's thread is dead")
    if memory[-1] - memory[0] > margin:
        failures.append(
            f"memory has grown from {memory[0]:.0f} to {memory[-1]:.0f} MB, by more than "
            f"{margin:.0f}"
        )
    server.should_exit = True
    await serving
    for kind in sorted({kind for kind, _ in seen}):
        counts = {status: count for (name, status), count in sorted(seen.items()) if name == kind}
        shown = ", ".join(f"{status or 'none'} {count}" for status, count in counts.items())
        print(f"{kind:<28}{shown}")
    took = time.monotonic() - connection_time
    print(
        f"{sum(seen.values())} answers to {requests} requests by {clients} clients in {took:.0f} s"
    )
    print(
        f"memory {memory[0]:.0f} MB after a tenth, {memory[-1]:.0f} MB at the end (margin "
        f"{margin:.0f})"
    )
    print(f"{len(failures)} faults")
    return failures


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
    os.environ["BLOCKDRAFT_API_KEY"] = FUZZ_API_KEY
    failures = asyncio.run(fuzz(args.requests, args.clients, args.seed, args.margin))
    for fault in failures[:20]:
        print(fault, file=sys.stderr)
    raise SystemExit(1 if failures else 0)


if __name__ == "__main__":
    main()
