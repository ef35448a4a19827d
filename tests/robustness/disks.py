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
from kills import COMPARED_RUN_OPTIONS, KILLS_REPOSITORY, count_steps, read_run_results

DISK_RUN_OPTIONS = [*COMPARED_RUN_OPTIONS, "data=stdlib", "data.max_examples=12", "name=run"]


def start_run(runs: Path, *more: str) -> subprocess.Popen:
    command = [
        sys.executable,
        str(KILLS_REPOSITORY / "train" / "main.py"),
        f"runs_dir={runs}",
        *DISK_RUN_OPTIONS,
        *more,
    ]
    environment = os.environ | {"PYTHONPATH": str(KILLS_REPOSITORY), "HF_HUB_OFFLINE": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def finish_run(process: subprocess.Popen, code: int) -> list[str]:
    """Wait for a run, check its exit code, and return its error lines."""
    output = process.communicate(timeout=600)[0]
    if process.returncode != code:
        raise SystemExit(f"exit code {process.returncode}, not {code}:\n{output}")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    if code and (len(errors) != 1 or "Traceback" in output):
        raise SystemExit(f"not one sentence:\n{output}")
    return errors


def mount_tmpfs(folder: Path, megabytes: int) -> None:
    folder.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)], check=True
    )


def print_case(case: str, code: int, errors: list[str], left: str) -> None:
    print(
        f"{case}\n  exit code {code}: {errors[0].removeprefix('error: ')}\n  {left}\n", flush=True
    )


class ReferenceRun:
    """A folder for the cases' disks, and the results of a run without a disk error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        finish_run(start_run(path), 0)
        self.expected = read_run_results(path / "run")

    def resume(self, runs: Path) -> str:
        """Run the same command again, compare its results, and return a sentence about it."""
        finish_run(start_run(runs), 0)
        if read_run_results(runs / "run") != self.expected:
            raise SystemExit("the resumed run has other losses or weights")
        return "the same command finished it: losses, weights and moments equal, bit by bit"


def fill_disk(reference: ReferenceRun) -> None:
    from train.run.checkpoints import find_newest_resumable_folder

    small = reference.path / "small"
    mount_tmpfs(small, 7)  # one checkpoint has 4.3 MB
    errors = finish_run(start_run(small), 3)
    folder, skipped = find_newest_resumable_folder(small / "run")
    hidden = list((small / "run" / "checkpoints").glob(".*"))
    assert folder.name == "step-00000012" and not skipped and not hidden, (folder, skipped, hidden)
    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
    left = f"{folder.name} is whole, no part of another; {reference.resume(small)}"
    print_case("disk full at the second checkpoint", 3, errors, left)


def fill_log(reference: ReferenceRun) -> None:
    log = reference.path / "log"
    mount_tmpfs(log, 9)
    free_space = os.statvfs(log)
    (log / "filler").write_bytes(
        bytes((free_space.f_bavail - 2) * free_space.f_frsize)
    )  # for config.json and lock
    process = start_run(log)
    errors = finish_run(process, 3)
    count = count_steps(log / "run")
    (log / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(log)], check=True)
    print_case(
        "disk full while metrics.jsonl is written",
        3,
        errors,
        f"{count} steps are in it; {reference.resume(log)}",
    )


def fill_ngrams(reference: ReferenceRun) -> None:
    ngrams = reference.path / "ngrams"
    mount_tmpfs(ngrams, 1)
    free_space = os.statvfs(ngrams)
    (ngrams / "filler").write_bytes(
        bytes((free_space.f_bavail - 4) * free_space.f_frsize)
    )  # for config.json and lock
    errors = finish_run(start_run(ngrams, "count_ngrams=true"), 3)
    assert "run/ngrams could not be written: No space left on device" in errors[0], errors
    (ngrams / "filler").unlink()
    subprocess.run(["mount", "-o", "remount,size=64m", str(ngrams)], check=True)
    print_case("disk full while n-grams are counted", 3, errors, reference.resume(ngrams))


def unmount_disk(reference: ReferenceRun) -> None:
    lost = reference.path / "lost"
    mount_tmpfs(lost, 64)
    process = start_run(lost)
    while count_steps(lost / "run") < 5:
        time.sleep(0.05)
    subprocess.run(["umount", "--lazy", str(lost)], check=True)
    errors = finish_run(process, 3) if not (lost / "run").exists() else []
    assert not list(lost.iterdir()), "it wrote where the disk had been"
    print_case(
        "disk that vanishes (unmounted under the run)",
        3,
        errors,
        "nothing was written in its place",
    )


def fill_cache(reference: ReferenceRun) -> None:
    make_targets(reference.path / "targets")
    cache = reference.path / "hub"
    mount_tmpfs(cache, 1)
    space = os.statvfs(cache)
    (cache / "filler").write_bytes(bytes((space.f_bavail - 8) * space.f_frsize))  # of 70 kB 32 fit
    path = reference.path / "targets" / "single"
    options = [
        "target.quantization=int8",
        "target.device=cpu",
        "decoding.method=plain",
        f"target.path={path}",
    ]
    command = [
        sys.executable,
        str(KILLS_REPOSITORY / "infer" / "main.py"),
        "generate",
        "prompt=x",
        *options,
    ]
    environment = os.environ | {
        "PYTHONPATH": str(KILLS_REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(cache),
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    errors = finish_run(subprocess.Popen(command, env=environment, **output), 3)
    left = [file for file in (cache / "blockdraft").iterdir() if not file.name.endswith(".lock")]
    assert not left, left
    print_case("disk full while a target is written in int8", 3, errors, "nothing of it is left")


DISK_CASES = {
    "full": fill_disk,
    "log": fill_log,
    "ngrams": fill_ngrams,
    "vanishes": unmount_disk,
    "cache": fill_cache,
}


def run_cases(path: Path, names: list[str]) -> None:
    import torch

    from infer.evaluation.evaluate import describe_device

    os.environ["HF_DATASETS_CACHE"] = str(path / "cache")
    print(
        f"{describe_device(torch.device('cpu'))}, {os.cpu_count()} cores; tmpfs in a mount "
        "namespace of its own\n"
    )
    reference = ReferenceRun(path)
    for name in names:
        DISK_CASES[name](reference)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "cases", nargs="*", help=f"{', '.join(DISK_CASES)}; all of them if none is named"
    )
    parser.add_argument(
        "--inside", type=Path, help="used by this script itself, once it has a mount namespace"
    )
    args = parser.parse_args()
    if unknown := set(args.cases) - set(DISK_CASES):
        parser.error(f"no case {', '.join(sorted(unknown))}: there are {', '.join(DISK_CASES)}")
    if args.inside:
        run_cases(args.inside, args.cases or list(DISK_CASES))
        return
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, __file__]
        raise SystemExit(
            subprocess.run([*command, *args.cases, "--inside", folder], check=False).returncode
        )


if __name__ == "__main__":
    main()
