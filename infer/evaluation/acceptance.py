"""The acceptance reference of a drafter: public prompts, the target's greedy answers to them, and
how many drafts of chains were accepted by position. `./launch.sh doctor` compares the acceptance of
an engine with it.
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
from infer.targets.target import Target, number_format_name

ACCEPTANCE_REFERENCE_FILE_NAME = "acceptance.json"  # beside an exported drafter's config.json
MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS = 64


class EvaluationPrompt(Protocol):
    """A prompt to evaluate with, as `data.prompts.select_evaluation_prompts` returns them."""

    @property
    def ids(self) -> list[int]:
        """The token ids."""
        ...

    @property
    def kind(self) -> str:
        """The kind of prompt, such as "functions"."""
        ...

    @property
    def report_group(self) -> str | None:
        """The group that the prompt is reported in, None for the evaluation's own prompts."""
        ...

    @property
    def request_text(self) -> str:
        """The text that a client sends for these ids; empty if the prompt is never sent."""
        ...

    @property
    def chat(self) -> bool:
        """Whether the prompt is sent as a user message of a chat."""
        ...


def build_reference(
    target: Target,
    drafter: Drafter,
    prompts: Sequence[EvaluationPrompt],
    sequences: Sequence[DecodedSequence],
) -> AcceptanceReference | None:
    """Build the reference from greedy sequences that were decoded with chains, one for each prompt.
    Return None if no prompt can be sent to a server."""
    draft_length = drafter.block_size - 1
    answers = []
    counts_by_answer = []
    for prompt, sequence in zip(prompts, sequences, strict=True):
        if not prompt.request_text:
            continue
        countable_tokens = len(sequence.ids) - draft_length
        counts = count_accepted_drafts(sequence.commits, countable_tokens, draft_length)
        counts_by_answer.append(counts)
        prompt_ids = list(sequence.prompt)
        answer_ids = list(sequence.ids)
        answers.append(
            ReferenceAnswer(prompt.request_text, prompt.chat, prompt_ids, answer_ids, counts)
        )
    if not answers:
        return None
    return AcceptanceReference(
        dtype=number_format_name(target),
        block_size=drafter.block_size,
        acceptance=AcceptanceCounts.pool(counts_by_answer),
        answers=answers,
    )


def count_accepted_drafts(
    commits: Iterable[int], countable_tokens: int, draft_length: int
) -> AcceptanceCounts:
    """Count the accepted drafts of one sequence, over the rounds that begin before
    `countable_tokens` tokens are committed.

    commits: tokens committed by each round, the prefill's token first
    draft_length: drafted tokens per round
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
    """Decode prompts greedily with chains, as evaluations do, and build the reference. Raises
    ValueError if no prompt can be sent to a server."""
    sendable = [prompt for prompt in prompts if prompt.request_text]
    options = DecodeOptions(
        method="chain",
        max_new_tokens=MAX_ACCEPTANCE_REFERENCE_ANSWER_TOKENS,
        loop_period=MAX_LOOP_PERIOD_TOKENS,
        max_num_batched_tokens=None,
    )
    sequences = decode_prompts(target, drafter, [prompt.ids for prompt in sendable], options)
    reference = build_reference(target, drafter, sendable, sequences)
    if reference is None:
        raise ValueError("none of the prompts can be sent to a server as text")
    return reference


def find_reference(checkpoint: str | Path) -> AcceptanceReference | None:
    """Return the reference of an exported drafter's folder or of a training checkpoint, None if it
    has none."""
    folder = find_drafter_folder(checkpoint)
    if (folder / ACCEPTANCE_REFERENCE_FILE_NAME).is_file():
        return read_result(folder / ACCEPTANCE_REFERENCE_FILE_NAME, AcceptanceReference)
    evaluation_file = folder.resolve().parent / "evaluation" / "evaluation.json"
    if folder.name == "drafter" and evaluation_file.is_file():
        return read_result(evaluation_file, Evaluation).reference
    return None
