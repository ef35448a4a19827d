"""Builds, measures and reads the acceptance reference of a drafter.

The reference contains public prompts, the target's greedy answers to these prompts, and how many
draft tokens were accepted at each position of the draft. It is measured with chains, which are
drafts without branches. `./launch.sh doctor` decodes the same prompts with another engine and
compares the acceptance.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from infer.api import decode_prompts
from infer.config import DecodeOptions
from infer.drafters.base import Drafter
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS
from infer.engine.sequence import Sequence as DecodedSequence
from infer.evaluation.results import (
    AcceptanceCounts,
    AcceptanceReference,
    Evaluation,
    ReferenceAnswer,
    read_result,
)
from infer.formats.folders import find_drafter_folder
from infer.targets.target import Target, weight_format_name

# Name of the file that stores the acceptance reference in the folder of an exported drafter
ACCEPTANCE_REFERENCE_FILE_NAME = "acceptance.json"
MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS = 64


class EvaluationPrompt(Protocol):
    """Interface of a prompt on which drafters are evaluated. data/prompts.py implements it."""

    @property
    def ids(self) -> list[int]:
        """The token ids of the prompt."""
        ...

    @property
    def kind(self) -> str:
        """The kind of prompt, such as "functions"."""
        ...

    @property
    def report_group(self) -> str | None:
        """The group of prompts that reports show separately; None for a held-out prompt."""
        ...

    @property
    def text_with_same_tokens(self) -> str:
        """The text that a client sends to a server for this prompt.

        It is empty if no text is tokenised to exactly `ids`.
        """
        ...

    @property
    def chat(self) -> bool:
        """Whether `text_with_same_tokens` is sent as a user message of a chat. If false, it is sent
        as text that the target continues.
        """
        ...


def build_reference(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvaluationPrompt],
    sequences: Sequence[DecodedSequence],
) -> AcceptanceReference | None:
    """Build the acceptance reference: prompts, answers, and counts of accepted draft tokens.

    prompts: prompts whose `text_with_same_tokens` is empty are left out, because another engine
        could not be given the same token ids
    sequences: for each prompt, the finished sequence. Its answer was decoded greedily, with a chain
        (a draft without branches) in each round

    Returns None if all prompts are left out.
    """
    draft_length = drafter.block_size - 1
    answers = []
    counts_by_answer = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        if not prompt.text_with_same_tokens:
            continue
        countable_tokens = len(sequence.ids) - draft_length
        counts = count_accepted_drafts(sequence.commits, countable_tokens, draft_length)
        counts_by_answer.append(counts)
        prompt_ids = list(sequence.prompt)
        answer_ids = list(sequence.ids)
        answers.append(
            ReferenceAnswer(
                prompt.text_with_same_tokens, prompt.chat, prompt_ids, answer_ids, counts
            )
        )
    if not answers:
        return None
    return AcceptanceReference(
        dtype=weight_format_name(target),
        block_size=drafter.block_size,
        acceptance=AcceptanceCounts.pool(counts_by_answer),
        answers=answers,
    )


def count_accepted_drafts(
    commits: Iterable[int], countable_tokens: int, draft_length: int
) -> AcceptanceCounts:
    """Count, over the rounds of one sequence, how often the draft token at each position was
    accepted.

    commits: how many tokens the prefill and each decoding round added to the output, in this order
    countable_tokens: only rounds that begin when the output has fewer tokens than this are counted
    draft_length: number of drafted tokens per round
    """
    committed, *round_commits = commits
    rounds = 0
    accepted = [0] * draft_length
    for commit in round_commits:
        if committed >= countable_tokens:
            break
        rounds += 1
        committed += commit
        for k in range(commit - 1):
            accepted[k] += 1
    return AcceptanceCounts(rounds, accepted)


def measure_reference(
    target: Target, drafter: Drafter, prompts: Sequence[EvaluationPrompt]
) -> AcceptanceReference:
    """Decode prompts greedily, with a chain (a draft without branches) in each round. Return the
    acceptance reference: prompts, answers, and counts of accepted draft tokens.

    Prompts whose `text_with_same_tokens` is empty are left out. Raises ValueError if no prompt is
    left.
    """
    sendable = [prompt for prompt in prompts if prompt.text_with_same_tokens]
    options = DecodeOptions(
        method="chain",
        max_new_tokens=MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS,
        loop_period=MAX_LOOP_PERIOD_TOKENS,
        max_num_batched_tokens=None,
    )
    sequences = decode_prompts(target, drafter, [prompt.ids for prompt in sendable], options)
    reference = build_reference(target, drafter, sendable, sequences)
    if reference is None:
        raise ValueError(
            "no prompt can be sent to a server as text, because the text of every prompt is "
            "tokenised to other token ids than the prompt has: give at least one other prompt"
        )
    return reference


def load_stored_reference(checkpoint: str | Path) -> AcceptanceReference | None:
    """Return the acceptance reference that is stored with a drafter: prompts, answers, and counts
    of accepted draft tokens. Return None if no reference is stored.

    checkpoint: the folder of an exported drafter, or a training checkpoint
    """
    folder = find_drafter_folder(checkpoint)
    if (folder / ACCEPTANCE_REFERENCE_FILE_NAME).is_file():
        return read_result(folder / ACCEPTANCE_REFERENCE_FILE_NAME, AcceptanceReference)
    evaluation_file = folder.resolve().parent / "evaluation" / "evaluation.json"
    if folder.name == "drafter" and evaluation_file.is_file():
        return read_result(evaluation_file, Evaluation).reference
    return None
