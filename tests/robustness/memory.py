"""The server under memory pressure: a real vocabulary, little memory, and requests of which some
cannot fit.

    python tests/robustness/memory.py --requests 200 --after 50

The process bounds its own address space (RLIMIT_AS) so that one greedy text fits and rounds of
several do not, all the time. Fails (exit code 1) if a request is not answered, if one gets 500 or
503 whose text did not fail alone, or if a greedy one does.
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
from fuzz_http import small
from server import memory

from infer import Engine
from infer.config import EngineConfig
from infer.engine.sequence import Sequence
from infer.serving.config import ServerConfig
from infer.serving.server import make_server

VOCABULARY = 151_936
ROWS = 4
CAPACITY = 512
WAIT = 600
MIB = 2**20


def small_engine() -> Engine:
    """A random target with a large vocabulary and next to no weights beside it, and its drafter."""
    sizes = {
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_attention_heads": 1,
        "max_position_embeddings": 1024,
    }
    pair = small(vocab_size=VOCABULARY, tie_word_embeddings=True, initializer_range=0.02, **sizes)
    return Engine(*pair, EngineConfig("ddtree", 16, max_num_seqs=ROWS), CAPACITY)


def body(number: int, dice: random.Random, greedy: bool) -> dict:
    """A request; token ids as prompt, so that the tokenizer's vocabulary does not matter."""
    prompt = [dice.randrange(1000) for _ in range(dice.randrange(2, 200))]
    request = {
        "prompt": prompt,
        "max_tokens": dice.randrange(1, 12),
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
    logging.getLogger("infer.serving.server").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    engine = small_engine()
    dice = random.Random(0)
    failures: list[tuple[int, ...] | None] = []  # failed rounds: the prompt that failed alone

    bound = threading.Event()
    retry = engine.scheduler.retry

    def retrying() -> Sequence | None:
        text = retry()
        failures.append(text and tuple(text.prompt))
        return text

    engine.scheduler.retry = retrying
    server = make_server(engine, ServerConfig(port=1, model_name="small"), bound.set)
    server.config.port = 0
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    bound.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    client = httpx.Client(
        base_url=f"http://127.0.0.1:{port}", timeout=WAIT, limits=httpx.Limits(max_connections=16)
    )
    pool = ThreadPoolExecutor(16)

    def ask(request: dict) -> tuple[dict, int]:
        return request, client.post("/v1/completions", json=request).status_code

    warm = list(pool.map(ask, [body(i, dice, True) | {"max_tokens": 12} for i in range(32)]))
    faults = [f"{status} before memory was short" for _, status in warm if status != 200]
    limit = int(memory(name="VmSize") + options.margin) * MIB
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    mixed = list(pool.map(ask, [body(i, dice, i % 16 > 0) for i in range(options.requests)]))
    for request, status in mixed:
        alone = tuple(request["prompt"]) in failures
        failed = status in (500, 503)  # 503 where the engine said that memory is short
        if (
            (not failed and status != 200)
            or failed != alone
            or (alone and request["temperature"] == 0)
        ):
            faults.append(
                f"{status} for a request that {'failed' if alone else 'did not fail'} alone"
            )
    after = list(pool.map(ask, [body(i, dice, True) for i in range(options.after)]))
    faults += [f"{status} afterwards" for _, status in after if status != 200]
    if server.service.worker.failure is not None:
        faults.append(server.service.worker.failure)
    kinds = Counter(
        (("greedy" if request["temperature"] == 0 else "sampled"), status)
        for request, status in mixed
    )
    print(
        f"{len(mixed)} requests: {dict(kinds)}; {len(after)} afterwards: {Counter(s for _, s in after)}"
    )
    print(
        f"{len(failures)} rounds failed"
        if failures
        else "every round fitted: a smaller --margin makes some fail"
    )
    server.should_exit = True
    thread.join(60)
    print(*faults[:20], f"{len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
