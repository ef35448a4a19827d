"""One target over two processes, by transformers' tensor parallel plan: the texts of one process."""

import json

import pytest

COMMON = ["target.device=cpu", "target.dtype=float32", "decoding.max_new_tokens=24", "decoding.budget=8"]


def test_two_processes_write_what_one_writes(start_command):
    pytest.importorskip("accelerate")
    command = "infer/main.py", ["generate", *COMMON, "prompt='class Reader:'", "decoding.temperature=0.5"]
    alone = start_command(*command).finish()
    together = start_command(command[0], [*command[1], "target.tp_plan=auto"], 2).finish()
    said = [
        output.split("class Reader:", 1)[1].rsplit(" tokens/s", 1)[0].rsplit(",", 1)[0] for output in (alone, together)
    ]
    assert said[0] == said[1] and "rounds" in said[0]


@pytest.mark.parametrize(("settings", "says"), [
    (["generate", "target.tp_plan=auto"], "torchrun --nproc-per-node"),
    (["generate", "target.tp_plan=rows"], "auto, or null"),
    (["generate", "target.tp_plan=auto", "decoding.budget=auto"], "budget=auto follows the clock"),
    (["serve", "target.tp_plan=auto"], "in one process"),
    (["generate", "target.tp_plan=auto", "target.adapter=x"], "neither target.adapter"),
    (["train", "target.tp_plan=auto"], "for decoding; training has"),
    (["compare", "target.tp_plan=auto"], "in one process"),
])  # fmt: skip
def test_what_cannot_be_spread_is_refused(start_command, settings, says):
    assert says in start_command("infer/main.py", settings).finish(2)


@pytest.mark.robustness
def test_two_processes_evaluate_and_regenerate_as_one(start_command, tmp_path):
    """`regenerate` goes on where it was, with two processes where one began."""
    pytest.importorskip("accelerate")
    out, data = tmp_path / "answers.jsonl", ["data=stdlib", "data.limit=6"]
    command = "infer/main.py", ["regenerate", *COMMON, *data, "checkpoint=embedded"]
    start_command(*command[:1], [*command[1], f"out={out}"]).finish()
    alone = out.read_text().splitlines()
    out.write_text("".join(line + "\n" for line in alone[:2]))
    start_command(command[0], [*command[1], f"out={out}", "target.tp_plan=auto"], 2).finish()
    answers = [
        {line["index"]: line for line in map(json.loads, lines)} for lines in (alone, out.read_text().splitlines())
    ]
    assert answers[0] == answers[1] and len(answers[0]) == 6
    settings = ["eval", "target.device=cpu", "target.dtype=float32", "target.tp_plan=auto", f"out={tmp_path / 'eval'}"]
    settings += ["evaluation.prompts=2", "evaluation.max_new_tokens=16", "evaluation.budgets=[8]"]
    said = start_command("infer/main.py", [*settings, "evaluation.outside=0"], 2).finish()
    rows = [line for line in said.splitlines() if line.rstrip().endswith(("yes", "no"))]
    assert len(rows) >= 3 and all(row.rstrip().endswith("yes") for row in rows), said
    assert (tmp_path / "eval" / "evaluation.json").is_file()
