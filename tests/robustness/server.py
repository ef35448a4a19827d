"""Shared code of the programs in this folder: a server process, the memory of a process."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

SERVER_REPOSITORY = Path(__file__).resolve().parents[2]


def read_memory_mib(process: int | str = "self", name: str = "VmRSS") -> float:
    """Return the memory of a process in MiB, 0 if it has ended.

    name: a field of /proc/<pid>/status, for example VmRSS (resident) or VmSize (address space)
    """
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


@contextmanager
def run_server(*settings: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run `serve` on a free port; yield its address and process once it answers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(SERVER_REPOSITORY / "infer" / "main.py"),
        "serve",
        f"server.port={port}",
        *settings,
    ]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SERVER_REPOSITORY)})
    url = f"http://127.0.0.1:{port}"
    try:
        while server.poll() is None:
            try:
                httpx.get(f"{url}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.2)
        yield url, server
    finally:
        server.kill()
        server.wait()
