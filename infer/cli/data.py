"""`data`: what would be learnt of a data set, before anything is trained."""

import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice

from data.rows import DataConfig, check_source
from infer.cli.models import OfTarget
from infer.utils.checks import at_least

SAMPLE = 2000  # used examples that lengths are taken of, from the first on


@dataclass
class DataCommand(OfTarget):
    """Print what a run would train on: counts, lengths, chat template variables, and a few packed
    sequences.

    show: number of packed sequences to print, with trained tokens between ⟦ and ⟧
    target: the target, whose tokenizer and chat template are used, see TargetConfig in
        infer/config.py
    data: the data set, see DataConfig in data/rows.py
    """

    show: int = 3
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for what cannot be shown."""
        super().check()
        at_least(self, show=0)
        check_source(self.data, self.target.path)


def run(config: DataCommand) -> None:
    from data.counts import ExampleError
    from data.packing import mixed_rows, pieces_of, prepare_rows, refuse_no_rows
    from infer.targets.loading import load_tokenizer
    from infer.targets.target import tokenizer_digest
    from infer.utils.progress import Progress

    place = config.target
    tokenizer = load_tokenizer(place.path, place.trust_remote_code, place.chat_template_kwargs)
    digest = tokenizer_digest(tokenizer)
    prepared = prepare_rows(config.data, tokenizer, digest, Progress("tokenising", "texts"))
    refuse_no_rows(prepared.counts)
    read = []  # (row, its sequences)
    for stored in islice(mixed_rows(config.data).rows, SAMPLE):
        row = json.loads(stored["row"])
        with suppress(ExampleError):  # it is among the counts
            read.append((row, pieces_of(row, tokenizer, sys.maxsize)))  # not cut to rows
    print(*prepared.counts.lines(), sep="\n")
    print(f"packed     {len(prepared.rows):,} rows of {config.data.length:,} tokens")
    print("\n".join(report(read, place.chat_template_kwargs)))
    for number, (_, sequences) in enumerate(read[: config.show], 1):
        for ids, loss in sequences:
            print(
                f"\nrow {number}: {len(ids)} tokens, {sum(loss)} learnt\n{marked(tokenizer, ids, loss)}"
            )


def report(read: list[tuple[dict, list]], kwargs: dict) -> Iterator[str]:
    """Yield lines about the kinds and lengths of some rows and their sequences; `kwargs`: what the
    chat template is told."""
    chats = [row["chat"] for row, _ in read if row["chat"]]
    answers = [turn for chat in chats for turn in chat["messages"] if turn["role"] == "assistant"]
    others = [row for row, _ in read if not row["chat"]]
    cut = sum(turn.get("finish") == "length" for turn in answers) + sum(
        row["cut"] for row in others
    )
    lengths = sorted(len(ids) for _, sequences in read for ids, _ in sequences)
    total = sum(lengths)
    learnt = sum(sum(loss) for _, sequences in read for _, loss in sequences)
    yield f"sample     {len(read):,} of the used examples: {len(chats):,} chats, {len(others):,} other texts"
    told = sum(bool(chat["template"]) for chat in chats)
    yield f"template   told {kwargs or 'nothing'}; {told:,} rows tell it more themselves"
    yield f"answers    {len(answers) + len(others):,}, of which {cut:,} were cut by a limit: learnt without an end"
    median = lengths[len(lengths) // 2]
    most = lengths[-1]
    yield f"tokens     {total:,}, {learnt:,} of them learnt; a text has {median:,} (median), at most {most:,}"


def marked(tokenizer, ids: list[int], loss: list[bool]) -> str:
    """Return a text with what is learnt in brackets."""
    text = ""
    for learnt, group in groupby(zip(ids, loss, strict=True), key=lambda pair: pair[1]):
        words = tokenizer.decode([id for id, _ in group])
        text += f"⟦{words}⟧" if learnt else words
    return text
