"""An n-gram file counted from a folder of Python code, and looked up: size, speed, memory.

    python benchmarks/ngram.py
    python benchmarks/ngram.py --bpe 32768

The corpus are the .py files of a folder, by default of this interpreter's packages, each a document, tokenised with the
tokenizer of data/embedded, or with a byte-level BPE that is trained on a sample of them. Lookups are for contexts drawn
from the corpus, each with 25 candidates: the token that follows, and 24 others drawn from the corpus. Worker processes
import this file, so it imports torch (with infer.ngrams.model) only where it is needed.
"""

import argparse
import hashlib
import multiprocessing
import os
import random
import sysconfig
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from infer.ngrams.count import count_ngrams

ROOT = Path(__file__).resolve().parent.parent
CANDIDATES = 25  # DART appendix D


def texts(folder: Path) -> Iterator[str]:
    """The folder's .py files in a random order that is always the same."""
    paths = sorted(folder.rglob("*.py"))
    random.Random(0).shuffle(paths)
    for path in paths:
        yield path.read_text(errors="replace")


def trained(folder: Path, size: int, sample: int = 20_000_000):
    """A byte-level BPE tokenizer of `size` ids, trained on the first `sample` characters of the corpus."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def first() -> Iterator[str]:
        left = sample
        for text in texts(folder):
            yield text
            left -= len(text)
            if left < 0:
                return

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(first(), trainer)
    return tokenizer


def tokenise(tokenizer, folder: Path, limit: int, out: Path) -> np.ndarray:
    """Writes the corpus' first `limit` tokens as uint32 and returns where each document ends (D,) int64."""
    ends, total, batch = [], 0, []
    with out.open("wb") as file:

        def write() -> int:
            written = 0
            for encoding in tokenizer.encode_batch(batch, add_special_tokens=False):
                np.array(encoding.ids[: limit - total - written], np.uint32).tofile(file)
                written += min(len(encoding.ids), limit - total - written)
                ends.append(total + written)
            batch.clear()
            return written

        for text in texts(folder):
            batch.append(text)
            if len(batch) == 64:
                total += write()
                if total >= limit:
                    break
        total += write()
    return np.array(ends)


def resident(pid: int) -> int:
    """Bytes of a process that are in memory; 0 if it is gone."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


class PeakMemory(threading.Thread):
    """Watches this process and its children; `peak` is the largest sum seen, in bytes."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.02):
            pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
            self.peak = max(self.peak, sum(map(resident, pids)))


def anonymous_and_file() -> np.ndarray:
    """Resident bytes of this process: its own memory, and what files back."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return np.array([values["Anonymous"], values["Rss"] - values["Anonymous"]])


def compiled_loop():
    """A compiled loop of lookups: probabilities of tokens (n, T) after contexts (n, c), their sum."""
    from infer.ngrams.model import gather_probabilities
    from infer.utils.jit import njit

    @njit
    def look_up(arrays, total, contexts, tokens):
        counts, out, result = np.empty(tokens.shape[1], np.int64), np.empty(tokens.shape[1]), 0.0
        for i in range(len(contexts)):
            gather_probabilities(arrays, total, contexts[i], 0, contexts.shape[1], tokens[i], counts, out)
            result += out.sum()
        return result

    return look_up


def per_second(run: Callable[[], object], items: int) -> float:
    mark = time.perf_counter()
    run()
    return items / (time.perf_counter() - mark)


def lookups(path: Path, digest: str, corpus: np.ndarray, order: int, repeats: int) -> dict[str, str]:
    """Opens a model and looks up what a drafter would ask after `repeats` contexts of the corpus."""
    from infer.ngrams.model import NGram

    generator = np.random.default_rng(0)
    places = generator.integers(order, len(corpus), repeats)
    contexts = np.stack([corpus[places - i] for i in range(order - 1, 0, -1)], 1).astype(np.int64)  # (n, order - 1)
    others = corpus[generator.integers(0, len(corpus), (repeats, CANDIDATES - 1))]
    tokens = np.sort(np.concatenate([corpus[places][:, None], others], 1).astype(np.int64), 1)  # (n, 25)
    some, rows = contexts[: repeats // 10].tolist(), tokens[: repeats // 10].tolist()
    look_up, found = compiled_loop(), np.zeros(len(some), np.int64)
    tiny = count_ngrams([[0, 1, 0, 1]], 2, 2, path.with_name("tiny"), digest, workers=1)  # compiles everything
    look_up(tiny.arrays, tiny.tokens, contexts[:1], tokens[:1])
    tiny.probabilities([0], [1]), tiny.continuations([0])

    def one_by_one() -> None:
        for context, row in zip(some, rows, strict=True):
            model.probabilities(context, row)

    def continuations() -> None:
        for i, context in enumerate(some):
            found[i] = len(model.continuations(context)[0])

    memory = anonymous_and_file()
    mark = time.perf_counter()
    model = NGram.open(path, digest)
    opened = time.perf_counter() - mark
    first, again = (
        per_second(lambda: look_up(model.arrays, model.tokens, contexts, tokens), repeats) for _ in range(2)
    )
    method, every = per_second(one_by_one, len(some)), per_second(continuations, len(some))
    own, mapped = (anonymous_and_file() - memory) / 1e6
    mark = time.perf_counter()
    NGram.open(path, digest, check=True)
    checked = time.perf_counter() - mark
    return {
        "open": f"{1e3 * opened:.2f} ms; {checked:.2f} s with all checksums",
        f"{CANDIDATES} probabilities, compiled": f"{first:,.0f} /s, then {again:,.0f} /s: {1e6 / again:.2f} us",
        f"{CANDIDATES} probabilities, method": f"{method:,.0f} /s: {1e6 / method:.1f} us",
        "all continuations, method": f"{every:,.0f} /s: {1e6 / every:.1f} us, {found.mean():.1f} tokens on average",
        "memory that all this added": f"{own:.2f} MB anonymous, {mapped:.1f} MB of the file",
    }


def agrees(model, corpus: np.ndarray, ends: np.ndarray, samples: int = 60) -> bool:
    """Whether counts, continuations and probabilities after sampled contexts are those of a plain dictionary."""
    generator = random.Random(1)
    documents = np.repeat(np.arange(len(ends), dtype=np.int32), np.diff(ends, prepend=0))  # of every position
    for sample in range(samples):
        length = 1 + sample % max(model.order - 1, 1)
        at = generator.randrange(len(corpus) - model.order)
        context = corpus[at : at + length].tolist()
        last = len(corpus) - length + 1
        matches = documents[:last] == documents[length - 1 :]
        for i, token in enumerate(context):
            matches &= corpus[i : last + i] == token
        starts = np.flatnonzero(matches)
        followed = starts[starts + length < len(corpus)]
        followed = followed[documents[followed] == documents[followed + length]]
        counts = dict(Counter(corpus[followed + length].tolist()))
        tokens, found = model.continuations(context)
        same = (
            dict(zip(tokens.tolist(), found.tolist(), strict=True)) == counts
            and model.count(context) == len(starts)
            and model.probabilities(context, list(counts)).tolist() == [n / len(starts) for n in counts.values()]
        )
        if not same:
            return False
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--files", type=Path, default=Path(sysconfig.get_paths()["purelib"]), help="folder of .py files"
    )
    parser.add_argument("--tokens", type=int, default=25_000_000, help="at most")
    parser.add_argument("--bpe", type=int, help="train a tokenizer of so many ids")
    parser.add_argument("--order", type=int, help="6, or 3 with --bpe")
    parser.add_argument("--workers", type=int, help="one a core")
    parser.add_argument("--contexts", type=int, default=200_000)
    args = parser.parse_args()
    order = args.order or (3 if args.bpe else 6)

    from tokenizers import Tokenizer

    from infer.ngrams.model import NGram

    mark = time.perf_counter()
    embedded = str(ROOT / "data" / "embedded" / "tokenizer.json")
    tokenizer = trained(args.files, args.bpe) if args.bpe else Tokenizer.from_file(embedded)
    training = time.perf_counter() - mark
    vocabulary, digest = tokenizer.get_vocab_size(), hashlib.sha256(tokenizer.to_str().encode()).hexdigest()
    with tempfile.TemporaryDirectory(prefix="ngrams-") as name:
        folder = Path(name)
        mark = time.perf_counter()
        ends = tokenise(tokenizer, args.files, args.tokens, folder / "corpus")
        tokenising = time.perf_counter() - mark
        corpus = np.memmap(folder / "corpus", np.uint32, "r")
        del tokenizer
        documents = (corpus[end - length : end] for end, length in zip(ends, np.diff(ends, prepend=0), strict=True))
        before, watch = resident(os.getpid()), PeakMemory()
        watch.start()
        mark = time.perf_counter()
        model = count_ngrams(documents, vocabulary, order, folder / "model", digest, args.workers)
        building = time.perf_counter() - mark
        watch.done.set()
        watch.join()
        lines = {
            "tokens": f"{model.tokens:,} in {len(ends):,} documents",
            "order": model.order,
            "vocabulary": f"{model.vocabulary:,}",
            "nodes by level": "  ".join(f"{count:,}" for count in model.nodes),
            "bytes on disk": f"{model.size_bytes:,}",
            "bytes per node": f"{model.size_bytes / sum(model.nodes):.2f}",
            "counts in the overflow table": f"{len(model.arrays.overflow_nodes):,}",
            "tokenizer": f"trained in {training:.1f} s" if args.bpe else "the embedded one",
            "tokenised": f"{tokenising:.1f} s, {model.tokens / tokenising:,.0f} tokens/s",
            "built": f"{building:.1f} s, {model.tokens / building:,.0f} tokens/s",
            "processes for that": args.workers or "one a core",
            "peak resident, all of them": f"{watch.peak / 1e6:,.0f} MB; before the build {before / 1e6:,.0f} MB",
            **lookups(folder / "model", digest, corpus, order, args.contexts),
            "as a plain dictionary says": "yes" if agrees(NGram.open(model.path), corpus, ends) else "NO",
        }
        for label, value in lines.items():
            print(f"{label:<30}{value}")


if __name__ == "__main__":
    main()
