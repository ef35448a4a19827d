"""Ctrl-C: a sentence and exit code 130 within two seconds, whatever the main thread is at."""

import os
import signal
import sys
import threading
import time
from typing import NoReturn

from infer.utils.progress import HEARTBEAT

INTERRUPTED = 130  # exit code after Ctrl-C
GRACE = 1.5  # seconds for a KeyboardInterrupt to end the process by itself


def interrupted(error: KeyboardInterrupt) -> NoReturn:
    """End the process after Ctrl-C, with a sentence, and without waiting for threads: a request may
    take minutes."""
    print(f"\nstopped by Ctrl-C: {str(error) or 'files written before are whole'}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(INTERRUPTED)


class Interrupts(threading.Thread):
    """Ends the process where Ctrl-C is without an effect: Python raises KeyboardInterrupt between
    two of its own instructions, and one that counts n-grams or loads weights may take minutes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.graceful = (
            0  # how many Ctrl-C others take care of: a training run saves after the first
        )

    def begin(self) -> None:
        """Watch over the process, from its main thread."""
        if not self.is_alive() and threading.current_thread() is threading.main_thread():
            self.pipe, written = os.pipe()
            os.set_blocking(written, False)
            signal.set_wakeup_fd(written, warn_on_full_buffer=False)
            self.start()

    def run(self) -> None:
        while number := os.read(self.pipe, 1):
            if number[0] != signal.SIGINT or HEARTBEAT.what is None:  # None: it waits for its user
                continue
            if self.graceful:
                self.graceful -= 1
                continue
            time.sleep(GRACE)
            interrupted(KeyboardInterrupt())


INTERRUPTS = Interrupts()
