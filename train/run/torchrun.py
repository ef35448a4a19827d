"""Run `torchrun`, but print one sentence instead of a traceback if a signal stops it. launch.sh
uses this module to start a run with several processes.

torchrun forwards the signal to its processes, waits until they have saved the run and exited, and
then raises an exception.
"""

import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main

from infer.utils.interrupts import EXIT_CODE_INTERRUPTED


def run_torchrun() -> int:
    """Run torchrun with the command-line arguments of this process. Return the exit code: 0 without
    a signal, 130 after Ctrl-C, and 1 after another signal."""
    try:
        main()
    except SignalException as error:
        signal_received = signal.Signals(error.sigval)
        is_interrupt = signal_received == signal.SIGINT
        name = "Ctrl-C" if is_interrupt else signal_received.name
        print(
            f"stopped by {name}: the last saved state is complete; run the same command again to "
            "continue from it",
            file=sys.stderr,
        )
        return EXIT_CODE_INTERRUPTED if is_interrupt else 1
    return 0


if __name__ == "__main__":
    sys.exit(run_torchrun())
