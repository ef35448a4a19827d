"""Answers of the target to the rows of a data set, for drafters to learn from.

Answers are written in the order of the rows, one JSON line each, and a run that was stopped goes on
behind the last whole line. Our engine writes them, or a server with OpenAI's API
(infer/serving/clients.py).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path

from infer.config import DecodeOptions, EngineConfig, TextOptions
from infer.serving.dialogue import Answering, Dialogue, Row, Turn, of_row, with_opening
from infer.utils.errors import disk, going_on
from infer.utils.files import refuse_other_settings, write_json
from infer.utils.progress import Progress
from infer.utils.redact import redact_text
from infer.utils.renamed_options import translate_saved_config

# Settings that change no answer; the first one is of earlier versions.
NO_INFLUENCE = ("data.bad_rows", "data.max_invalid_fraction")


def by_engine(target, drafter, options: DecodeOptions, capacity: int) -> Answering:
    """Return a function that answers rows with our engine, `options.max_num_seqs` side by side, in the
    rows' order."""
    from infer.api import encode, open_engine

    engine = open_engine(target, drafter, options, capacity)

    def submit(dialogue: Dialogue):
        """Let the engine write a row's next turn; None where its prompt is at fault, or longer than
        there is room."""
        row = dialogue.row
        try:
            ids = encode(target, dialogue.prompt, row.template, row.tools)
            return engine.submit(ids, of_row(options, row, dialogue.turns))
        except ValueError as wrong:
            dialogue.fail(str(wrong), keep=True)
            return None

    def answers(rows: Iterable[Row], finished: Callable[[], None] = lambda: None) -> Iterator[dict]:
        # [[row under way, its text or None]] in order
        rows = iter(rows)
        queue = []
        while True:
            for row in islice(rows, 4 * options.max_num_seqs - len(queue)):
                dialogue = Dialogue(row)
                queue.append([dialogue, submit(dialogue)])
                if dialogue.answer is not None:
                    finished()
            if not queue:
                return
            for place in queue:
                dialogue, text = place
                if text is not None and text.finish is not None:
                    dialogue.take(engine_turn(target, text, dialogue.chat))
                    place[1] = None if dialogue.answer else submit(dialogue)
                    if dialogue.answer is not None:
                        finished()
            while queue and queue[0][0].answer is not None:
                yield queue.pop(0)[0].answer
            if engine.busy:
                engine.step()

    return answers


def engine_turn(target, text, chat: bool) -> Turn:
    """Return a finished text of our engine as a turn. In a chat special tokens within it stay: they
    may be a thought's or a call's."""
    from infer.api import answer_text

    finish = text.finish
    ids = list(text.ids)
    if finish == "stop" and text.options.stop and ids[-1] not in target.end_ids:
        finish = "stop string"
    said = answer_text(target, ids, text.options)
    if not chat:
        return Turn(said, finish)
    inner = ids[:-1] if ids and ids[-1] in target.end_ids else ids
    if finish != "stop string" and set(inner) & set(target.tokenizer.all_special_ids):
        said = target.tokenizer.decode(inner)
    opened = target.tokenizer.decode(text.prompt[-8:])
    return Turn(with_opening(said, opened), finish, ids)


def regenerate(
    rows: Iterable[Row],
    answers: Answering,
    out: Path,
    settings: dict,
    most_failures: int,
    total: int | None = None,
) -> dict[str, int]:
    """Write the rows' answers to `out`, a line each, and {"index", "error"} lines to `out`.failed;
    returns how many of each there are. `settings` say how the answers come about, their "content"
    what target and rows are: a file that was begun with others is not gone on with. Raises
    ValueError for that, and when more than `most_failures` rows failed; Stopped where the disk is
    full. total: how many rows there are."""
    failed_path = Path(f"{out}.failed")
    settings_path = Path(f"{out}.settings.json")
    total = len(rows) if total is None else total
    settings = {"rows": total} | settings
    out.parent.mkdir(parents=True, exist_ok=True)
    if settings_path.exists():
        known = translate_saved_config(json.loads(settings_path.read_text()))
        known = {
            key: value for key, value in known.items() if key in settings
        }  # options that are no more
        if "content" not in known:  # of an earlier version, which had no record
            known |= {"content": settings.get("content")}
        message = f"out={out} was begun with another {{keys}}: give another out, or delete it"
        refuse_other_settings(known, settings, message, NO_INFLUENCE)
    if out.exists() and not settings_path.exists():
        raise ValueError(
            f"out={out} exists already and is not ours to go on with: give another out"
        )
    with disk(str(out)):
        write_json(settings_path, settings)
    (count, answered), (lost, failed) = _begun(out), _begun(failed_path)
    last = max(answered, failed)  # rows are answered in order: all up to this one are there
    progress = Progress("regenerating", "rows", count + lost)
    finished_rows = count + lost

    def count_finished() -> None:
        """Report a row that is finished, and may wait for those before it."""
        nonlocal finished_rows
        finished_rows += 1
        progress(finished_rows, total, f"{lost} failed" if lost else "")

    keep = going_on(f"{out} has the answers so far, the same command goes on from there")
    with keep, disk(str(out)), out.open("a", encoding="utf-8") as good:
        for answer in answers((row for row in rows if row.index > last), count_finished):
            error = answer.get("error")
            if error is None:
                count += 1
                good.write(json.dumps(answer, ensure_ascii=False) + "\n")
                good.flush()
            else:
                lost += 1
                with failed_path.open(
                    "a", encoding="utf-8"
                ) as bad:  # only there where a row failed
                    bad.write(
                        json.dumps(answer | {"error": redact_text(error)}, ensure_ascii=False)
                        + "\n"
                    )
            if lost > most_failures:
                raise ValueError(
                    f"{lost} rows failed, at most {most_failures} may: the last said {error!r}"
                )
    return {"answers": count, "failed": lost}


def rows_content(rows: Iterable[Row]) -> tuple[int, str]:
    """Return how many rows there are, and a digest of them all."""
    count = 0
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps(asdict(row), sort_keys=True).encode() + b"\n")
        count += 1
    return count, digest.hexdigest()


def _begun(path: Path) -> tuple[int, int]:
    """Cut off a file's last line if it is not complete; return how many lines it has and the index
    in the last one, -1 where there is none. Raises ValueError for lines that are not in the rows'
    order, as two runs at once leave them."""
    count = 0
    last = -1
    end = 0
    if not path.exists():
        return count, last
    with path.open("r+b") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(end)
                break
            try:
                index = int(json.loads(line)["index"])
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(
                    f"{path}, line {count + 1}: no answer of regenerate ({error})"
                ) from error
            if index <= last:
                raise ValueError(
                    f"{path}, line {count + 1}: row {index} stands behind row {last}: give another out"
                )
            count = count + 1
            last = index
            end = end + len(line)
    return count, last


def options_of(options: TextOptions) -> dict:
    """Return the options that decide an answer, without those that only change the speed."""
    speed = {*EngineConfig.__dataclass_fields__, "draft_length", "nodes"}
    return {key: value for key, value in asdict(options).items() if key not in speed}
