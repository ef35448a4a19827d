"""Run the server with little memory, a vocabulary of real size, and requests that cannot all fit.

    python tests/robustness/memory.py --requests 200 --after 50

The process limits its own address space (RLIMIT_AS) so that one greedy sequence fits, but rounds of
several may not. Fails (exit code 1) if a request is not answered, if a request gets 500 or 503
although its sequence did not fail alone, or if a greedy one gets 500 or 503.
"""

import argparse
import logging
import random
import resource
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import torch
from fuzz_http import build_small_models
from server import read_memory_mib

from infer import Engine
from infer.config import EngineConfig
from infer.engine.sequence import Sequence
from infer.serving.config import ServerConfig
from infer.serving.server import make_server

LARGE_TOKEN_COUNT = 151_936
MEMORY_ENGINE_ROWS = 4
MEMORY_ENGINE_CAPACITY = 512
REQUEST_TIMEOUT_SECONDS = 600
BYTES_PER_MIB = 2**20


def build_small_engine() -> Engine:
    """Return an engine with a tiny random target that has a large vocabulary, and a drafter."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "max_position_embeddings": 1024,
    }
    pair = build_small_models(
        vocab_size=LARGE_TOKEN_COUNT, tie_word_embeddings=True, initializer_range=0.02, **sizes
    )
    return Engine(
        *pair, EngineConfig("ddtree", 16, max_num_seqs=MEMORY_ENGINE_ROWS), MEMORY_ENGINE_CAPACITY
    )


def build_request(number: int, random_numbers: random.Random, greedy: bool) -> dict:
    """Return a request whose prompt is token ids, as the tokenizer has a smaller vocabulary."""
    prompt = [random_numbers.randrange(1000) for _ in range(random_numbers.randrange(2, 200))]
    request = {
        "prompt": prompt,
        "max_tokens": random_numbers.randrange(1, 12),
        "temperature": 0,
        "user": str(number),
    }
    return (
        request
        if greedy
        else request | {"temperature": 1, "top_p": 0.9, "logprobs": 20, "seed": number}
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--after", type=int, default=50)
    parser.add_argument(
        "--margin", type=int, default=-60, help="MiB beyond what the idle server takes"
    )
    options = parser.parse_args()
    logging.getLogger("infer.serving").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    engine = build_small_engine()
    random_numbers = random.Random(0)
    failures: list[tuple[int, ...] | None] = []  # failed rounds: the prompt that failed alone

    bound = threading.Event()
    retry = engine.scheduler.recover_from_error

    def record_retry() -> Sequence | None:
        text = retry()
        failures.append(text and tuple(text.prompt))
        return text

    engine.scheduler.recover_from_error = record_retry
    server = make_server(engine, ServerConfig(port=1, model_name="small"), bound.set)
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    bound.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}",
        timeout=REQUEST_TIMEOUT_SECONDS,
        limits=httpx.Limits(max_connections=16),
    )
    pool = ThreadPoolExecutor(16)

    def send_request(request: dict) -> tuple[dict, int]:
        return request, client.post("/v1/completions", json=request).status_code

    warm = list(
        pool.map(
            send_request,
            [build_request(i, random_numbers, True) | {"max_tokens": 12} for i in range(32)],
        )
    )
    failures_found = [f"{status} before memory was short" for _, status in warm if status != 200]
    limit = int(read_memory_mib(name="VmSize") + options.margin) * BYTES_PER_MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    mixed = list(
        pool.map(
            send_request,
            [build_request(i, random_numbers, i % 16 > 0) for i in range(options.requests)],
        )
    )
    for request, status in mixed:
        failed_alone = tuple(request["prompt"]) in failures
        failed = status in (500, 503)  # 503 where the engine said that memory is short
        if (
            (not failed and status != 200)
            or failed != failed_alone
            or (failed_alone and request["temperature"] == 0)
        ):
            failures_found.append(
                f"{status} for a request that {'failed' if failed_alone else 'did not fail'} alone"
            )
    after = list(
        pool.map(
            send_request, [build_request(i, random_numbers, True) for i in range(options.after)]
        )
    )
    failures_found += [f"{status} afterwards" for _, status in after if status != 200]
    if server.service.worker.failure is not None:
        failures_found.append(server.service.worker.failure)
    kinds = Counter(
        (("greedy" if request["temperature"] == 0 else "sampled"), status)
        for request, status in mixed
    )
    print(
        f"{len(mixed)} requests: {dict(kinds)}; {len(after)} afterwards: "
        f"{Counter(s for _, s in after)}"
    )
    print(
        f"{len(failures)} rounds failed"
        if failures
        else "every round fitted: a smaller --margin makes some fail"
    )
    server.should_exit = True
    thread.join(60)
    print(*failures_found[:20], f"{len(failures_found)} faults", sep="\n")
    return 1 if failures_found else 0


if __name__ == "__main__":
    sys.exit(main())
