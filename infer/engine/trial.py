"""Grammars of strangers, compiled and tried in a process of their own.

llguidance's limits count steps, and a single step may take seconds or gigabytes; out of memory, it
ends the process. So a server first has a grammar compiled and followed for some tokens in a child
process, which has little time and memory. This file is that process too, and imports nothing of
this package.

V vocabulary.
"""

import json
import mmap
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache

# llguidance's own limits on what its lexer does, and less than its own of the rest.
# `precompute_large_lexemes` is what makes `initial_lexer_fuel` hold until the first token.
LIMITS = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
MAX_FORCED = 2048  # bytes that a grammar may force in one stretch: each token tokenises them again
STACK = 512 << 20  # bytes, of which only those are taken that are needed
HEADROOM = 256 << 20  # bytes that must be free beside the stack
TRIAL_SECONDS = 1.0  # of processor time, for compiling and following a grammar
TOKEN_SECONDS = 0.05  # of processor time, for one token
TRIAL_MEMORY = 2 << 30  # bytes of address space, the tokenizer and the stack among them
TRIAL_TOKENS = 32
TRIALS = 64  # passed grammars that are remembered


def with_deep_stack(function: Callable[[], object]) -> object:
    """Return a function's result, computed where rules that refer to rules, thousands deep, end in
    no overflow of the stack, which would end the process. Raises MemoryError where there is no room
    for that stack and some more."""
    before = threading.stack_size(STACK)
    try:
        mmap.mmap(-1, STACK + HEADROOM).close()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()
    except (OSError, RuntimeError) as full:  # no such mapping; no new thread
        raise MemoryError("no room to compile a grammar") from full
    finally:
        threading.stack_size(before)


def build(kind: str, text: str, tokenizer: object):
    """Return llguidance's matcher at the beginning of a text. Raises ValueError with the reason
    where the text is no grammar of its kind, or a too large one."""
    from llguidance import LLMatcher, LLParserLimits

    make: dict[str, Callable[[str], str]] = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    limits = LLParserLimits(**LIMITS)
    try:
        matcher = with_deep_stack(
            lambda: LLMatcher(tokenizer, make[kind](text), log_level=0, limits=limits)
        )
    except ValueError as wrong:
        raise ValueError(f"{kind}: {wrong}") from wrong
    if matcher.is_error():
        raise ValueError(f"{kind}: {matcher.get_error()}")
    return matcher


class Trial:
    """A child process that compiles grammars before this one does; it is started again where one
    ends it."""

    def __init__(self, serialised: Callable[[], dict]) -> None:
        """`serialised`: returns the arguments of llguidance's tokenizer."""
        self.serialised = serialised
        self.process = None
        self.lock = threading.Lock()
        self.check = lru_cache(TRIALS)(self._check)

    def _check(self, kind: str, text: str) -> None:
        """Raise ValueError for a grammar that is none or takes too much."""
        with self.lock:
            if self.process is None:
                tokenizer = self.serialised()  # which may raise
                self.process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._send(tokenizer)
            self._send([kind, text])
            answer = self.process.stdout.readline()
            if not answer:
                self.close()
        if not answer:
            took = f"{TRIAL_SECONDS:g} s or {TRIAL_MEMORY >> 20} MiB"
            raise ValueError(f"{kind}: compiling it takes more than {took}, make it smaller")
        if (wrong := json.loads(answer)) is not None:
            raise ValueError(wrong)

    def _send(self, message: object) -> None:
        with suppress(BrokenPipeError):  # it has ended: the answer is empty
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """End the process, if there is one."""
        process = self.process
        self.process = None
        if process is not None:
            process.kill()
            process.communicate()


def refusal(kind: str, text: str, tokenizer: object) -> str | None:
    """Compile a grammar and follow it for some random tokens; return what is wrong with it."""
    try:
        matcher = build(kind, text, tokenizer)
    except (ValueError, MemoryError) as wrong:
        return str(wrong) or f"{kind}: compiling it takes too much memory"
    dice = random.Random(0)
    for step in range(TRIAL_TOKENS):
        began = time.process_time()
        if len(matcher.compute_ff_bytes()) > MAX_FORCED:
            return f"{kind}: it forces more than {MAX_FORCED} bytes in one stretch"
        bits = matcher.compute_bitmask() if not matcher.is_error() else b""
        if matcher.is_error():
            return f"{kind}: {matcher.get_error().splitlines()[0]}" if step == 0 else None
        if time.process_time() - began > TOKEN_SECONDS:
            return f"{kind}: a token takes more than {TOKEN_SECONDS:g} s, make it smaller"
        allowed = [
            8 * at + bit
            for at, byte in enumerate(bits)
            if byte
            for bit in range(8)
            if byte >> bit & 1
        ]
        if matcher.is_stopped() or not matcher.consume_token(dice.choice(allowed)):
            return None
    return None


def main() -> None:
    """Read a tokenizer and then grammars, line by line; answer each with null or what is wrong with
    it."""
    import resource  # not everywhere

    from llguidance import LLTokenizer

    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C is the server's; without it, the input ends
    os.nice(5)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_MEMORY, hard))
    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        signal.setitimer(signal.ITIMER_PROF, TRIAL_SECONDS)  # ends the process
        wrong = refusal(*json.loads(line), tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
