"""What a run does when its disk fails it: a full one, and one that vanishes. Read-only ones,
folders that are in use and folders that are moved: tests/train/test_faults.py.

    python tests/robustness/disks.py [full log ngrams vanishes cache]

Each case is a small run of `train/main.py` on a file system of a few megabytes (tmpfs, mounted in a
mount namespace of this script's own by `unshare`, so that nothing is left on the machine). Printed
for each: the exit code, what the run said, and whether what lay there is undamaged: the same
command, once the disk is well again, must end with the losses and weights of a run that met no such
thing, bit by bit.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from damaged_targets import make_targets
from kills import ROOT, SMALL, count_steps, left_by

OPTIONS = [*SMALL, "data=stdlib", "data.max_examples=12", "name=run"]


def start(runs: Path, *more: str) -> subprocess.Popen:
    command = [sys.executable, str(ROOT / "train" / "main.py"), f"runs_dir={runs}", *OPTIONS, *more]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def end(process: subprocess.Popen, code: int) -> list[str]:
    """What a run said that was wrong, after it ended as it should."""
    output = process.communicate(timeout=600)[0]
    if process.returncode != code:
        raise SystemExit(f"exit code {process.returncode}, not {code}:\n{output}")
    said = [line for line in output.splitlines() if line.startswith("error: ")]
    if code and (len(said) != 1 or "Traceback" in output):
        raise SystemExit(f"not one sentence:\n{output}")
    return said


def mount(folder: Path, megabytes: int) -> None:
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True
    )


def tell(case: str, code: int, said: list[str], left: str) -> None:
    print(f"{case}\n  exit code {code}: {said[0].removeprefix('error: ')}\n  {left}\n", flush=True)


class Home:
    """A folder for the cases' disks, and what a run leaves that meets no fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        end(start(path), 0)
        self.expected = left_by(path / "run")

    def resume(self, runs: Path) -> str:
        """Run the same command once more and compare what it leaves; return the sentence that says
        so."""
        end(start(runs), 0)
        if left_by(runs / "run") != self.expected:
            raise SystemExit("the run that went on has other losses or weights")
        return "the same command finished it: losses, weights and moments equal, bit by bit"


def full_disk(home: Home) -> None:
    from train.run.checkpoints import newest

    small = home.path / "small"
    mount(small, 7)  # one checkpoint has 4.3 MB
    said = end(start(small), 3)
    folder, skipped = newest(small / "run")
    hidden = list((small / "run" / "checkpoints").glob(".*"))
    assert folder.name == "step-00000012" and not skipped and not hidden, (folder, skipped, hidden)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
    left = f"{folder.name} is whole, no part of another; {home.resume(small)}"
    tell("disk full at the second checkpoint", 3, said, left)


def full_log(home: Home) -> None:
    log = home.path / "log"
    mount(log, 9)
    room = os.statvfs(log)
    (log / "filler").write_bytes(
        bytes((room.f_bavail - 2) * room.f_frsize)
    )  # for config.json and lock
    process = start(log)
    said = end(process, 3)
    count = count_steps(log / "run")
    (log / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(log)], check=True)
    tell(
        "disk full while metrics.jsonl is written",
        3,
        said,
        f"{count} steps are in it; {home.resume(log)}",
    )


def full_ngrams(home: Home) -> None:
    ngrams = home.path / "ngrams"
    mount(ngrams, 1)
    room = os.statvfs(ngrams)
    (ngrams / "filler").write_bytes(
        bytes((room.f_bavail - 4) * room.f_frsize)
    )  # for config.json and lock
    said = end(start(ngrams, "count_ngrams=true"), 3)
    assert "run/ngrams could not be written: No space left on device" in said[0], said
    (ngrams / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(ngrams)], check=True)
    tell("disk full while n-grams are counted", 3, said, home.resume(ngrams))


def vanishing_disk(home: Home) -> None:
    lost = home.path / "lost"
    mount(lost, 64)
    process = start(lost)
    while count_steps(lost / "run") < 5:
        time.sleep(0.05)
    subprocess.run(["umount", "--lazy", str(lost)], check=True)
    said = end(process, 3) if not (lost / "run").exists() else []
    assert not list(lost.iterdir()), "it wrote where the disk had been"
    tell(
        "disk that vanishes (unmounted under the run)", 3, said, "nothing was written in its place"
    )


def full_cache(home: Home) -> None:
    make_targets(home.path / "targets")
    cache = home.path / "hub"
    mount(cache, 1)
    space = os.statvfs(cache)
    (cache / "filler").write_bytes(bytes((space.f_bavail - 8) * space.f_frsize))  # of 70 kB 32 fit
    path = home.path / "targets" / "single"
    options = [
        "target.quantization=int8",
        "target.device=cpu",
        "decoding.method=plain",
        f"target.path={path}",
    ]
    command = [sys.executable, str(ROOT / "infer" / "main.py"), "generate", "prompt=x", *options]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache),
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    said = end(subprocess.Popen(command, env=environment, **output), 3)
    left = [file for file in (cache / "blockdraft").iterdir() if not file.name.endswith(".lock")]
    assert not left, left
    tell("disk full while a target is written in int8", 3, said, "nothing of it is left")


CASES = {
    "full": full_disk,
    "log": full_log,
    "ngrams": full_ngrams,
    "vanishes": vanishing_disk,
    "cache": full_cache,
}


def run_cases(path: Path, names: list[str]) -> None:
    import torch

    from infer.evaluation.evaluate import describe_device

    os.environ["HF_DATASETS_CACHE"] = str(path / "cache")
    print(
        f"{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores; tmpfs in a mount namespace of its own\n"
    )
    home = Home(path)
    for name in names:
        CASES[name](home)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", help=f"{', '.join(CASES)}; all of them if none is named"
    )
    parser.add_argument(
        "--inside", type=Path, help="used by this script itself, once it has a mount namespace"
    )
    args = parser.parse_args()
    if unknown := set(args.cases) - set(CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(CASES)}")
    if args.inside:
        run_cases(args.inside, args.cases or list(CASES))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, __file__]
        raise SystemExit(
            subprocess.run([*command, *args.cases, "--inside", folder], check=False).returncode
        )


if __name__ == "__main__":
    main()
