"""The thread that runs the engine of a server.

The thread receives `SequenceRequest`s through a queue, and sends the decoded tokens back to the
event loop of the HTTP server as `SequenceDelta`s. This module contains no HTTP code.
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
from infer.config import SamplingOptions
from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.serving.responses import SequenceDelta, make_failure_delta

log = logging.getLogger(__name__)

ENGINE_LOST_MESSAGE = (
    "the engine failed and could not be restarted: start the server again. If memory was short, "
    "use a smaller decoding.max_num_seqs"
)
OUT_OF_MEMORY_DELTA = make_failure_delta(
    503, "the server is short of memory: send a smaller request, or try again later"
)
ENGINE_FAILURE_DELTA = make_failure_delta(500, "the engine failed on this request")


@dataclass(eq=False)
class SequenceRequest:
    """A sequence that the engine decodes for an HTTP request.

    prompt: token ids of the prompt
    loop: the event loop of the HTTP server
    deltas: queue of (index, delta), which all sequences of an HTTP request share. Only the event
        loop uses it
    index: number of the sequence in the HTTP request
    keep_special_tokens: whether the text of the deltas includes special tokens
    trace: whether the deltas include rejected draft tokens
    sequence: the engine's sequence; None until the thread has submitted the request
    sent_tokens: number of tokens that were sent to the event loop
    sent_rounds: number of decoding rounds whose tokens were sent to the event loop
    cancelled: whether the engine should stop decoding the sequence
    """

    prompt: list[int]
    options: SamplingOptions
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
        """Put a delta into the queue `deltas`. The engine's thread calls this method."""
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self.deltas.put_nowait, (self.index, delta))


class ServerMetrics:
    """The Prometheus metrics of the server, which it returns at /metrics.

    decoding: the engine options that are shown as labels; keys are names, values are their values
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
        self.rounds = counter("rounds", "Decoding rounds, summed over the sequences of a batch")
        self.drafted = counter("drafted_tokens", "Draft tokens that the target verified")
        self.accepted = counter(
            "accepted_tokens_per_pos",
            "Draft tokens that were accepted at this position of the draft",
            ["position"],
        )
        self.writing = gauge("texts_writing", "Sequences that are being generated")
        self.waiting = gauge("texts_waiting", "Sequences that wait for a batch row")
        prometheus_client.Info("decoding", "Decoding options", **shared).info(decoding)


class EngineThread(threading.Thread):
    """Runs the engine while there are sequences to decode, and sleeps otherwise.

    If a round fails, its sequences are decoded again in smaller batches. If a sequence fails in a
    batch of its own, it is cancelled, and the client receives the error. If the engine cannot be
    reset, the thread stores an error message in `failure`, calls `on_failure` (which stops the
    server), and ends.
    """

    def __init__(self, engine: Engine, metrics: ServerMetrics) -> None:
        super().__init__(name="engine", daemon=True)
        self.engine = engine
        self.metrics = metrics
        # Queue of requests from the event loop. The value None ends the thread.
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
        """Decode requests until the value None arrives in the queue `inbox`.

        Raises the exception of the engine if the engine cannot be reset after an error.
        """
        while True:
            requests = []
            if not self.engine.has_unfinished_sequences:
                requests.append(self.inbox.get())  # sleeps until there is work
            while not self.inbox.empty():
                requests.append(self.inbox.get())
            if None in requests:
                return
            for request in requests:
                assert request is not None
                self._submit(request)
            if self.engine.has_unfinished_sequences:
                failure = self._run_round()
                if failure is not None:
                    self._recover(failure)

    def _submit(self, request: SequenceRequest) -> None:
        if request.cancelled:
            return
        try:
            sequence = self.engine.submit(request.prompt, request.options)
            request.sequence = sequence
            sequence.records_rejected = request.trace
            detokenizer = IncrementalDetokenizer(
                self.engine.target, sequence, request.keep_special_tokens
            )
            self.open_requests[sequence] = (request, detokenizer)
        except Exception as error:
            log.exception("the engine refused a request that was admitted")
            self._give_up(request, make_exception_delta(error))

    def _give_up(self, request: SequenceRequest, failure: SequenceDelta) -> None:
        """Cancel the sequence of a request, and send the error to the client.

        failure: the delta that contains the error
        """
        if request.sequence is not None:
            request.sequence.cancelled = True
            self.open_requests.pop(request.sequence, None)
        request.send(failure)

    def _run_round(self) -> SequenceDelta | None:
        """Run a decoding round, and send the tokens that the round committed.

        Returns None, or a delta with the error for the client if the round has failed.
        """
        for sequence, (request, _) in self.open_requests.items():
            sequence.cancelled = request.cancelled
        failure = None
        try:
            self.engine.step()
        except Exception as error:
            # The traceback of `error` keeps tensors alive until this except block ends. Recovery
            # needs their memory, so it must start later.
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
        """Queue the sequences of a failed round again, and allocate new caches for the engine.

        If the round had only one sequence, this sequence is cancelled instead, and the client
        receives the error.

        failure: the delta that contains the error
        """
        failed_sequence = self.engine.scheduler.recover_from_error()
        if failed_sequence in self.open_requests:
            request, _ = self.open_requests[failed_sequence]
            self._give_up(request, failure)
        gc.collect()
        self.engine.reset()

    def _send_new_tokens(self, sequence: Sequence) -> None:
        """Send the tokens that a sequence has gained since the last call, and update metrics."""
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
        # The metrics are updated first. A client that has received its answer therefore finds it
        # counted in /metrics.
        request.send(delta)
        if sequence.finish_reason is not None:
            del self.open_requests[sequence]


def make_exception_delta(error: Exception) -> SequenceDelta:
    """Return the delta that reports an exception of the engine to a client."""
    # If memory is short on a CPU, torch raises a RuntimeError with this message.
    is_out_of_memory = isinstance(
        error, MemoryError | torch.OutOfMemoryError
    ) or "can't allocate memory" in str(error)
    return OUT_OF_MEMORY_DELTA if is_out_of_memory else ENGINE_FAILURE_DELTA
