"""Question sets decoded with every method, set by set: a finished set is a file, and is not decoded
again.

Chats of several turns are asked turn by turn, with the model's own answers in between (those of
plain
decoding: greedy, every method's; sampled, every method's with the same seed).
"""

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from infer.api import answer_text, positions_of
from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.drafters.families import LOOKUP
from infer.evaluation.evaluate import describe_device, summarise_part
from infer.evaluation.measuring import (
    Measured,
    Progress,
    PromptSet,
    Variant,
    cut_at,
    join,
    measure,
    variants,
)
from infer.evaluation.results import SetResult, SuiteResult, read_result, write_result
from infer.formats.folders import find_folder
from infer.targets.target import Target, number_format
from infer.utils.files import file_digest, json_digest, refuse_other_settings
from infer.utils.renamed_options import translate_section


def evaluate_suite(
    target: Target,
    drafter: Drafter,
    checkpoint: str,
    suite: Sequence,
    options,
    evaluation: EvaluationConfig,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> SuiteResult:
    """Ask every set at every temperature. Each has its share of what is left of
    `evaluation.max_minutes`, and is asked no further then. Writes each set to out/sets as soon as it is
    done, and the whole to out/suite.json. `checkpoint` is where the drafter was read from, `suite`
    and `options` are as data/suites.py has them.

    Raises ValueError where `out` holds a set that was measured with other settings, and where no
    question of a set fits into the target.
    """
    (out / "sets").mkdir(parents=True, exist_ok=True)
    weights = drafter_digest(checkpoint) + "-int8" * drafter.quantised
    sets = []
    jobs = [(temperature, questions) for temperature in options.temperatures for questions in suite]
    end = time.monotonic() + 60 * (evaluation.max_minutes or math.inf)
    for number, (temperature, questions) in enumerate(jobs, 1):
        config = replace(evaluation, temperature=temperature)
        settings = settings_of(target, weights, questions, options.thinking, config)
        file = out / "sets" / f"{questions.name}-{temperature:g}.json"
        known = read_finished(file, settings)
        what = f"{questions.title}, temperature {temperature:g} ({number} of {len(jobs)}):"
        say(what if known is None else f"{what} measured before, in {file}")
        if known is None:
            left = max(0.0, end - time.monotonic()) / (len(jobs) - number + 1)
            known = evaluate_set(
                target, drafter, questions, settings, config, progress, time.monotonic() + left
            )
            write_result(file, known)
        sets.append(known)
    result = SuiteResult(options.name, checkpoint, target.name, sets)
    write_result(out / "suite.json", result)
    return result


def evaluate_set(
    target: Target,
    drafter: Drafter,
    questions,
    settings: dict[str, object],
    config: EvaluationConfig,
    progress: Progress,
    until: float,
) -> SetResult:
    """Ask one set at one temperature. For every method, also count the answers that are plain
    decoding's, and take the published measure of speed (`seconds_per_token`)."""
    every = variants(drafter, config)
    thinking = settings["thinking"]
    measured, left_out = ask(target, drafter, questions, thinking, every, progress, until)
    plain = measured[0]
    methods = []
    fitting = sum(map(len, questions.chats)) - left_out
    cut = cut_at(config.max_minutes, len(plain.texts), fitting)
    result = summarise_part(target, drafter, PromptSet(None, [], [], config, cut), measured)
    for method, one in zip(result.methods, measured, strict=True):
        same = sum(
            text.ids == other.ids for text, other in zip(one.texts, plain.texts, strict=True)
        )
        faster = (
            seconds_per_token(plain) / seconds_per_token(one)
            if one.texts[0].stats.seconds
            else None
        )
        methods.append(replace(method, same=same, decoding_speedup=faster))
    return SetResult(
        settings=settings,
        set=questions.name,
        title=questions.title,
        temperature=config.temperature,
        questions=len(questions.chats),
        answers=result.prompts,
        left_out=left_out,
        result=replace(result, methods=methods),
    )


def ask(
    target: Target,
    drafter: Drafter,
    questions,
    thinking: bool,
    methods: Sequence[Variant],
    progress: Progress,
    until: float = math.inf,
) -> tuple[list[Measured], int]:
    """Return what every method answered to every turn of the chats, as many as begin before `until`
    as of `measure`, and how many turns were left out because they do not fit into the target's
    positions. Raises ValueError where none does."""
    chats = questions.chats
    tokens = methods[0].options.max_new_tokens
    histories: list[list[dict[str, str]]] = [[] for _ in chats]
    going = list(range(len(chats)))
    left_out = 0
    shares = []
    for turn in range(max(map(len, chats))):
        prompts = []
        asked = []
        for i in going:
            if turn == len(chats[i]):
                continue
            histories[i] += chats[i][turn]
            ids = prompt_ids(target, histories[i], thinking)
            if len(ids) + tokens > positions_of(target):
                left_out += len(chats[i]) - turn
            else:
                asked.append(i)
                prompts.append(ids)
        if not prompts or (shares and time.monotonic() > until):
            break
        numbers = [turn * len(chats) + i for i in asked]
        share = measure(target, drafter, methods, prompts, progress, numbers, until)
        going = asked[: len(share[0].texts)]
        for i, text in zip(going, share[0].texts, strict=True):
            histories[i].append(
                {"role": "assistant", "content": answer_text(target, text.ids, text.options)}
            )
        shares.append(share)
    if not shares:
        raise ValueError(
            f"{questions.title}: no question and {tokens} new tokens fit into the target's {positions_of(target)} "
            "positions: lower evaluation.max_new_tokens"
        )
    return join(shares), left_out


def prompt_ids(target: Target, messages: list[dict[str, str]], thinking: bool) -> list[int]:
    """Return a chat's token ids, up to where the model speaks; for a target without a template its
    texts with an empty line between them."""
    tokenizer = target.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer("\n\n".join(message["content"] for message in messages) + "\n\n")[
            "input_ids"
        ]
    switches = {"add_generation_prompt": True, "enable_thinking": thinking}
    return tokenizer.apply_chat_template(messages, return_dict=True, **switches)["input_ids"]


def seconds_per_token(measured: Measured) -> float:
    """Return the seconds a token without the prefill, averaged over answers: published speedups are
    ratios of these."""
    every = [text.stats for text in measured.texts]
    seconds = sum(
        (stats.seconds - stats.stage_seconds["prefill"]) / stats.tokens for stats in every
    )
    return max(seconds / len(every), 1e-9)  # answers of one token are all prefill


def settings_of(
    target: Target, weights: str, questions, thinking: bool, config: EvaluationConfig
) -> dict[str, object]:
    """Return everything that a set's figures depend on."""
    unused = ("prompts", "external_prompts", "max_prompt_tokens", "sampling_temperature")
    return {
        "target": target.name,
        "dtype": number_format(target),
        "device": describe_device(target.device),
        "drafter": weights,
        "questions": json_digest(questions.chats),
        "thinking": thinking,
    } | {key: value for key, value in asdict(config).items() if key not in unused}


def read_finished(file: Path, settings: dict[str, object]) -> SetResult | None:
    """Return what an earlier run measured, if anything. Raises ValueError if it had other settings;
    those that there are no more do not count, nor a limit of time that left nothing out."""
    if not file.exists():
        return None
    known = read_result(file, SetResult)
    message = f"{file} was measured with another {{keys}}: give another out=, or delete it"
    saved = translate_section(known.settings, "evaluation.")
    theirs = {key: saved.get(key) for key in settings}
    free = () if known.result.cut else ("max_minutes",)
    refuse_other_settings(theirs, settings, message, free)
    return known


def drafter_digest(checkpoint: str) -> str:
    """Return the SHA-256 of a drafter's weights; lookup's name, as it has none. Raises
    FileNotFoundError."""
    if checkpoint == LOOKUP.name:
        return checkpoint
    files = sorted(find_folder(checkpoint).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"checkpoint={checkpoint}: no drafter there")
    return hashlib.sha256(b"".join(bytes.fromhex(file_digest(file)) for file in files)).hexdigest()
