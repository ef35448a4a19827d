"""What other arithmetic does to a target's distributions, beside its float32: on chats and on plain
texts.

    python benchmarks/fidelity.py --target FOLDER --dtype bfloat16 --chats answers.jsonl --texts
    prose.txt code.txt python benchmarks/fidelity.py --target FOLDER --quantization int8 --chats
    answers.jsonl

A row for the chats, as the template writes them, and one for every text, in documents of `--length`
tokens: positions; the KL divergence of the next token's distribution, float32's to the other's, in
    nats a token; the share of positions
with the same likeliest token; the perplexities, and by how much the other's is larger. Intervals
hold 95% of bootstrap samples of the documents.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from inputs import add_target, target_of

from data.rows import DataConfig, read_rows
from data.template import apply
from infer import Target, load_target
from infer.evaluation.ruler import interval

PIECE = 128  # positions whose logits are computed together


def chats_of(path: str, tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the first chats, of each `--length` at most."""
    chats = (row["chat"] for row in islice(read_rows(DataConfig("jsonl", path)), args.count))
    texts = [apply(tokenizer, chat["messages"], chat) for chat in chats]
    return [tokenizer(text, add_special_tokens=False)["input_ids"][: args.length] for text in texts]


def documents_of(path: str, tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of a text's first bytes, `--length` at a time."""
    ids = tokenizer(Path(path).read_bytes()[: args.bytes].decode(errors="ignore"))["input_ids"]
    return [ids[start : start + args.length] for start in range(0, len(ids) - 1, args.length)]


def log_probs(target: Target, ids: list[int]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities of what follows each token, (Q, V) float32, PIECE tokens at a
    time."""
    with target.cache(1, len(ids)).add(1) as cache:
        for start in range(0, len(ids), PIECE):
            last = target.extend([ids[start : start + PIECE]], cache, ()).last
            yield target.head(last)[0].float().log_softmax(-1)


@torch.inference_mode()
def compare(exact: Target, other: Target, ids: list[int]) -> np.ndarray:
    """Return sums over a document's positions: of 1, of KL, of equal choices and of both losses,
    (5,) float64."""
    sums = np.zeros(5)
    following = torch.tensor(ids[1:])
    for start, (ours, theirs) in enumerate(
        zip(log_probs(exact, ids), log_probs(other, ids), strict=True)
    ):
        next_ids = following[start * PIECE :][: len(ours), None]
        # (Q, V) both
        ours = ours[: len(next_ids)]
        theirs = theirs[: len(next_ids)]
        same = (ours.argmax(-1) == theirs.argmax(-1)).sum()
        losses = [-log.gather(1, next_ids).sum() for log in (ours, theirs)]
        sums += [len(ours), *map(float, ((ours.exp() * (ours - theirs)).sum(), same, *losses))]
    return sums


def line(name: str, sums: np.ndarray) -> str:
    """Return a row of the table from the sums of all documents (P, 5)."""
    kl, same, ours, theirs = sums[:, 1:].sum(0) / sums[:, 0].sum()
    kl_range, same_range = (
        interval(
            lambda drawn, column=column: sums[drawn, column].sum(1) / sums[drawn, 0].sum(1),
            len(sums),
        )
        or [np.nan] * 2
        for column in (1, 2)
    )
    shown = f"{Path(name).name:<22}{sums[:, 0].sum():>9.0f}{kl:>9.4f} ({kl_range[0]:.4f} to {kl_range[1]:.4f})"
    shown += f"{100 * same:>8.1f} % ({100 * same_range[0]:.1f} to {100 * same_range[1]:.1f})"
    return (
        shown
        + f"{np.exp(ours):>10.3f}{np.exp(theirs):>10.3f}{100 * np.expm1(theirs - ours):>+8.2f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target(parser)
    parser.add_argument("--chats", help="chats with answers, in any layout that data=jsonl reads")
    parser.add_argument("--texts", nargs="*", default=[], help="plain text files")
    parser.add_argument("--count", type=int, default=100, help="chats")
    parser.add_argument("--bytes", type=int, default=200_000, help="of a text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a document at most")
    args = parser.parse_args()
    other = target_of(args)
    exact = load_target(args.target, device="cpu", dtype="float32")
    print(
        f"{'':<22}{'positions':>9}{'KL a token':>28}{'same top token':>26}{'float32':>10}{'other':>10}{'more':>10}"
    )
    asked = [(args.chats, chats_of)] if args.chats else []
    for path, read in asked + [(text, documents_of) for text in args.texts]:
        sums = [
            compare(exact, other, ids) for ids in read(path, exact.tokenizer, args) if len(ids) > 1
        ]
        print(line(path, np.stack(sums)), flush=True)


if __name__ == "__main__":
    main()
