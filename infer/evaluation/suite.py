"""Evaluates a drafter on a suite of question sets.

The result of each finished set is written to a file. If the command is repeated, a finished set is
not decoded again.

A chat may have several turns (a user message and its answer). The prompt of a later turn contains
the answers of baseline decoding to the earlier turns. The other methods would give the same
answers, because decoding is lossless and all methods use the same seed.
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Protocol

from infer.api import decode_output, max_positions
from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.drafters.families import PROMPT_LOOKUP_FAMILY
from infer.evaluation.evaluate import describe_device, summarise_prompt_set
from infer.evaluation.measurement import (
    DecodingVariant,
    ProgressCallback,
    PromptSet,
    VariantMeasurement,
    describe_time_limit,
    list_variants,
    measure_variants,
    merge_measurements,
)
from infer.evaluation.results import SetResult, SuiteResult, read_result, write_result
from infer.formats.folders import find_drafter_folder
from infer.targets.target import Target, weight_format_name
from infer.utils.files import file_digest, json_digest, refuse_changed_settings
from infer.utils.renamed_options import rename_old_options_in_section

MIN_SECONDS_PER_TOKEN = 1e-9


class LoadedQuestionSet(Protocol):
    """Interface of a loaded question set. data/suites.py implements it."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...

    @property
    def chats(self) -> Sequence[Sequence[list[dict[str, str]]]]:
        """The chats of the set. A chat is a list of turns. A turn is a list of the messages that
        are added to the chat before the model's next answer.
        """
        ...


class SuiteOptions(Protocol):
    """Interface of the options that choose a suite of question sets. SuiteConfig in data/suites.py
    implements it.
    """

    name: str | None
    thinking: bool

    @property
    def temperatures(self) -> Sequence[float]:
        """The temperatures at which every set is decoded."""
        ...


def evaluate_suite(
    target: Target,
    drafter: Drafter,
    checkpoint: str,
    question_sets: Sequence[LoadedQuestionSet],
    options: SuiteOptions,
    evaluation: EvaluationConfig,
    out: Path,
    log: Callable[[str], None] = lambda line: None,
    progress: ProgressCallback = lambda done, total: None,
) -> SuiteResult:
    """Decode every question set at every temperature, with every decoding method.

    The result of each set is written to the folder out/sets as soon as it is finished, and the
    results of all sets to out/suite.json. The time limit `evaluation.max_minutes` is divided
    equally among the sets.

    checkpoint: folder or name from which the drafter was loaded
    log: called with a line of text for each set

    Raises ValueError if `out` contains a set that was measured with other settings, or if all
    questions of a set are too long for the target.
    """
    (out / "sets").mkdir(parents=True, exist_ok=True)
    weights_digest = drafter_digest(checkpoint)
    if drafter.quantised:
        weights_digest += "-int8"

    results = []
    jobs = [
        (temperature, question_set)
        for temperature in options.temperatures
        for question_set in question_sets
    ]
    end = time.monotonic() + 60 * (evaluation.max_minutes or math.inf)
    for i, (temperature, question_set) in enumerate(jobs):
        config = replace(evaluation, temperature=temperature)
        settings = collect_settings(target, weights_digest, question_set, options.thinking, config)
        file = out / "sets" / f"{question_set.name}-{temperature:g}.json"
        result = read_finished_set(file, settings)
        label = f"{question_set.title}, temperature {temperature:g} ({i + 1} of {len(jobs)}):"
        if result is None:
            log(label)
            seconds = max(0.0, end - time.monotonic()) / (len(jobs) - i)
            deadline = time.monotonic() + seconds
            result = evaluate_question_set(
                target, drafter, question_set, settings, config, progress, deadline
            )
            write_result(file, result)
        else:
            log(f"{label} already measured, see {file}")
        results.append(result)

    suite = SuiteResult(options.name or "", checkpoint, target.name, results)
    write_result(out / "suite.json", suite)
    return suite


def evaluate_question_set(
    target: Target,
    drafter: Drafter,
    question_set: LoadedQuestionSet,
    settings: dict[str, object],
    config: EvaluationConfig,
    progress: ProgressCallback,
    deadline: float,
) -> SetResult:
    """Decode one question set at one temperature, and return the results.

    For every method, the results include the number of answers that equal those of baseline
    decoding, and the speedup as publications compute it, see `compute_decode_seconds_per_token`.

    settings: the result of `collect_settings`, which is stored with the results
    deadline: a value of time.monotonic(), after which no more questions are started
    """
    variants = list_variants(drafter, config)
    thinking = bool(settings["thinking"])
    measurements, left_out = answer_questions(
        target, drafter, question_set, thinking, variants, progress, deadline
    )
    baseline = measurements[0]
    fitting_turns = sum(map(len, question_set.chats)) - left_out
    note = describe_time_limit(config.max_minutes, len(baseline.sequences), fitting_turns)
    prompt_set = PromptSet(None, [], [], config, note)
    evaluation = summarise_prompt_set(target, drafter, prompt_set, measurements)

    methods = []
    for method, measurement in zip(evaluation.methods, measurements, strict=True):
        pairs = zip(measurement.sequences, baseline.sequences, strict=True)
        identical_outputs = sum(sequence.ids == expected.ids for sequence, expected in pairs)
        decoding_speedup = None
        if measurement.sequences[0].stats.seconds:
            decoding_speedup = compute_decode_seconds_per_token(
                baseline
            ) / compute_decode_seconds_per_token(measurement)
        method = replace(
            method, identical_outputs=identical_outputs, decoding_speedup=decoding_speedup
        )
        methods.append(method)
    return SetResult(
        settings=settings,
        set=question_set.name,
        title=question_set.title,
        temperature=config.temperature,
        questions=len(question_set.chats),
        answers=evaluation.prompts,
        left_out=left_out,
        result=replace(evaluation, methods=methods),
    )


def answer_questions(
    target: Target,
    drafter: Drafter,
    question_set: LoadedQuestionSet,
    thinking: bool,
    variants: Sequence[DecodingVariant],
    progress: ProgressCallback,
    deadline: float = math.inf,
) -> tuple[list[VariantMeasurement], int]:
    """Answer the questions of all chats with every decoding variant. A chat may have several turns
    (a question and its answer), which are answered one after the other.

    thinking: value of the chat template variable enable_thinking
    deadline: a value of time.monotonic(), after which no more questions are started

    Returns the measurement of each variant, and the number of turns that were left out because they
    are too long for the target. Raises ValueError if all turns are too long.
    """
    chats = question_set.chats
    max_new_tokens = variants[0].options.max_new_tokens
    histories: list[list[dict[str, str]]] = [[] for _ in chats]
    open_chats = list(range(len(chats)))
    left_out = 0
    measurements_by_turn = []
    for turn in range(max(map(len, chats))):
        prompts = []
        prompt_chats = []
        for i in open_chats:
            if turn == len(chats[i]):
                continue
            histories[i] += chats[i][turn]
            ids = encode_chat(target, histories[i], thinking)
            if len(ids) + max_new_tokens > max_positions(target):
                left_out += len(chats[i]) - turn
            else:
                prompt_chats.append(i)
                prompts.append(ids)
        if not prompts or (measurements_by_turn and time.monotonic() > deadline):
            break

        numbers = [turn * len(chats) + i for i in prompt_chats]
        measurements = measure_variants(
            target, drafter, variants, prompts, progress, numbers, deadline
        )
        answers = measurements[0].sequences
        open_chats = prompt_chats[: len(answers)]
        for i, sequence in zip(open_chats, answers, strict=True):
            content = decode_output(target, sequence.ids, sequence.options)
            histories[i].append({"role": "assistant", "content": content})
        measurements_by_turn.append(measurements)
    if not measurements_by_turn:
        raise ValueError(
            f"{question_set.title}: every question is too long for the target, which supports "
            f"{max_positions(target)} tokens including {max_new_tokens} generated ones: reduce "
            "evaluation.max_new_tokens"
        )
    return merge_measurements(measurements_by_turn), left_out


def encode_chat(target: Target, messages: list[dict[str, str]], thinking: bool) -> list[int]:
    """Return the token ids of a chat up to the beginning of the model's answer.

    If the target has no chat template, the messages are joined by empty lines.

    thinking: value of the chat template variable enable_thinking
    """
    tokenizer: Any = target.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        text = "\n\n".join(message["content"] for message in messages) + "\n\n"
        return tokenizer(text)["input_ids"]
    encoded = tokenizer.apply_chat_template(
        messages, return_dict=True, add_generation_prompt=True, enable_thinking=thinking
    )
    return encoded["input_ids"]


def compute_decode_seconds_per_token(measurement: VariantMeasurement) -> float:
    """Return the decoding time per token without the prefill, in seconds, averaged over answers.

    Publications compute the speedup of a method as this time for baseline decoding divided by this
    time for the method.
    """
    stats = measurement.stats
    total = sum((each.seconds - each.stage_seconds["prefill"]) / each.tokens for each in stats)
    # The time is 0 if every answer has only the token that the prefill generates.
    return max(total / len(stats), MIN_SECONDS_PER_TOKEN)


def collect_settings(
    target: Target,
    weights_digest: str,
    question_set: LoadedQuestionSet,
    thinking: bool,
    config: EvaluationConfig,
) -> dict[str, object]:
    """Return all settings that determine the results of a question set, by name.

    weights_digest: digest of the drafter's weights
    """
    unused = ("prompts", "external_prompts", "max_prompt_tokens", "sampling_temperature")
    options = {name: value for name, value in asdict(config).items() if name not in unused}
    return {
        "target": target.name,
        "dtype": weight_format_name(target),
        "device": describe_device(target.device),
        "drafter": weights_digest,
        "questions": json_digest(question_set.chats),
        "thinking": thinking,
    } | options


def read_finished_set(file: Path, expected_settings: dict[str, object]) -> SetResult | None:
    """Return the result of a question set that an earlier run wrote to `file`.

    Returns None if the file does not exist. Raises ValueError if the earlier run had other
    settings. Settings in the file that this version does not have are not compared. If the earlier
    run decoded all questions, the time limit may differ.
    """
    if not file.exists():
        return None
    result = read_result(file, SetResult)
    message = f"{file} was measured with another {{keys}}: give another out=, or delete it"
    saved = rename_old_options_in_section(result.settings, "evaluation.")
    stored_settings = {key: saved.get(key) for key in expected_settings}
    ignored = () if result.result.time_limit_note else ("max_minutes",)
    refuse_changed_settings(stored_settings, expected_settings, message, ignored)
    return result


def drafter_digest(checkpoint: str) -> str:
    """Return the SHA-256 digest of a drafter's weights, in hexadecimal.

    checkpoint: a checkpoint folder, or the name of prompt lookup. Prompt lookup has no weights, so
        its name is returned

    Raises FileNotFoundError if the folder contains no weights.
    """
    if checkpoint == PROMPT_LOOKUP_FAMILY.name:
        return checkpoint
    files = sorted(find_drafter_folder(checkpoint).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(
            f"checkpoint={checkpoint}: the folder contains no drafter weights (*.safetensors): "
            "give the folder of a drafter"
        )
    digests = b"".join(bytes.fromhex(file_digest(file)) for file in files)
    return hashlib.sha256(digests).hexdigest()
