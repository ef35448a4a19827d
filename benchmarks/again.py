"""Measurements in processes of their own."""

import json
import os
import subprocess
import sys


def run_again(arguments: list[str], environment: dict[str, str]) -> dict:
    """Run a script with arguments under more environment variables; return the JSON of its last line."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | environment)
    if done.returncode:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])
