"""`python train/main.py [overrides]`, alone or under torchrun: Hydra in, dataclass out, one call."""

import os
import sys
import traceback

from data.rows import refuse_unwritten
from infer.utils.entry import STOPPED, Stopped, entry, file_errors
from infer.utils.redact import redact_text
from train.config import TrainConfig


def run(config: TrainConfig) -> None:
    refuse_unwritten(config.data)
    from train.loop import train  # torch and friends load only once the configuration is known to be good

    code = 0
    try:
        train(config)
    except SystemExit as error:  # saved after Ctrl-C
        code = error.code
    except (ValueError, FileNotFoundError, ModuleNotFoundError, BrokenPipeError):
        raise  # the caller reports it in one sentence
    except (Stopped, *file_errors()) as error:
        print(f"error: {redact_text(str(error))}", file=sys.stderr)
        code = STOPPED
    except Exception:  # noqa: BLE001
        print(redact_text(traceback.format_exc()), file=sys.stderr)
        code = 1
    # A finished gloo process sometimes aborts in its exit handlers, and one that failed may wait there
    # for a hanging thread; all is written, so it leaves without them.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    entry("train", TrainConfig, run)
