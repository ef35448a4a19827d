"""Ctrl-C where Python cannot raise it: within one long call of C code."""

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib, signal
from infer.utils import interrupts
from infer.utils.progress import HEARTBEAT

interrupts.GRACE = 0.1
HEARTBEAT.begin()
interrupts.INTERRUPTS.begin()
interrupts.INTERRUPTS.graceful = GRACEFUL
signal.signal(signal.SIGINT, lambda *_: None)  # Python's own way out may come before the long call
print("begun", flush=True)
hashlib.pbkdf2_hmac("sha256", b"x", b"y", 2_000_000_000)
"""


@pytest.mark.parametrize("graceful", [0, 1])
def test_a_long_call_is_ended(repo, graceful):
    """By the first press, or by the one behind those that others take care of."""
    command = [sys.executable, "-c", PROGRAM.replace("GRACEFUL", str(graceful))]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=repo
    )
    assert process.stdout.readline() == "begun\n"
    for _ in range(graceful):
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130 and "stopped by Ctrl-C" in process.stderr.read()
