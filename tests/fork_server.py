"""Starts the project's commands as forks of one process that has imported everything: tests do not
wait for imports.

Run as `python fork_server.py SOCKET` by the fixture `start_command` in conftest.py; pytest's
processes share it. With each it speaks JSON over the Unix socket, one request and one answer a
line, and it ends when the last of them has gone:

    {"script": path, "arguments": [...], "environment": {...}, "output": path}
                                                                    answer: the process id
    {"poll": process id}                                            answer: its exit code, null if it runs

From its fork on, a process is what `python script arguments` is: its own environment, standard
output and error in the file, the script run as `__main__`, the interpreter's own end. With FRESH in
its environment it has none of the project's modules yet, and finds those beside the script first.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys

if __name__ == "__main__":  # before the imports: who comes meanwhile waits
    DOOR = socket.socket(socket.AF_UNIX)
    DOOR.bind(sys.argv[1])
    DOOR.listen()

# What a run imports before its last step, later than at its start too. It starts no thread and no
# process group.
import datasets  # noqa: E402, F401
import hydra  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import infer.main  # noqa: E402, F401
import train.loop  # noqa: E402, F401
from infer.trees.ddtree import ddtree  # noqa: E402
from infer.trees.tree import Proposal  # noqa: E402

# numba imports most of itself with the first compiled loop
ddtree(Proposal(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, 2), 1))

if not os.path.exists(
    "/dev/nvidiactl"
):  # DeepSpeed looks at GPUs when imported; a process that did must not fork
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops.op_builder.all_ops  # noqa: F401


def fork(request: dict) -> int:
    """Return the new process's id; in the new process, 0."""
    child = os.fork()
    if child == 0:
        signal.signal(
            signal.SIGINT, signal.default_int_handler
        )  # a shell's background jobs ignore it
        os.environ.update(request["environment"])
        sys.argv = [request["script"], *request["arguments"]]
        if "FRESH" in os.environ:
            for name in [
                name for name in sys.modules if name.split(".")[0] in ("train", "infer", "data")
            ]:
                del sys.modules[name]
            sys.path.insert(0, os.path.dirname(request["script"]))
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, to in ((os.open(os.devnull, os.O_RDONLY), 0), (output, 1), (output, 2)):
            os.dup2(descriptor, to)
    return child


def poll(process: int) -> int | None:
    ended, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended else None


def answer(request: dict) -> int | str | None:
    """Do what a request says; return the answer, in a forked process the script to run."""
    return poll(request["poll"]) if "poll" in request else fork(request) or request["script"]


def serve() -> str | None:
    """Answer requests until nobody is left. In a forked process, return the script to run."""
    clients = {}
    left = False
    while True:
        for ready in select.select([DOOR, *clients], [], [])[0]:
            if ready is DOOR:
                client = DOOR.accept()[0]
                clients[client] = client.makefile("rw")
            elif line := clients[ready].readline():
                said = answer(json.loads(line))
                if isinstance(said, str):
                    return said
                print(json.dumps(said), file=clients[ready], flush=True)
            else:
                clients.pop(ready).close()
                ready.close()
        if not clients and not left:
            os.unlink(sys.argv[1])  # from now on nobody comes; who came just now is served
            left = True
        if not clients and not select.select([DOOR], [], [], 0)[0]:
            return None


gc.collect()
gc.freeze()  # a forked process looks through nothing of all this again, and copies no memory for it

if __name__ == "__main__" and (script := serve()):
    runpy.run_path(script, run_name="__main__")
