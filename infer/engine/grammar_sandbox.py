"""Compile grammars of untrusted users in a child process before the server compiles them.

llguidance limits the number of steps, but a single step may take seconds of time or gigabytes of
memory, and running out of memory would kill the server. The server therefore first lets a child
process compile each grammar, and generate some random tokens that the grammar allows. The child
process has limits on its time and memory.

This file is also the program that the child process runs. It imports nothing from this package.
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
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Arguments of llguidance's LLParserLimits. The lexer limits are llguidance's defaults; the parser
# limits are lower than the defaults. With `precompute_large_lexemes`, the limit
# `initial_lexer_fuel` applies to all work before the first token.
GRAMMAR_PARSER_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 200_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 20_000,
    "max_items_in_row": 1_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "precompute_large_lexemes": True,
    "verbose_errors": False,
}
# Maximum length of the text that a grammar may force at one position. Forced text is tokenized
# again for every token, so long text is slow.
MAX_BYTES_FORCED_BY_GRAMMAR = 2048
# address space reserved for the thread's stack; only pages that are used take memory
GRAMMAR_COMPILER_STACK_BYTES = 512 << 20
GRAMMAR_COMPILER_FREE_MEMORY_BYTES = 256 << 20  # memory that must be free besides the stack
# CPU time limit for compiling a grammar and generating the trial tokens
MAX_GRAMMAR_SANDBOX_CPU_SECONDS = 1.0
# CPU time limit for computing which tokens are allowed at one position
MAX_GRAMMAR_SANDBOX_CPU_SECONDS_PER_MASK = 0.05
# limit of the child process's address space, tokenizer and stack included
MAX_GRAMMAR_SANDBOX_MEMORY_BYTES = 2 << 30
GRAMMAR_SANDBOX_TRIAL_TOKENS = 32  # number of random tokens generated to test a grammar
# number of accepted grammars that are remembered and not checked again
MAX_REMEMBERED_ACCEPTED_GRAMMARS = 64


def run_with_deep_stack(function: Callable[[], Any]) -> Any:
    """Call a function in a thread with a large stack, and return the function's result.

    Without the large stack, compiling a grammar with thousands of nested rules would overflow the
    stack and end the process. Raises MemoryError if the stack plus
    GRAMMAR_COMPILER_FREE_MEMORY_BYTES cannot be allocated.
    """
    old_size = threading.stack_size(GRAMMAR_COMPILER_STACK_BYTES)
    try:
        mmap.mmap(-1, GRAMMAR_COMPILER_STACK_BYTES + GRAMMAR_COMPILER_FREE_MEMORY_BYTES).close()
        with ThreadPoolExecutor(1) as thread:
            return thread.submit(function).result()
    except (OSError, RuntimeError) as error:  # too little memory for the stack or for the thread
        raise MemoryError(
            "not enough free memory to compile a grammar; try again later or free some memory"
        ) from error
    finally:
        threading.stack_size(old_size)


def build_matcher(kind: str, source: str, tokenizer: "LLTokenizer") -> "LLMatcher":
    """Compile a grammar, and return llguidance's matcher at the beginning of an output. `kind` is
    "json_schema", "regex" or "grammar" (Lark). Raises ValueError if the grammar is invalid or too
    large, and MemoryError if there is too little memory."""
    from llguidance import LLMatcher, LLParserLimits

    converters: dict[str, Callable[[str], str]] = {
        "json_schema": LLMatcher.grammar_from_json_schema,
        "regex": LLMatcher.grammar_from_regex,
        "grammar": LLMatcher.grammar_from_lark,
    }
    limits = LLParserLimits(**GRAMMAR_PARSER_LIMITS)
    try:
        matcher = run_with_deep_stack(
            lambda: LLMatcher(tokenizer, converters[kind](source), log_level=0, limits=limits)
        )
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from error
    if matcher.is_error():
        raise ValueError(f"{kind}: {matcher.get_error()}")
    return matcher


class GrammarSandbox:
    """A child process that compiles each grammar before this process does, so that a grammar that
    crashes or hangs the compiler cannot harm this process. The child process is started on first
    use, and again after a grammar has crashed it."""

    def __init__(self, make_tokenizer_arguments: Callable[[], dict]) -> None:
        """Prepare the sandbox without starting the child process. `make_tokenizer_arguments`
        returns the arguments of llguidance's LLTokenizer."""
        self.make_tokenizer_arguments = make_tokenizer_arguments
        self.process: subprocess.Popen | None = None
        self.lock = threading.Lock()
        # `check(kind, source)` remembers accepted grammars. For refused grammars `_check` raises an
        # exception, and `lru_cache` does not store exceptions.
        self.check = lru_cache(MAX_REMEMBERED_ACCEPTED_GRAMMARS)(self._check)

    def _check(self, kind: str, source: str) -> None:
        """Raise ValueError if the grammar is invalid, or takes too much time or memory. `kind` is
        "json_schema", "regex" or "grammar"."""
        with self.lock:
            if self.process is None:
                # raises ValueError if the tokenizer is not supported
                tokenizer_arguments = self.make_tokenizer_arguments()
                self.process = subprocess.Popen(
                    [sys.executable, "-P", __file__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                self._send(tokenizer_arguments)
            self._send([kind, source])
            answer = self._receive()
            if not answer:
                self.close()
        if not answer:
            max_mib = MAX_GRAMMAR_SANDBOX_MEMORY_BYTES >> 20
            raise ValueError(
                f"{kind}: compiling this grammar takes more than "
                f"{MAX_GRAMMAR_SANDBOX_CPU_SECONDS:g} s or {max_mib} MiB; make it smaller"
            )
        reason = json.loads(answer)
        if reason is not None:
            raise ValueError(reason)

    def _send(self, message: object) -> None:
        """Send `message` to the child process as one line of JSON."""
        assert self.process is not None and self.process.stdin is not None
        with suppress(BrokenPipeError):  # the child process has ended; `_receive` will return ''
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def _receive(self) -> str:
        """Return the next line of the child process's output, or '' if the process has ended."""
        assert self.process is not None and self.process.stdout is not None
        return self.process.stdout.readline()

    def close(self) -> None:
        """End the child process, if there is one."""
        process = self.process
        self.process = None
        if process is not None:
            process.kill()
            process.communicate()


def find_refusal_reason(kind: str, source: str, tokenizer: "LLTokenizer") -> str | None:
    """Compile a grammar, and generate some random tokens that it allows. Return an error message if
    the grammar must be refused, or None if it is accepted."""
    try:
        matcher = build_matcher(kind, source, tokenizer)
    except (ValueError, MemoryError) as error:
        return str(error) or f"{kind}: compiling this grammar takes too much memory"

    generator = random.Random(0)
    for step in range(GRAMMAR_SANDBOX_TRIAL_TOKENS):
        start = time.process_time()
        if len(matcher.compute_ff_bytes()) > MAX_BYTES_FORCED_BY_GRAMMAR:
            return (
                f"{kind}: this grammar forces more than {MAX_BYTES_FORCED_BY_GRAMMAR} bytes of "
                "text at one position; make the forced text shorter"
            )
        bitmask = matcher.compute_bitmask() if not matcher.is_error() else b""
        if matcher.is_error():
            # Accept a grammar with which llguidance fails only after the first token: outputs then
            # end at that token.
            return f"{kind}: {matcher.get_error().splitlines()[0]}" if step == 0 else None
        if time.process_time() - start > MAX_GRAMMAR_SANDBOX_CPU_SECONDS_PER_MASK:
            limit = f"{MAX_GRAMMAR_SANDBOX_CPU_SECONDS_PER_MASK:g} s"
            return (
                f"{kind}: computing the allowed tokens takes more than {limit} for one token; "
                "make the grammar smaller"
            )
        if matcher.is_stopped():
            return None
        if not matcher.consume_token(generator.choice(list_allowed_tokens(bitmask))):
            return None
    return None


def list_allowed_tokens(bitmask: bytes) -> list[int]:
    """Return the token ids whose bits are set in `bitmask`, in ascending order. Bit 0, the lowest
    bit, of byte i stands for token 8 * i."""
    token_ids = []
    for index, byte in enumerate(bitmask):
        if byte:
            token_ids += [8 * index + bit for bit in range(8) if byte >> bit & 1]
    return token_ids


def main() -> None:
    """Run the child process. Read JSON values from standard input, one per line: first the
    tokenizer's arguments, then grammars as [kind, source]. Answer each grammar with one line: null
    if it is accepted, otherwise the error message."""
    import resource  # not available on every operating system

    from llguidance import LLTokenizer

    # Ignore Ctrl-C, which the server handles. When the server ends, the standard input of this
    # process ends, and so does the loop below.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    hard_limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MAX_GRAMMAR_SANDBOX_MEMORY_BYTES, hard_limit))
    tokenizer = LLTokenizer(**json.loads(sys.stdin.readline()))
    for line in sys.stdin:
        kind, source = json.loads(line)
        signal.setitimer(
            signal.ITIMER_PROF, MAX_GRAMMAR_SANDBOX_CPU_SECONDS
        )  # after this CPU time, the signal SIGPROF ends the process
        reason = find_refusal_reason(kind, source, tokenizer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reason), flush=True)


if __name__ == "__main__":
    main()
