"""Generates the target's answers to the examples of a data set, as training data for drafters.

Either our engine generates the answers, or a server with OpenAI's API (infer/serving/clients.py).
They are written in the order of the examples, one JSON line for each example. If a run is stopped,
the next run continues after the last complete line.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TextIO, cast

from infer.config import EngineConfig, SamplingOptions
from infer.engine.sequence import Sequence
from infer.serving.regeneration_task import (
    AnswerExamples,
    PromptExample,
    RegenerationTask,
    TargetOutput,
    restore_reasoning_tag,
    seed_options_for_turn,
)
from infer.utils.errors import abort_on_write_error, set_interrupt_message
from infer.utils.files import refuse_changed_settings, write_json
from infer.utils.progress import Progress
from infer.utils.redact import redact_text
from infer.utils.renamed_options import rename_old_options

# Settings that do not change answers. They may differ when a run continues the file of an earlier
# run. data.bad_rows occurs only in files of earlier versions.
SETTINGS_NOT_CHANGING_REGENERATED_ANSWERS = ("data.bad_rows", "data.max_invalid_fraction")
# Maximum number of started examples whose record is not yielded yet, per batch row of the engine.
# Records are yielded in the order of the examples, so finished examples wait for a slow one before
# them. With a larger number, the batch stays full for a longer time while the slow example runs.
MAX_UNYIELDED_EXAMPLES_PER_BATCH_ROW = 4
REGENERATION_PROMPT_END_TOKENS_SEARCHED = (
    8  # "<think>" is searched in this number of tokens at the end of a prompt
)


@dataclass
class EngineTask:
    """A regeneration task that our engine works on.

    sequence: the sequence that decodes the task's next output; None if the task is finished
    """

    task: RegenerationTask
    sequence: Sequence | None


def build_engine_answerer(target: Any, drafter: Any, options: Any, capacity: int) -> AnswerExamples:
    """Return a function that generates the answers to examples with our engine.

    options: decoding and sampling options; `options.max_num_seqs` is the batch size
    capacity: number of KV cache positions per sequence; a prompt and its output together must fit
        into them
    """
    from infer.api import encode_prompt, open_engine

    engine = open_engine(target, drafter, options, capacity)
    max_tasks = MAX_UNYIELDED_EXAMPLES_PER_BATCH_ROW * options.max_num_seqs

    def submit(task: RegenerationTask) -> Sequence | None:
        """Submit the next prompt of a task to the engine, and return the engine's sequence.

        If the prompt is invalid or too long, the task is finished early and None is returned.
        """
        example = task.example
        try:
            ids = encode_prompt(target, task.prompt, example.template_options, example.tools)
            return engine.submit(ids, seed_options_for_turn(options, example, task.turn))
        except ValueError as error:
            task.fail_or_end_chat(str(error), keep_answers=True)
            return None

    def answer_examples(
        examples: Iterable[PromptExample], on_finished: Callable[[], None] = lambda: None
    ) -> Iterator[dict]:
        remaining_examples = iter(examples)
        engine_tasks: list[EngineTask] = []  # started examples, in their order in the data set
        while True:
            for example in islice(remaining_examples, max_tasks - len(engine_tasks)):
                task = RegenerationTask(example)
                engine_tasks.append(EngineTask(task, submit(task)))
                if task.record is not None:
                    on_finished()
            if not engine_tasks:
                return

            for engine_task in engine_tasks:
                task = engine_task.task
                sequence = engine_task.sequence
                if sequence is None or sequence.finish_reason is None:
                    continue
                task.add_output(output_from_sequence(target, sequence, task.is_chat))
                engine_task.sequence = submit(task) if task.record is None else None
                if task.record is not None:
                    on_finished()

            while engine_tasks:
                record = engine_tasks[0].task.record
                if record is None:
                    break
                engine_tasks.pop(0)
                yield record
            if engine.has_unfinished_sequences:
                engine.step()

    return answer_examples


def output_from_sequence(target: Any, sequence: Sequence, is_chat: bool) -> TargetOutput:
    """Return the output of a finished sequence of our engine.

    is_chat: whether the prompt is a chat. If true, the text includes special tokens, because they
        may mark reasoning or a tool call
    """
    from infer.api import decode_output

    assert sequence.finish_reason is not None
    finish_reason = sequence.finish_reason
    ids = list(sequence.ids)
    ends_with_end_token = bool(ids) and ids[-1] in target.eos_token_ids
    if finish_reason == "stop" and sequence.options.stop and not ends_with_end_token:
        finish_reason = "stop string"
    text = decode_output(target, ids, sequence.options)
    if not is_chat:
        return TargetOutput(text, finish_reason)

    inner_ids = ids[:-1] if ends_with_end_token else ids
    special_ids = set(target.tokenizer.all_special_ids)
    if finish_reason != "stop string" and special_ids.intersection(inner_ids):
        text = target.tokenizer.decode(inner_ids)
    prompt_end = target.tokenizer.decode(sequence.prompt[-REGENERATION_PROMPT_END_TOKENS_SEARCHED:])
    return TargetOutput(restore_reasoning_tag(text, prompt_end), finish_reason, ids)


def write_failure(failed_path: Path, record: dict) -> None:
    """Append the record of a failed example to the file `failed_path`, without the secrets in its
    error message. The file is created if it does not exist.
    """
    with failed_path.open("a", encoding="utf-8") as failed_file:
        write_json_line(failed_file, record | {"error": redact_text(record["error"])})


def regenerate_answers(
    examples: Iterable[PromptExample],
    answer_examples: AnswerExamples,
    out: Path,
    settings: dict,
    max_failures: int,
    total: int | None = None,
) -> dict[str, int]:
    """Answer the examples, and write a JSON line with the record of each to `out`, in order.

    Records of failed examples, {"index", "error"}, are written to the file `out`.failed. If `out`
    exists, only the examples after its last record are answered.

    settings: all options that determine the answers, and digests of target and data ("content")
    max_failures: maximum number of examples that may fail
    total: number of examples; None means `len(examples)`

    Returns the numbers of answered ("answers") and failed examples ("failed"). Raises ValueError if
    `out` has other settings or too many examples fail, and RunAborted if the disk is full.
    """
    failed_path = Path(f"{out}.failed")
    total = len(cast(Sized, examples)) if total is None else total
    settings = {"rows": total} | settings
    out.parent.mkdir(parents=True, exist_ok=True)
    check_and_save_settings(out, settings)

    answers, last_answer = repair_record_file(out)
    failures, last_failure = repair_record_file(failed_path)
    # All examples up to this index are finished, because records are written in their order.
    last_index = max(last_answer, last_failure)
    remaining_examples = (example for example in examples if example.index > last_index)
    finished = answers + failures
    progress = Progress("regenerating", "examples", finished)

    def count_finished() -> None:
        """Count one more finished example, and report the progress. Its record is written later,
        after the records of all earlier examples."""
        nonlocal finished
        finished += 1
        progress(finished, total, f"{failures} failed" if failures else "")

    with (
        set_interrupt_message(f"{out} contains the answers so far; run the command again"),
        abort_on_write_error(str(out)),
        out.open("a", encoding="utf-8") as answer_file,
    ):
        for record in answer_examples(remaining_examples, count_finished):
            error = record.get("error")
            if error is None:
                answers += 1
                write_json_line(answer_file, record)
            else:
                failures += 1
                write_failure(failed_path, record)
            if failures > max_failures:
                raise ValueError(
                    f"{failures} examples failed, at most {max_failures} may fail. The last error "
                    f"was {error!r}. Remove the causes, see {failed_path}; then give another out="
                )
    return {"answers": answers, "failed": failures}


def check_and_save_settings(out: Path, settings: dict) -> None:
    """Write the settings to `out`.settings.json, after comparing them with those of an earlier run.

    Raises ValueError if `out` was started with other settings, or was not written by this command.
    """
    settings_path = Path(f"{out}.settings.json")
    if settings_path.exists():
        saved = rename_old_options(json.loads(settings_path.read_text()))
        # Ignore saved settings that this version does not have.
        saved = {key: value for key, value in saved.items() if key in settings}
        # Files of earlier versions have no setting "content".
        if "content" not in saved:
            saved["content"] = settings.get("content")
        message = (
            f"out={out} was started with another {{keys}}: give another out, or delete {out} and "
            f"{settings_path}"
        )
        refuse_changed_settings(saved, settings, message, SETTINGS_NOT_CHANGING_REGENERATED_ANSWERS)
    elif out.exists():
        raise ValueError(
            f"out={out} exists already and was not written by this command: give another out="
        )
    with abort_on_write_error(str(out)):
        write_json(settings_path, settings)


def write_json_line(file: TextIO, record: dict) -> None:
    """Append a record to a file as one JSON line, and flush the file."""
    file.write(json.dumps(record, ensure_ascii=False) + "\n")
    file.flush()


def digest_examples(examples: Iterable[PromptExample]) -> tuple[int, str]:
    """Return the number of examples, and the SHA-256 digest of their content in hexadecimal."""
    count = 0
    digest = hashlib.sha256()
    for example in examples:
        content = {
            "index": example.index,
            "prompt": example.prompt,
            "tools": example.tools,
            "template": example.template_options,
        }
        digest.update(json.dumps(content, sort_keys=True).encode() + b"\n")
        count += 1
    return count, digest.hexdigest()


def repair_record_file(path: Path) -> tuple[int, int]:
    """Check a file of records, and cut off an incomplete last line.

    Returns (number of records, example index of the last record). Without records, the index is -1.
    Raises ValueError for a line that is not a record, and for indices that do not increase, which
    happens if two runs write to the file at the same time.
    """
    count = 0
    last_index = -1
    complete_bytes = 0
    if not path.exists():
        return count, last_index
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(complete_bytes)
                break
            try:
                index = int(json.loads(line)["index"])
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {count + 1} is not a record of this command ({error}): give "
                    "another out="
                ) from error
            if index <= last_index:
                raise ValueError(
                    f"{path}, line {count + 1}: example {index} comes after example {last_index}, "
                    "but indices must increase. Two runs may have written to this file: give "
                    "another out="
                )
            count += 1
            last_index = index
            complete_bytes += len(line)
    return count, last_index


def select_output_options(options: SamplingOptions) -> dict:
    """Return {name: value} of the options that determine an output.

    Options that change only the speed are left out.
    """
    speed_options = {*EngineConfig.__dataclass_fields__, "draft_length", "nodes"}
    return {key: value for key, value in asdict(options).items() if key not in speed_options}
