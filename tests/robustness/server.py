"""Shared by the programs of this folder: a server in a process of its own, and what a process takes
of memory."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]


def memory(process: int | str = "self", name: str = "VmRSS") -> float:
    """Return MiB of a process by the kernel's count: what is resident, or VmSize: its address
    space; 0 when it is no more."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:")), 0.0)


@contextmanager
def serving(*settings: str) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run `serve` on a free port; yield its address, once it answers, and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        str(ROOT / "infer" / "main.py"),
        "serve",
        f"server.port={port}",
        *settings,
    ]
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(ROOT)})
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
