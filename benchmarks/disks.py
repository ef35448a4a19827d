# ruff: noqa: E402
"""What a run does when its disk fails it: a full one, a read-only one, one that vanishes, a folder that is in use.

    python benchmarks/disks.py

Each case is a small run of `train/main.py` on a file system of a few megabytes (tmpfs, mounted in a mount namespace of
this script's own by `unshare`, so that nothing is left on the machine). Printed for each: the exit code, what the run
said, and whether what lay there is undamaged: the same command, once the disk is well again, must end with the losses
and weights of a run that met no such thing, bit by bit.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[0] = str(ROOT)
os.environ.setdefault("OMP_NUM_THREADS", "1")

OPTIONS = ["data=stdlib", "data.length=64", "data.limit=12", "anchors=4", "optim.batch=2", "drafter.layers=1"]
OPTIONS += ["evaluation.prompts=1", "evaluation.prompt_tokens=8", "evaluation.max_new_tokens=6"]
OPTIONS += ["evaluation.budgets=[4]", "optim.steps=24", "checkpoints=2", "name=run"]
KEYS = ("step", "loss", "prefix", "agreement", "lr", "grad_norm")


def start(runs: Path) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train" / "main.py"), f"runs_dir={runs}", *OPTIONS]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def end(process: subprocess.Popen, code: int) -> list[str]:
    """What a run said that was wrong, after it ended as it should."""
    output = process.communicate(timeout=600)[0]
    if process.returncode != code:
        raise SystemExit(f"exit code {process.returncode}, not {code}:\n{output}")
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    if code and (len(said) != 1 or "Traceback" in output):
        raise SystemExit(f"not one sentence:\n{output}")
    return said


def mount(folder: Path, megabytes: float, *more: str) -> None:
    folder.mkdir(exist_ok=True)
    options = ",".join([f"size={int(megabytes * 1024)}k", *more])
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)


def steps(run: Path) -> list[dict]:
    log = run / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines() if line.endswith("}")] if log.exists() else []


def wait_for_step(run: Path, step: int) -> None:
    while not (steps(run) and steps(run)[-1]["step"] >= step):
        time.sleep(0.05)


def left_by(run: Path) -> tuple:
    losses = [[line[key] for key in KEYS] for line in steps(run)]
    return losses, [file.read_bytes() for file in sorted(run.glob("checkpoints/step-*/*/*.safetensors"))]


def tell(case: str, code: int, said: list[str], left: str) -> None:
    print(f"{case}\n  exit code {code}: {said[0].removeprefix('error: ')}\n  {left}\n", flush=True)


def main(home: Path) -> None:
    import torch

    from infer.evaluation.evaluate import describe_device
    from train.run.checkpoints import checkpoints, newest

    os.environ["HF_DATASETS_CACHE"] = str(home / "cache")
    print(f"{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores; tmpfs in a mount namespace of its own\n")
    end(start(home), 0)
    whole = left_by(home / "run")

    def goes_on(runs: Path) -> str:
        end(start(runs), 0)
        if left_by(runs / "run") != whole:
            raise SystemExit("the run that went on has other losses or weights")
        return "the same command finished it: losses, weights and moments equal, bit by bit"

    small = home / "small"
    mount(small, 7)  # one checkpoint has 4.3 MB
    said = end(start(small), 3)
    folder, skipped = newest(small / "run")
    hidden = list((small / "run" / "checkpoints").glob(".*"))
    assert folder.name == "step-00000012" and not skipped and not hidden, (folder, skipped, hidden)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
    tell("disk full at the second checkpoint", 3, said, f"{folder.name} is whole, no part of another; {goes_on(small)}")

    log = home / "log"
    mount(log, 9)
    room = os.statvfs(log)
    (log / "filler").write_bytes(bytes((room.f_bavail - 2) * room.f_frsize))  # for config.json and lock
    process = start(log)
    said = end(process, 3)
    count = len(steps(log / "run"))
    (log / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(log)], check=True)
    tell("disk full while metrics.jsonl is written", 3, said, f"{count} steps are in it; {goes_on(log)}")

    closed = home / "closed"
    mount(closed, 9, "ro")
    said = end(start(closed), 2)
    tell("read-only disk", 2, said, "nothing was loaded or written")

    lost = home / "lost"
    mount(lost, 64)
    process = start(lost)
    wait_for_step(lost / "run", 5)
    subprocess.run(["umount", "--lazy", str(lost)], check=True)
    said = end(process, 3) if not (lost / "run").exists() else []
    assert not list(lost.iterdir()), "it wrote where the disk had been"
    tell("disk that vanishes (unmounted under the run)", 3, said, "nothing was written in its place")

    gone = home / "gone"
    process = start(gone)
    wait_for_step(gone / "run", 5)
    (gone / "run").rename(home / "elsewhere")
    said = end(process, 3)
    assert not (gone / "run").exists()
    (home / "elsewhere").rename(gone / "run")
    tell("folder moved away under the run", 3, said, f"moved back, {goes_on(gone)}")

    shared = home / "shared"
    process = start(shared)
    wait_for_step(shared / "run", 1)
    said = end(start(shared), 2)
    end(process, 0)
    assert left_by(shared / "run") == whole and len(checkpoints(shared / "run")) == 2
    tell("second run in the same folder", 2, said, "the first one finished: losses and weights equal, bit by bit")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        import tempfile

        with tempfile.TemporaryDirectory() as folder:
            command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, __file__, folder]
            raise SystemExit(subprocess.run(command, check=False).returncode)
