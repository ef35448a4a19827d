"""End the process within two seconds after Ctrl-C, with one sentence and exit code 130."""

import os
import signal
import sys
import threading
import time
from typing import NoReturn

from infer.utils.progress import HEARTBEAT

EXIT_CODE_INTERRUPTED = 130  # 128 + SIGINT
# Time after Ctrl-C until the watcher thread ends the process. Usually, Python's KeyboardInterrupt
# has ended the process earlier.
INTERRUPT_GRACE_SECONDS = 1.5


def exit_after_interrupt(error: KeyboardInterrupt) -> NoReturn:
    """Print one sentence and end the process after Ctrl-C.

    error: its message tells the user what was saved (`set_interrupt_message`)

    The process does not wait for its other threads, because a request in one of them may take
    minutes.
    """
    explanation = str(error) or "files written before are complete"
    print(f"\nstopped by Ctrl-C: {explanation}", file=sys.stderr)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE_INTERRUPTED)


class InterruptWatcher(threading.Thread):
    """A thread that ends the process after Ctrl-C if Python's KeyboardInterrupt comes too late.

    Python raises KeyboardInterrupt only between two bytecode instructions. A single call of
    compiled code, such as counting n-grams or loading weights, may take minutes.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        # Number of interrupts (Ctrl-C) that this thread still ignores because other code handles
        # them. For example, a training run handles the first interrupt by saving its state.
        self.interrupts_to_ignore = 0

    def start_watching(self) -> None:
        """Start the thread that ends the process some time after Ctrl-C. Do nothing if this is
        called outside the main thread, because only the main thread can set up signals."""
        if self.is_alive() or threading.current_thread() is not threading.main_thread():
            return
        self.signal_pipe, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
        self.start()

    def run(self) -> None:
        while signal_byte := os.read(self.signal_pipe, 1):
            # If there is no activity, the command waits for user input. Ctrl-C interrupts the
            # waiting at once, so the process must not be ended here.
            if signal_byte[0] != signal.SIGINT or HEARTBEAT.activity is None:
                continue
            if self.interrupts_to_ignore:
                self.interrupts_to_ignore -= 1
                continue
            time.sleep(INTERRUPT_GRACE_SECONDS)
            exit_after_interrupt(KeyboardInterrupt())


INTERRUPT_WATCHER = InterruptWatcher()
