"""Question sets decoded with every method, set by set: a finished set is a file, and is not decoded again.

Chats of several turns are asked turn by turn, with the model's own answers in between (those of plain decoding: greedy,
every method's; sampled, every method's with the same seed).
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from data.suites import Chat, Questions, SuiteConfig
from infer.api import answer_text, positions_of
from infer.config import EvaluationConfig
from infer.drafters.base import Drafter
from infer.engine.sequence import Text
from infer.evaluation.evaluate import Measured, decode_prompts, describe_device, summary
from infer.formats.folders import find_folder
from infer.formats.integrity import json_digest
from infer.targets.target import Target
from infer.utils.files import atomic_write

Results = dict[tuple[str, int], Measured]
Progress = Callable[[int, int], None]


def evaluate_suite(
    target: Target,
    drafter: Drafter,
    checkpoint: str,
    suite: list[Questions],
    config: SuiteConfig,
    evaluation: EvaluationConfig,
    out: Path,
    say: Callable[[str], None] = lambda line: None,
    progress: Progress = lambda done, total: None,
) -> dict:
    """Every set at every temperature; returns what `infer.evaluation.tables` shows and writes it to out/suite.json, each set
    to out/sets as soon as it is done. `checkpoint` is where the drafter lies.

    Raises ValueError where `out` holds a set that was measured in another way, and where no question of a set fits into
    the target.
    """
    (out / "sets").mkdir(parents=True, exist_ok=True)
    weights = drafter_digest(checkpoint)
    jobs = [(temperature, questions) for temperature in config.temperatures for questions in suite]
    measured = []
    for number, (temperature, questions) in enumerate(jobs, 1):
        options = replace(evaluation, temperature=temperature, samples=0)
        settings = settings_of(target, weights, questions, config.thinking, options)
        file = out / "sets" / f"{questions.name}-{temperature:g}.json"
        what = f"{questions.title}, temperature {temperature:g} ({number} of {len(jobs)})"
        known = finished(file, settings)
        if known is None:
            say(f"{what}:")
            known = {"settings": settings} | evaluate_set(
                target, drafter, questions, config.thinking, options, progress
            )
            atomic_write(file, json.dumps(known, indent=1) + "\n")
        else:
            say(f"{what}: measured before, in {file}")
        measured.append(known)
    shared = {key: measured[0]["result"][key] for key in ("target", "device", "dtype", "max_new_tokens", "block_size")}
    result = {"suite": config.name, "checkpoint": checkpoint} | shared | {"sets": measured}
    atomic_write(out / "suite.json", json.dumps(result, indent=1) + "\n")
    return result


def evaluate_set(
    target: Target,
    drafter: Drafter,
    questions: Questions,
    thinking: bool,
    options: EvaluationConfig,
    progress: Progress,
) -> dict:
    """One set at one temperature: the figures of `infer.evaluation.evaluate.summary`, and for every method also how many answers
    are plain decoding's, and the published measure of speed (`seconds_per_token`)."""
    results, left_out = ask(target, drafter, questions.chats, thinking, options, progress)
    if not results:
        raise ValueError(
            f"{questions.title}: no question and {options.max_new_tokens} new tokens fit into the target's "
            f"{positions_of(target)} positions: lower evaluation.max_new_tokens"
        )
    plain = results["plain", 0].texts
    result = summary(target, drafter, [text.prompt for text in plain], results, options)
    for row, measured in zip(result["methods"], results.values(), strict=True):
        row["same"] = sum(text.ids == other.ids for text, other in zip(measured.texts, plain, strict=True))
        row["decoding_speedup"] = seconds_per_token(plain) / seconds_per_token(measured.texts)
    return {
        "set": questions.name,
        "title": questions.title,
        "temperature": options.temperature,
        "questions": len(questions.chats),
        "answers": len(plain),
        "left_out": left_out,
        "result": result,
    }


def ask(
    target: Target, drafter: Drafter, chats: list[Chat], thinking: bool, options: EvaluationConfig, progress: Progress
) -> tuple[Results, int]:
    """What every method answered to every turn of the chats, and how many turns were left out because they do not fit
    into the target's positions."""
    histories: list[list[dict[str, str]]] = [[] for _ in chats]
    going, left_out, shares = list(range(len(chats))), 0, []
    for turn in range(max(map(len, chats))):
        prompts, asked = [], []
        for i in going:
            if turn == len(chats[i]):
                continue
            histories[i] += chats[i][turn]
            ids = prompt_ids(target, histories[i], thinking)
            if len(ids) + options.max_new_tokens > positions_of(target):
                left_out += len(chats[i]) - turn
            else:
                asked.append(i)
                prompts.append(ids)
        if not prompts:
            break
        share = decode_prompts(target, drafter, prompts, options, progress)
        for i, text in zip(asked, share["plain", 0].texts, strict=True):
            histories[i].append({"role": "assistant", "content": answer_text(target, text.ids, text.options)})
        shares.append(share)
        going = asked
    methods = shares[0] if shares else {}
    return {method: Measured.joined([share[method] for share in shares]) for method in methods}, left_out


def prompt_ids(target: Target, messages: list[dict[str, str]], thinking: bool) -> list[int]:
    """A chat's token ids, up to where the model speaks; for a target without a template its texts with an empty line
    between them."""
    tokenizer = target.tokenizer
    if getattr(tokenizer, "chat_template", None) is None:
        return tokenizer("\n\n".join(message["content"] for message in messages) + "\n\n")["input_ids"]
    switches = {"add_generation_prompt": True, "enable_thinking": thinking}
    return tokenizer.apply_chat_template(messages, return_dict=True, **switches)["input_ids"]


def seconds_per_token(texts: list[Text]) -> float:
    """Seconds a token without the prefill, averaged over answers: what the ratio of two methods is published of."""
    seconds = [(text.stats.seconds - text.stats.stage_seconds["prefill"]) / text.stats.tokens for text in texts]
    return max(sum(seconds) / len(seconds), 1e-9)  # answers of one token are all prefill


def settings_of(
    target: Target, weights: str, questions: Questions, thinking: bool, options: EvaluationConfig
) -> dict[str, object]:
    """All that a set's figures depend on."""
    unused = ("prompts", "prompt_tokens", "samples")
    return {
        "target": target.name,
        "dtype": str(target.dtype),
        "device": describe_device(target.device),
        "drafter": weights,
        "questions": json_digest(questions.chats),
        "thinking": thinking,
    } | {key: value for key, value in asdict(options).items() if key not in unused}


def finished(file: Path, settings: dict[str, object]) -> dict | None:
    """What an earlier run measured. Raises ValueError where that was in another way."""
    if not file.exists():
        return None
    known = json.loads(file.read_text())
    before = known["settings"]
    changed = sorted(key for key in settings | before if settings.get(key) != before.get(key))
    if changed:
        raise ValueError(f"{file} was measured with another {', '.join(changed)}: give another out=, or delete it")
    return known


def drafter_digest(checkpoint: str) -> str:
    """A digest of what makes a drafter what it is: its weights, or an n-gram file. Raises FileNotFoundError."""
    path = Path(checkpoint)
    files = [path] if path.is_file() else sorted(find_folder(checkpoint).glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"checkpoint={checkpoint}: no drafter there")
    digest = hashlib.sha256()
    for file in files:
        with file.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()
