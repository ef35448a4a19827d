"""The command `data`: shows which tokens of a data set a drafter would learn, without training."""

import json
import sys
from collections.abc import Iterable, Iterator, Sized
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby, islice
from typing import Any, cast

from data.rows import DataConfig, refuse_embedded_answers
from infer.cli.models import CommandWithTarget
from infer.utils.checks import require_at_least

# Lengths are computed for this number of examples at the start of the data
EXAMPLES_IN_LENGTH_STATISTICS = 2000


@dataclass
class DataCommand(CommandWithTarget):
    """Print what a training run would learn from a data set: number and lengths of the examples,
    chat template variables, and the tokenized text of a few examples.

    show: number of examples to print, with the tokens that carry loss between ⟦ and ⟧
    target: the target, whose tokenizer and chat template are used, see TargetConfig in
        infer/config.py
    data: the data set, see DataConfig in data/rows.py
    """

    show: int = 3
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for invalid options, or data that do not fit the target."""
        super().check()
        require_at_least(self, show=0)
        refuse_embedded_answers(self.data, self.target.path)


def run(config: DataCommand) -> None:
    """Print the number and lengths of the data set's examples, and the first examples."""
    from data.counts import ExampleError
    from data.packing import (
        load_mixed_examples,
        prepare_packed_dataset,
        refuse_empty_dataset,
        tokenize_example,
    )
    from infer.targets.loading import load_tokenizer
    from infer.targets.target import tokenizer_digest
    from infer.utils.progress import Progress

    target = config.target
    tokenizer = load_tokenizer(target.path, target.trust_remote_code, target.chat_template_kwargs)
    digest = tokenizer_digest(tokenizer)
    prepared = prepare_packed_dataset(
        config.data, tokenizer, digest, Progress("tokenising", "texts")
    )
    refuse_empty_dataset(prepared.counts)
    sample = []
    stored_examples = cast(Iterable[dict], load_mixed_examples(config.data).dataset)
    for stored in islice(stored_examples, EXAMPLES_IN_LENGTH_STATISTICS):
        example = json.loads(stored["row"])
        # Invalid examples are skipped here, because `prepared.counts` already reports them.
        with suppress(ExampleError):
            # Training splits long examples. Here, the maximum length sys.maxsize keeps them whole.
            sequences = tokenize_example(example, tokenizer, sys.maxsize)
            sample.append(SampledExample(example, sequences))
    print(*prepared.counts.format_lines(), sep="\n")
    packed_count = len(cast(Sized, prepared.dataset))
    print(f"packed     {packed_count:,} sequences of {config.data.length:,} tokens")
    print("\n".join(describe_sample(sample, target.chat_template_kwargs)))
    for number, sampled in enumerate(sample[: config.show], 1):
        for ids, loss_mask in sampled.sequences:
            print(f"\nexample {number}: {len(ids)} tokens, {sum(loss_mask)} of them learnt")
            print(mark_learnt_text(tokenizer, ids, loss_mask))


@dataclass
class SampledExample:
    """An example of the data set, and the training sequences that are made from it.

    sequences: (token ids, loss mask) of each training sequence
    """

    example: dict
    sequences: list[tuple[list[int], list[bool]]]


def describe_sample(sample: list[SampledExample], template_kwargs: dict) -> Iterator[str]:
    """Yield lines of text with the numbers of chats and of plain texts among the sampled examples,
    and with the lengths of the examples.

    template_kwargs: the variables of the chat template in target.chat_template_kwargs
    """
    chats = [sampled.example["chat"] for sampled in sample if sampled.example["chat"]]
    texts = [sampled.example for sampled in sample if not sampled.example["chat"]]
    answers = []
    for chat in chats:
        answers += [message for message in chat["messages"] if message["role"] == "assistant"]
    cut_count = sum(answer.get("finish") == "length" for answer in answers)
    cut_count += sum(text["cut"] for text in texts)

    lengths = []
    learnt_tokens = 0
    for sampled in sample:
        for ids, loss_mask in sampled.sequences:
            lengths.append(len(ids))
            learnt_tokens += sum(loss_mask)
    lengths.sort()
    median = lengths[len(lengths) // 2]

    yield (
        f"sample     the first {len(sample):,} valid examples: {len(chats):,} chats and "
        f"{len(texts):,} other texts"
    )
    chats_with_options = sum(bool(chat["template"]) for chat in chats)
    yield (
        f"template   chat template variables: {template_kwargs or 'none'}; {chats_with_options:,} "
        "chats set further variables"
    )
    yield (
        f"answers    {len(answers) + len(texts):,}, of which {cut_count:,} were cut by a token "
        "limit and have no end token"
    )
    yield (
        f"tokens     {sum(lengths):,}, {learnt_tokens:,} of them learnt; tokens per sequence: "
        f"median {median:,}, maximum {lengths[-1]:,}"
    )


def mark_learnt_text(tokenizer: Any, ids: list[int], loss_mask: list[bool]) -> str:
    """Return the text of a training sequence, with ⟦ and ⟧ around the tokens that carry loss.

    loss_mask: for each token id, whether it carries loss
    """
    text = ""
    for is_learnt, group in groupby(zip(ids, loss_mask, strict=True), key=lambda pair: pair[1]):
        group_text = tokenizer.decode([token_id for token_id, _ in group])
        text += f"⟦{group_text}⟧" if is_learnt else group_text
    return text
