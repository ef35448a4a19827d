"""Start the project's commands as forks of a process that has imported everything.

Tests then do not wait for imports.

The fixture `start_command` in conftest.py runs `python fork_server.py SOCKET`. All processes of a
pytest run are its clients. Requests and answers are JSON lines over the Unix socket. The server
ends when the last client has disconnected.

    {"script": path, "arguments": [...], "environment": {...}, "output": path}
                                                   answer: the process id
    {"poll": process id}                           answer: its exit code, null while it is running

A forked process behaves as `python script arguments`: it has its own environment, writes standard
output and error to the file, runs the script as `__main__` and ends as the interpreter does. With
FRESH in its environment it imports the project's modules again, first from the script's folder.
"""

import gc
import json
import os
import runpy
import select
import signal
import socket
import sys

if __name__ == "__main__":  # before the imports, so that clients can already connect
    SERVER_SOCKET = socket.socket(socket.AF_UNIX)
    SERVER_SOCKET.bind(sys.argv[1])
    SERVER_SOCKET.listen()

# Everything that a run imports. None of these starts a thread or a process group.
import datasets  # noqa: E402, F401
import hydra  # noqa: E402, F401
import torch  # noqa: E402
import transformers.models.qwen3.modeling_qwen3  # noqa: E402, F401

import infer.main  # noqa: E402, F401
import train.loop  # noqa: E402, F401
from infer.trees.ddtree import build_ddtree  # noqa: E402
from infer.trees.tree import Proposal  # noqa: E402

# numba imports most of its modules with the first compiled loop.
build_ddtree(Proposal(torch.zeros(1, dtype=torch.long), torch.zeros(1, 1, 2), 1))

# DeepSpeed initialises GPUs when imported, after which a process must not fork.
if not os.path.exists("/dev/nvidiactl"):
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed.ops.op_builder.all_ops  # noqa: F401


def fork_process(request: dict) -> int:
    """Fork; return the new process's id, or 0 in the new process."""
    child = os.fork()
    if child == 0:
        # Background jobs of a shell ignore SIGINT.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.update(request["environment"])
        sys.argv = [request["script"], *request["arguments"]]
        if "FRESH" in os.environ:
            for name in list(sys.modules):
                if name.split(".")[0] in ("train", "infer", "data"):
                    del sys.modules[name]
            sys.path.insert(0, os.path.dirname(request["script"]))
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for descriptor, target_descriptor in (
            (os.open(os.devnull, os.O_RDONLY), 0),
            (output, 1),
            (output, 2),
        ):
            os.dup2(descriptor, target_descriptor)
    return child


def poll_process(process: int) -> int | None:
    """Return the exit code of a process, or None while it is running."""
    ended_process, status = os.waitpid(process, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_process else None


def handle_request(request: dict) -> int | str | None:
    """Handle a request; return the answer, or in a forked process the script to run."""
    if "poll" in request:
        return poll_process(request["poll"])
    process = fork_process(request)
    return process or request["script"]


def serve_requests() -> str | None:
    """Answer requests until no client is left. In a forked process, return the script to run."""
    clients = {}
    is_closed = False
    while True:
        for ready in select.select([SERVER_SOCKET, *clients], [], [])[0]:
            if ready is SERVER_SOCKET:
                client = SERVER_SOCKET.accept()[0]
                clients[client] = client.makefile("rw")
            elif line := clients[ready].readline():
                reply = handle_request(json.loads(line))
                if isinstance(reply, str):
                    return reply
                print(json.dumps(reply), file=clients[ready], flush=True)
            else:
                clients.pop(ready).close()
                ready.close()
        if not clients and not is_closed:
            os.unlink(sys.argv[1])  # no further client can connect; one that just did is served
            is_closed = True
        if not clients and not select.select([SERVER_SOCKET], [], [], 0)[0]:
            return None


gc.collect()
gc.freeze()  # so that garbage collection in a forked process does not copy this memory

if __name__ == "__main__" and (script := serve_requests()):
    runpy.run_path(script, run_name="__main__")
