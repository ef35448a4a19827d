"""How well small targets write: held-out loss, and how much of what they write is in loops.

    python benchmarks/writing.py data/embedded [another folder ...]

Loss is that of windows of 512 tokens of the standard library's held-out files and pages. A target then continues 48
windows of 96 tokens from each by 128 tokens, greedy and at temperature 1, without penalties or early ends. `loops`:
share of the answers in which a period of at most 64 tokens comes four times in a row, anywhere; `end`: still at the
end.
"""

import sys

import torch

from data.corpus import stdlib_documents, stdlib_prose
from infer.api import decode
from infer.config import DecodeOptions
from infer.engine.loops import LONGEST_PERIOD, find_loop, loop_period
from infer.targets.loading import load_target
from train.pretrain import held_out_loss, token_stream

PROMPTS, PROMPT_TOKENS, TOKENS = 48, 96, 128


def prompts_of(texts: list[str], tokenizer) -> list[list[int]]:
    """Return windows of the texts, in an order that is the same for every target."""
    windows = []
    for ids in tokenizer(texts)["input_ids"]:
        windows += [ids[at : at + PROMPT_TOKENS] for at in range(0, min(len(ids) - 200, 3200), 400)]
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(0)).tolist()
    return [windows[i] for i in order[:PROMPTS]]


def main(folders: list[str]) -> None:
    """Print a row for each target, kind of text and temperature."""
    print(f"{'target':24}{'text':8}{'loss':>7}{'T':>5}{'loops':>8}{'end':>7}{'tokens':>8}{'characters a token':>20}")
    kinds = {"code": stdlib_documents, "prose": stdlib_prose}
    for folder in folders:
        target = load_target(folder)
        for kind, read in kinds.items():
            texts = [document.text for document in read("held_out")]
            loss = held_out_loss(target.model, token_stream(texts, target.tokenizer, 0), 512)
            for temperature in (0.0, 1.0):
                options = DecodeOptions(method="plain", max_new_tokens=TOKENS, rows=16, temperature=temperature)
                rows = decode(target, None, prompts_of(texts, target.tokenizer), options)
                looped = sum(find_loop(row.ids) is not None for row in rows) / len(rows)
                end = sum(loop_period(row.ids, len(row.ids), LONGEST_PERIOD) > 0 for row in rows) / len(rows)
                tokens = sum(len(row.ids) for row in rows)
                characters = sum(len(target.tokenizer.decode(row.ids)) for row in rows) / tokens
                print(
                    f"{folder[-23:]:24}{kind:8}{loss:7.3f}{temperature:5.1f}{looped:8.0%}{end:7.0%}"
                    f"{tokens / len(rows):8.1f}{characters:20.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1:] or ["data/embedded"])
