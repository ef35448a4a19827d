"""Shared by the tests of infer/: a scripted drafter, transformers' own greedy text, running
servers, and a stand-in for CUDA graphs."""

import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from infer import Engine
from infer.drafters.base import DraftedBlock
from infer.drafters.lookup import PromptLookup
from infer.engine import engine as engine_module
from infer.engine.capture import CudaGraphs
from infer.kernels import table
from infer.ngrams import rescoring
from infer.ngrams.model import (
    NGramModel,
    compute_next_token_probabilities,
    fill_unigram_probabilities,
    find_ngram_node,
    find_suffix_nodes,
    get_child_range,
    get_node_token,
)
from infer.targets.target import Target


class ScriptedDrafter(PromptLookup):
    """A drafter that knows the texts to come and is right now and then, so that walks of all
    lengths happen.

    Position t of text b is guessed right with probability `skill`; the truth is otherwise among the
    next likeliest.
    """

    layer_ids = (1,)

    def __init__(
        self, texts: list[list[int]], block_size: int, vocabulary: int, skill: float = 0.7
    ) -> None:
        super().__init__(block_size)
        self.texts = texts
        self.size = vocabulary
        self.skill = skill
        self.generator = torch.Generator().manual_seed(block_size)

    def allocate_state(self, rows: int, capacity: int, keep_all: bool = True) -> "Script":
        return Script()

    def update_context(
        self, target, features, tokens, counts, state, counts_on_device=None
    ) -> None:
        assert features.shape[1] == tokens.shape[1] >= max(counts)
        state.lengths = [
            length + count for length, count in zip(state.lengths, counts, strict=True)
        ]

    def draft_block(self, target, bonus, state) -> DraftedBlock:
        shape = (len(bonus), self.block_size - 1, self.size)
        logits = torch.randn(shape, generator=self.generator) * 2
        for b, which in enumerate(state.texts):
            text = self.texts[which]
            at = state.lengths[b]
            assert text[at] == bonus[b]
            ahead = text[at + 1 :]
            for t, token in enumerate(ahead[: self.block_size - 1]):
                right = torch.rand((), generator=self.generator) < self.skill
                logits[b, t, token] = 12.0 if right else 4.0
        return DraftedBlock(logits.log_softmax(-1))


class Script:
    """Which text every row is, and how far it has come. Texts are let in one after the other."""

    def __init__(self) -> None:
        self.lengths = []
        self.texts = []
        self.admitted = 0

    @contextmanager
    def add(self, count: int):
        part = Script()
        part.lengths = [0] * count
        yield part
        self.lengths += part.lengths
        self.texts += range(self.admitted, self.admitted + count)
        self.admitted += count

    def keep(self, order: list[int]) -> None:
        self.lengths = [self.lengths[i] for i in order]
        self.texts = [self.texts[i] for i in order]


def _hugging_face(target: Target, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False
    )
    return out[0, len(prompt) :].tolist()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _running(engine: Engine, **options):
    """Serve `engine` on a free port; yield its address and its service."""
    import uvicorn  # here: tests of the GPU start on machines without the server's packages

    from infer.serving.config import ServerConfig
    from infer.serving.guard import build_uvicorn_config
    from infer.serving.server import create_app

    options = ServerConfig(port=_free_port(), model_name="embedded", **options)
    options.check()
    app = create_app(engine, options)
    server = uvicorn.Server(build_uvicorn_config(app, options))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield options.url, app.state.service
    finally:
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive() and not app.state.service.worker.is_alive()


@contextmanager
def _answering(reply: Callable[[BaseHTTPRequestHandler, dict | None], tuple[int, dict] | None]):
    """A server of others: `reply(request, its JSON body, None for GET)` is the status and the JSON
    that it answers, or None where it hangs up and refuses whoever asks from then on. Yields its
    address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.say(reply(self, None))

        def do_POST(self):
            self.say(reply(self, json.loads(self.rfile.read(int(self.headers["content-length"])))))

        def say(self, answer):
            if answer is None:
                here.socket.close()
                return
            content = json.dumps(answer[1]).encode()
            self.send_response(answer[0])
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    here = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    here.daemon_threads = True
    here.handle_error = lambda *_: None
    threading.Thread(target=here.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{here.server_port}/v1"
    finally:
        threading.Thread(target=here.shutdown, daemon=True).start()


def _idle(service, seconds: float = 20) -> bool:
    """Return whether nothing is in work any more, waiting for it up to `seconds`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if (
            not service.active_requests
            and not service.engine.has_unfinished_sequences
            and not service.worker.open_requests
        ):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture(scope="session")
def scripted_drafter() -> type[ScriptedDrafter]:
    """The class `ScriptedDrafter`: (texts, block size, vocabulary, skill)."""
    return ScriptedDrafter


@pytest.fixture(scope="session")
def hugging_face():
    """(target, prompt, tokens) -> the token ids that transformers' greedy `generate` writes."""
    return _hugging_face


@pytest.fixture
def free_port() -> int:
    """A TCP port that nobody listens to."""
    return _free_port()


@pytest.fixture(scope="session")
def running():
    """(engine, **server options) -> a context manager that serves the engine; see `_running`."""
    return _running


@pytest.fixture(scope="session")
def answering():
    """(reply) -> a context manager that runs a server of others; see `_answering`."""
    return _answering


@pytest.fixture(scope="session")
def idle():
    """(service) -> whether the server has finished all work; see `_idle`."""
    return _idle


@pytest.fixture(scope="session")
def recalled() -> Callable:
    """Prediction by partial matching, written plainly: probabilities of tokens corrected by what
    followed the ends of a path earlier in a text."""

    def correct(
        text: list[int], path: list[int], tokens: list[int], probabilities: np.ndarray
    ) -> np.ndarray:
        for length in range(1, min(rescoring.MAX_NGRAM_PATH_SUFFIX_TOKENS, len(path)) + 1):
            ends = [
                at + length
                for at in range(len(text) - length)
                if text[at : at + length] == path[-length:]
            ]
            if not ends:
                break
            followed = Counter(text[end] for end in ends)
            came = [followed[token] for token in tokens]
            probabilities = (np.array(came) + probabilities) / (len(ends) + 1)
        return probabilities

    return correct


@pytest.fixture(scope="session")
def probabilities() -> Callable:
    """(model, context, tokens ascending) -> Pr(token | context) of each, see
    `compute_next_token_probabilities`."""

    def look_up(model: NGramModel, context: list[int], tokens: list[int]) -> np.ndarray:
        order = np.argsort(tokens, kind="stable")
        ids = np.asarray(context, np.int64)
        tokens = np.asarray(tokens, np.int64)[order]
        suffixes = np.empty(max(model.order - 1, 1), np.int64)
        shares = np.empty(len(tokens))
        found = np.empty_like(shares)
        grown = np.empty((len(suffixes) + 1, len(tokens)), np.int64)
        find_suffix_nodes(model.trie, ids, suffixes)
        fill_unigram_probabilities(model.trie, model.num_tokens, tokens, shares)
        compute_next_token_probabilities(model.trie, suffixes, tokens, shares, grown, found)
        return found[np.argsort(order)]

    return look_up


@pytest.fixture(scope="session")
def widened() -> Callable:
    """The tokens that n-grams add to those listed, written plainly: what followed the path's last
    token in the text, the latest first, then what followed its ends in the corpus, the longest
    first, while few tokens did."""

    def add(text: list[int], path: list[int], listed: list[int], model: NGramModel) -> list[int]:
        found = [after for before, after in reversed(list(pairwise(text))) if before == path[-1]]
        for length in range(min(model.order - 1, len(path)), 0, -1):
            ids = np.array(path[-length:], np.int64)
            nodes = range(*get_child_range(model.trie, find_ngram_node(model.trie, ids, 0, length)))
            if len(nodes) > rescoring.MAX_CHILDREN_FOR_NGRAM_CANDIDATES:
                break
            found += [int(get_node_token(model.trie, node)) for node in nodes]
        return [token for token in dict.fromkeys(found) if token not in listed][
            : rescoring.MAX_NGRAM_CANDIDATES_ADDED_PER_NODE
        ]

    return add


class Recorder(TorchDispatchMode):
    """Records every operation with its arguments and results. Raises if the host reads a value."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert "_local_scalar_dense" not in str(function), "the host synchronises with the device"
        result = function(*args, **(kwargs or {}))
        self.steps.append((function, args, kwargs or {}, tree_flatten(result)[0]))
        return result


class RecordedGraphs(CudaGraphs):
    """Graphs whose replay repeats the recorded operations and writes their results to the same
    memory."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.is_enabled = True
        self.replays = 0

    def _capture(self, function):
        with Recorder() as recorder:
            results = function()
        return Recording(self, recorder.steps), results


class Recording:
    """Replaces a CUDA graph."""

    def __init__(self, graphs: RecordedGraphs, steps: list) -> None:
        self.graphs = graphs
        self.steps = steps
        # Unlike a capture, recording computes the results, so the first replay does nothing.
        self.is_computed = True

    def replay(self) -> None:
        self.graphs.replays += 1
        if self.is_computed:
            self.is_computed = False
            return
        for function, args, kwargs, old_results in self.steps:
            new_results = tree_flatten(function(*args, **kwargs))[0]
            for old, new in zip(old_results, new_results, strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.fixture
def graphs(monkeypatch):
    """Make engines use recorded graphs and the reference kernels."""
    monkeypatch.setattr(engine_module, "CudaGraphs", RecordedGraphs)
    monkeypatch.setattr(table, "FAST_KERNEL_TABLE_PATHS", {})
