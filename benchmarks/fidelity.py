"""Compare a target's next-token distributions in another precision with those in float32.

    python benchmarks/fidelity.py --target FOLDER --dtype bfloat16 --chats answers.jsonl \
        --texts prose.txt code.txt
    python benchmarks/fidelity.py --target FOLDER --quantization int8 --chats answers.jsonl

The table has one row for the chats, rendered by the template, and one for every text file, in
documents of `--length` tokens. Columns: positions; KL divergence of the next token's distribution
from float32's, in nats a token; share of positions with the same most likely token; both
perplexities, and the relative difference. Intervals are 95 % bootstrap intervals over documents.
"""

import argparse
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from inputs import add_target_options, load_cli_target

from data.rows import DataConfig, read_examples
from data.template import render_chat
from infer import Target, load_target
from infer.evaluation.metrics import bootstrap_interval

CHUNK_POSITIONS = 128  # positions whose logits are computed together


def read_chats(path: str, tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of the first --count chats, each at most --length tokens."""
    examples = islice(read_examples(DataConfig("jsonl", path)), args.count)
    documents = []
    for example in examples:
        chat = example["chat"]
        text = render_chat(tokenizer, chat["messages"], chat)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        documents.append(ids[: args.length])
    return documents


def read_text_documents(path: str, tokenizer, args: argparse.Namespace) -> list[list[int]]:
    """Return the token ids of a text's first --bytes bytes in documents of --length tokens."""
    text = Path(path).read_bytes()[: args.bytes].decode(errors="ignore")
    ids = tokenizer(text)["input_ids"]
    return [ids[start : start + args.length] for start in range(0, len(ids) - 1, args.length)]


def compute_log_probs(target: Target, ids: list[int]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities after each token, (Q, V) float32, of CHUNK_POSITIONS tokens."""
    with target.allocate_cache(1, len(ids)).add_rows(1) as cache:
        for start in range(0, len(ids), CHUNK_POSITIONS):
            last = target.extend_cache(
                [ids[start : start + CHUNK_POSITIONS]], cache, ()
            ).last_hidden_states
            yield target.compute_logits(last)[0].float().log_softmax(-1)


@torch.inference_mode()
def compare_document(reference: Target, other: Target, ids: list[int]) -> np.ndarray:
    """Return sums over a document's positions, (5,) float64.

    They are: the number of positions, the KL divergence, the number of equal most likely tokens,
    and the losses of both targets.
    """
    sums = np.zeros(5)
    next_tokens = torch.tensor(ids[1:])
    log_prob_chunks = zip(
        compute_log_probs(reference, ids), compute_log_probs(other, ids), strict=True
    )
    for chunk, (reference_log_probs, other_log_probs) in enumerate(log_prob_chunks):
        start = chunk * CHUNK_POSITIONS
        next_ids = next_tokens[start:][: len(reference_log_probs), None]
        # (Q, V) both
        reference_log_probs = reference_log_probs[: len(next_ids)]
        other_log_probs = other_log_probs[: len(next_ids)]

        differences = reference_log_probs - other_log_probs
        kl = (reference_log_probs.exp() * differences).sum()
        equal = (reference_log_probs.argmax(-1) == other_log_probs.argmax(-1)).sum()
        reference_loss = -reference_log_probs.gather(1, next_ids).sum()
        other_loss = -other_log_probs.gather(1, next_ids).sum()
        sums += [
            len(reference_log_probs),
            float(kl),
            float(equal),
            float(reference_loss),
            float(other_loss),
        ]
    return sums


def mean_interval(sums: np.ndarray, column: int) -> list[float]:
    """Return the 95 % interval of a column's mean per position, NaN where there are too few."""
    limits = bootstrap_interval(
        lambda drawn: sums[drawn, column].sum(1) / sums[drawn, 0].sum(1),
        len(sums),
    )
    return limits or [np.nan] * 2


def format_row(name: str, sums: np.ndarray) -> str:
    """Return a row of the table from the sums of all documents, (documents, 5)."""
    positions = sums[:, 0].sum()
    kl, equal, reference_loss, other_loss = sums[:, 1:].sum(0) / positions
    kl_low, kl_high = mean_interval(sums, 1)
    equal_low, equal_high = mean_interval(sums, 2)
    cells = [
        f"{Path(name).name:<22}{positions:>9.0f}{kl:>9.4f} ({kl_low:.4f} to {kl_high:.4f})",
        f"{100 * equal:>8.1f} % ({100 * equal_low:.1f} to {100 * equal_high:.1f})",
        f"{np.exp(reference_loss):>10.3f}{np.exp(other_loss):>10.3f}",
        f"{100 * np.expm1(other_loss - reference_loss):>+8.2f} %",
    ]
    return "".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_target_options(parser)
    parser.add_argument("--chats", help="chats with answers, in any layout that data=jsonl reads")
    parser.add_argument("--texts", nargs="*", default=[], help="plain text files")
    parser.add_argument("--count", type=int, default=100, help="chats")
    parser.add_argument("--bytes", type=int, default=200_000, help="bytes read of each text")
    parser.add_argument("--length", type=int, default=512, help="maximum tokens of a document")
    args = parser.parse_args()
    other = load_cli_target(args)
    reference = load_target(args.target, device="cpu", dtype="float32")
    print(
        f"{'':<22}{'positions':>9}{'KL a token':>28}{'same top token':>26}"
        f"{'float32':>10}{'other':>10}{'more':>10}"
    )
    sources = [(args.chats, read_chats)] if args.chats else []
    sources += [(path, read_text_documents) for path in args.texts]
    for path, read_documents in sources:
        documents = read_documents(path, reference.tokenizer, args)
        sums = [compare_document(reference, other, ids) for ids in documents if len(ids) > 1]
        print(format_row(path, np.stack(sums)), flush=True)


if __name__ == "__main__":
    main()
