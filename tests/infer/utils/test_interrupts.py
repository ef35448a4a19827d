"""Ctrl-C within one long call of C code, where Python cannot raise KeyboardInterrupt."""

import signal
import subprocess
import sys

import pytest

LONG_CALL_PROGRAM = """
import hashlib, signal
from infer.utils import interrupts
from infer.utils.progress import HEARTBEAT

interrupts.INTERRUPT_GRACE_SECONDS = 0.1
HEARTBEAT.start_watching()
interrupts.INTERRUPT_WATCHER.start_watching()
interrupts.INTERRUPT_WATCHER.interrupts_to_ignore = IGNORED
signal.signal(signal.SIGINT, lambda *_: None)  # no KeyboardInterrupt before the long call
print("started", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
"""


@pytest.mark.parametrize("ignored", [0, 1])
def test_a_long_call_is_ended(repo, ignored):
    """By the first Ctrl-C, or by the one after those that other code handles."""
    command = [sys.executable, "-c", LONG_CALL_PROGRAM.replace("IGNORED", str(ignored))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=repo
    )
    assert process.stdout.readline() == "started\n"
    for _ in range(ignored):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "stopped by Ctrl-C" in process.stderr.read()
