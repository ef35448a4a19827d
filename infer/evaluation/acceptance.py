"""Acceptance by position that can be measured again: prompts that anybody may see, the target's
answers, and how many drafts of a chain were accepted on them. `./launch.sh doctor` compares with it
what an engine reaches.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from infer.api import decode
from infer.config import DecodeOptions
from infer.drafters.base import Drafter
from infer.engine.loops import LONGEST_PERIOD
from infer.engine.sequence import Sequence as Text
from infer.evaluation.results import Acceptance, Evaluation, KnownText, Reference, read_result
from infer.formats.folders import find_folder
from infer.targets.target import Target, number_format

FILE = "acceptance.json"  # beside an exported drafter's config.json
TOKENS = 64  # of an answer


class AnyPrompt(Protocol):
    """A prompt to evaluate with, such as `data.prompts.evaluation_prompts` returns."""

    ids: list[int]
    kind: str  # what it is, such as "functions"
    beside: (
        str | None
    )  # what those are called that are reported beside the others; None: one of the others
    said: str  # what a client sends for these ids; empty for those that nobody else is asked
    chat: bool  # it is sent as a chat's question


def reference_of(
    target: Target, drafter: Drafter, prompts: Sequence[AnyPrompt], texts: Sequence[Text]
) -> Reference | None:
    """Return the reference of greedy texts that a chain wrote, prompt by prompt; None where no
    prompt can be sent."""
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if prompt.said]
    if not pairs:
        return None
    length = drafter.block_size - 1
    counts = [count_accepted(text.commits, len(text.ids) - length, length) for _, text in pairs]
    return Reference(
        dtype=number_format(target),
        block_size=drafter.block_size,
        acceptance=Acceptance.of_all(counts),
        texts=[
            KnownText(prompt.said, prompt.chat, list(text.prompt), list(text.ids), count)
            for (prompt, text), count in zip(pairs, counts, strict=True)
        ],
    )


def count_accepted(commits: Iterable[int], until: int, drafted: int) -> Acceptance:
    """Count the accepted drafts of a text's rounds that begin before `until` tokens are written,
    given what was committed round by round (the prefill's first)."""
    written, *later = commits
    rounds = 0
    accepted = [0] * drafted
    for commit in later:
        if written >= until:
            break
        rounds = rounds + 1
        written = written + commit
        for k in range(commit - 1):
            accepted[k] += 1
    return Acceptance(rounds, accepted)


def measure_reference(target: Target, drafter: Drafter, prompts: Sequence[AnyPrompt]) -> Reference:
    """Decode prompts by chains, greedily, as evaluations do. Raises ValueError where none can be
    sent."""
    prompts = [prompt for prompt in prompts if prompt.said]
    if not prompts:
        raise ValueError("there is no prompt that could be sent to a server")
    options = DecodeOptions(
        method="chain",
        max_new_tokens=TOKENS,
        loop_period=LONGEST_PERIOD,
        max_num_batched_tokens=None,
    )
    return reference_of(
        target,
        drafter,
        prompts,
        decode(target, drafter, [prompt.ids for prompt in prompts], options),
    )


def find_reference(checkpoint: str | Path) -> Reference | None:
    """Return what a drafter's folder or a training checkpoint says of its acceptance, None where it
    says nothing."""
    folder = find_folder(checkpoint)
    if (folder / FILE).is_file():
        return read_result(folder / FILE, Reference)
    measured = folder.resolve().parent / "evaluation" / "evaluation.json"
    if folder.name == "drafter" and measured.is_file():
        return read_result(measured, Evaluation).reference
    return None
