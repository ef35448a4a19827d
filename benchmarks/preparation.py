"""How fast chats become packed rows, how full these are, and how much memory it takes.

    python benchmarks/preparation.py --megabytes 20 --processes 1 2

Chats of two answers with log-normal lengths are written to a file and prepared as training prepares them, by so many
processes, each time from the beginning, with a tokenizer of whole words and Qwen's chat template in short: the time is
that of reading, templates, packing and writing more than of the tokenizer. Memory is the most that all processes hold
at a time, without pages of mapped files.
"""

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

MEANS = (600, 1100, 2000)  # tokens of a chat, about
WORDS = ["the", "of", "and", "to", "in", "that", "was", "for", "with", "they", "have", "this", "from", "word", "which"]
WORDS_OF_A_TOKEN = 0.72  # over the mean of the log-normal factor
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + ' ' + m.content + ' <|im_end|> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant ' }}{% endif %}"
)


def write_chats(path: Path, size: int, mean: int, letters: int) -> None:
    """Write chats of about `mean` tokens on average until the file has `size` bytes; words have `letters` at least."""
    draw, words_of = random.Random(mean), [word.ljust(letters, "x") for word in WORDS]
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < size:
            words = max(8, int(draw.lognormvariate(0, 0.8) * mean * WORDS_OF_A_TOKEN))
            turns = []
            for part in range(4):
                text = " ".join(draw.choices(words_of, k=max(2, words // 4)))
                turns.append({"role": "user" if part % 2 == 0 else "assistant", "content": text})
            file.write(json.dumps({"messages": turns}) + "\n")


def words_tokenizer():
    """Return a tokenizer of whole words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<|unknown|>", "<|im_start|>", "<|im_end|>", "user", "assistant", *WORDS]
    inner = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=names[0], eos_token="<|im_end|>")
    tokenizer.add_special_tokens({"additional_special_tokens": names[1:3]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def prepare(path: str, processes: int) -> None:
    """Prepare a file's rows and print what it took, as JSON."""
    from data.packing import packed_rows
    from data.rows import DataConfig
    from infer.targets.target import tokenizer_digest

    tokenizer = words_tokenizer()
    began = time.perf_counter()
    config = DataConfig(source="jsonl", path=path, length=3072, num_proc=processes)
    rows = packed_rows(config, tokenizer, tokenizer_digest(tokenizer))
    seconds, busy = time.perf_counter() - began, sum(os.times()[:4])
    tokens = sum(int((part["documents"] >= 0).sum()) for part in rows.with_format("numpy").iter(256))
    found = {"tokens": tokens, "full": tokens / (len(rows) * 3072)}
    print(json.dumps(found | {"tokens_per_second": tokens / seconds, "tokens_per_cpu_second": tokens / busy}))


def private_megabytes(group: int) -> float:
    """Return how much memory the processes of a group hold, without pages of mapped files."""
    kilobytes = 0
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(status.parent.name)) == group:
                found = re.search(r"RssAnon:\s+(\d+)", status.read_text())
                kilobytes += int(found[1]) if found else 0
    return kilobytes / 1000


def watched(command: list[str], environment: dict[str, str]) -> dict:
    """Run `prepare` in a group of processes of its own; return what it printed, with the most memory it held."""
    running = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    most = 0.0
    while running.poll() is None:
        most = max(most, private_megabytes(running.pid))
        time.sleep(0.2)
    if running.returncode:
        sys.exit(running.returncode)
    return json.loads(running.stdout.read().splitlines()[-1]) | {"megabytes": most}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--megabytes", type=int, default=20)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--letters", type=int, default=1, help="of a word, at least: long words are large files, soon")
    parser.add_argument("--means", type=int, nargs="+", default=MEANS, help="tokens of a chat, about")
    parser.add_argument("--file", help="prepare this file, once, in this process")
    args = parser.parse_args()
    if args.file:
        return prepare(args.file, args.processes[0])
    columns = ["mean tokens", "processes", "million tokens", "full", "tokens a second", "a CPU second", "MB"]
    print(f"| {' | '.join(columns)} |\n|" + " --- |" * len(columns))
    for mean in args.means:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "chats.jsonl"
            write_chats(file, args.megabytes * 1_000_000, mean, args.letters)
            for processes in args.processes:
                cache = Path(folder) / "cache"
                command = [sys.executable, __file__, f"--file={file}", f"--processes={processes}"]
                found = watched(command, os.environ | {"HF_DATASETS_CACHE": str(cache)})
                shutil.rmtree(cache)
                print(
                    f"| {mean:,} | {processes} | {found['tokens'] / 1e6:.1f} | {100 * found['full']:.1f} % | "
                    f"{found['tokens_per_second']:,.0f} | {found['tokens_per_cpu_second']:,.0f} | "
                    f"{found['megabytes']:.0f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
