"""The thread that runs the engine of a server.

It does not use HTTP. It receives `SequenceRequest`s through a queue, and sends `SequenceDelta`s
back to the event loop.
"""

import asyncio
import gc
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import prometheus_client
import torch

from infer.api import IncrementalDetokenizer
from infer.config import TextOptions
from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.serving.responses import SequenceDelta, make_failure_delta

log = logging.getLogger(__name__)

ENGINE_LOST_MESSAGE = (
    "the engine failed and could not be restarted: start the server again; "
    "a smaller decoding.max_num_seqs needs less memory"
)
OUT_OF_MEMORY_DELTA = make_failure_delta(
    503, "the server is short of memory: send a smaller request, or try again later"
)
ENGINE_FAILURE_DELTA = make_failure_delta(500, "the engine failed on this request")


@dataclass(eq=False)
class SequenceRequest:
    """One sequence of an HTTP request that the engine decodes.

    deltas: queue of (index, delta), shared by all sequences of a request; used by the event loop
    index: number of the sequence in its request
    keep_special_tokens: whether the text includes special tokens
    trace: whether deltas include rejected draft tokens
    sequence: set by the engine's thread
    sent_tokens, sent_rounds: how many tokens and rounds of the sequence were sent
    """

    prompt: list[int]
    options: TextOptions
    loop: asyncio.AbstractEventLoop
    deltas: "asyncio.Queue[tuple[int, SequenceDelta]]"
    index: int
    keep_special_tokens: bool = False
    trace: bool = False
    sequence: Sequence | None = None
    sent_tokens: int = 0
    sent_rounds: int = 0
    cancelled: bool = False

    def send(self, delta: SequenceDelta) -> None:
        """Send a delta from the engine's thread to the event loop."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, (self.index, delta))


class ServerMetrics:
    """The counters and gauges of /metrics.

    decoding: options of the engine, which /metrics shows as labels
    """

    def __init__(self, decoding: dict[str, str]) -> None:
        self.registry = prometheus_client.CollectorRegistry()
        shared: dict[str, Any] = {"namespace": "blockdraft", "registry": self.registry}
        counter = partial(prometheus_client.Counter, **shared)
        gauge = partial(prometheus_client.Gauge, **shared)
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of admitted sequences")
        self.reused = counter(
            "reused_prompt_tokens", "Prompt tokens that were found in the prefix cache"
        )
        self.tokens = counter("generated_tokens", "Committed tokens")
        self.rounds = counter("rounds", "Rounds, one count per row")
        self.drafted = counter("drafted_tokens", "Verified draft nodes")
        self.accepted = counter(
            "accepted_tokens_per_pos", "Rounds that accepted a draft at this depth", ["position"]
        )
        self.writing = gauge("texts_writing", "Sequences that are being generated")
        self.waiting = gauge("texts_waiting", "Sequences that wait for a batch row")
        prometheus_client.Info("decoding", "Decoding options", **shared).info(decoding)


class EngineThread(threading.Thread):
    """Runs the engine while there is work, and sleeps otherwise.

    If a round fails, its sequences are decoded again, fewer at a time, until one fails alone. Only
    that one is given up. If the engine cannot be reset, the thread ends: `failure` is then the
    reason, and `on_failure` is called, which stops the server.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.metrics = metrics
        # None ends the thread.
        self.inbox: queue.SimpleQueue[SequenceRequest | None] = queue.SimpleQueue()
        self.open_requests: dict[Sequence, tuple[SequenceRequest, IncrementalDetokenizer]] = {}
        self.failure: str | None = None
        self.on_failure: Callable[[], None] = lambda: None

    def run(self) -> None:
        try:
            self._run_engine()
        except Exception:
            log.exception("the engine's thread failed")
            self.failure = ENGINE_LOST_MESSAGE
            self.on_failure()

    def _run_engine(self) -> None:
        """Decode requests until the inbox has a None.

        Raises what the engine raises if it cannot be reset.
        """
        while True:
            requests = []
            if not self.engine.busy:
                requests.append(self.inbox.get())  # sleeps until there is work
            while not self.inbox.empty():
                requests.append(self.inbox.get())
            if None in requests:
                return
            for request in requests:
                assert request is not None
                self._submit(request)
            if self.engine.busy:
                failure = self._run_round()
                if failure is not None:
                    self._recover(failure)

    def _submit(self, request: SequenceRequest) -> None:
        if request.cancelled:
            return
        try:
            sequence = self.engine.submit(request.prompt, request.options)
            request.sequence = sequence
            sequence.trace = request.trace
            detokenizer = IncrementalDetokenizer(
                self.engine.target, sequence, request.keep_special_tokens
            )
            self.open_requests[sequence] = (request, detokenizer)
        except Exception as error:
            log.exception("the engine refused a request that was admitted")
            self._give_up(request, make_exception_delta(error))

    def _give_up(self, request: SequenceRequest, failure: SequenceDelta) -> None:
        """Send a failure to the client. The engine drops the sequence in its next round."""
        if request.sequence is not None:
            request.sequence.cancelled = True
            self.open_requests.pop(request.sequence, None)
        request.send(failure)

    def _run_round(self) -> SequenceDelta | None:
        """Run a round and send what it committed. Returns the failure if the round failed."""
        for sequence, (request, _) in self.open_requests.items():
            sequence.cancelled = request.cancelled
        failure = None
        try:
            self.engine.step()
        except Exception as error:
            # The traceback refers to tensors. They are freed after this block, so recovery must
            # not start inside it.
            log.exception("a round failed")
            failure = make_exception_delta(error)
        for sequence, (request, _) in list(self.open_requests.items()):
            if len(sequence.ids) <= request.sent_tokens and sequence.finish_reason is None:
                continue
            try:
                self._send_new_tokens(sequence)
            except Exception as error:
                log.exception("new tokens could not be sent")
                self._give_up(request, make_exception_delta(error))
        scheduler = self.engine.scheduler
        self.metrics.writing.set(len(scheduler.running))
        self.metrics.waiting.set(len(scheduler.waiting) + len(scheduler.prefilling))
        return failure

    def _recover(self, failure: SequenceDelta) -> None:
        """Queue the sequences of a failed round again and give the engine new caches.

        A sequence that failed alone is given up.
        """
        failed_sequence = self.engine.scheduler.recover_from_error()
        if failed_sequence in self.open_requests:
            request, _ = self.open_requests[failed_sequence]
            self._give_up(request, failure)
        gc.collect()
        self.engine.reset()

    def _send_new_tokens(self, sequence: Sequence) -> None:
        """Count and send what was added to a sequence since the last time."""
        request, detokenizer = self.open_requests[sequence]
        new_ids = sequence.ids[request.sent_tokens :]
        drafted_per_round = sequence.drafted[request.sent_rounds :]
        delta = SequenceDelta(
            detokenizer.next_text(),
            new_ids,
            sequence.logprobs[request.sent_tokens :],
            sequence.finish_reason,
            sum(drafted_per_round),
            sequence.rejected[-1] if sequence.rejected else None,
        )
        if request.sent_tokens == 0 and new_ids:
            self.metrics.prompt_tokens.inc(len(sequence.prompt))
            self.metrics.reused.inc(sequence.stats.cached_tokens)
        self.metrics.tokens.inc(len(new_ids))
        self.metrics.rounds.inc(len(drafted_per_round))
        self.metrics.drafted.inc(sum(drafted_per_round))
        for accepted in sequence.accepted[request.sent_rounds :]:
            for position in range(accepted):
                self.metrics.accepted.labels(position).inc()
        request.sent_tokens = len(sequence.ids)
        request.sent_rounds = len(sequence.drafted)
        # Sent last, so that a client that has its answer finds it in the metrics.
        request.send(delta)
        if sequence.finish_reason is not None:
            del self.open_requests[sequence]


def make_exception_delta(error: Exception) -> SequenceDelta:
    """Return the delta that tells a client about an exception of the engine."""
    # On a CPU, torch has no exception class for failed allocations.
    is_out_of_memory = isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
    return OUT_OF_MEMORY_DELTA if is_out_of_memory else ENGINE_FAILURE_DELTA
