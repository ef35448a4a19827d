"""`torchrun`, with a sentence in place of a traceback after a signal: `launch.sh` starts several
processes by it.

torchrun passes a signal on to its processes, waits until they have saved and left, and raises an
exception then.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from infer.utils.interrupts import INTERRUPTED


def run() -> int:
    """Run torchrun with this process's arguments; return the exit code, 130 after Ctrl-C and 1
    after other signals."""
    try:
        main()
    except SignalException as stop:
        number = signal.Signals(stop.sigval)
        name = "Ctrl-C" if number == signal.SIGINT else number.name
        print(
            f"stopped by {name}: what was saved is whole, and the same command goes on from there",
            file=sys.stderr,
        )
        return INTERRUPTED if number == signal.SIGINT else 1
    return 0


if __name__ == "__main__":
    sys.exit(run())
