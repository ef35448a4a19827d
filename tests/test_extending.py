"""The code of docs/extending.md works: in a copy of the repository it is trained, measured and
exported."""

import json
import re
import shutil
from pathlib import Path

import pytest

FILES_PER_SECTION = {
    "A divergence": 2,
    "A tree": 2,
    "A drafter family": 3,
    "A conditional head": 3,
    "A kernel": 1,
    "A target family": 2,
    "An evaluation set": 1,
}
CODE_BLOCK_PATTERN = re.compile(
    r'^```\w+ (\S+)(?: (before|after) "([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)

TOY_TRAIN_OPTIONS = [
    *(
        "objective=reverse-kl",
        "drafter=corrected",
        "head=pairs",
        "drafter.layers=1",
        "drafter.block_size=5",
    ),
    "name=toys",
    *(
        "data.length=64",
        "data.max_examples=12",
        "anchors_per_sequence=4",
        "optim.batch_size=2",
        "optim.steps=2",
        "checkpoints=1",
    ),
    *(
        "evaluation.prompts=1",
        "evaluation.max_prompt_tokens=8",
        "evaluation.max_new_tokens=4",
        "evaluation.budgets=[4]",
    ),
    *("evaluation.external_prompts=0", "evaluation.sampling_temperature=null"),
]
TOY_DATA_OPTIONS = ["data=jsonl", "data.path=texts.jsonl"]
TOY_EVALUATION_OPTIONS = [
    option for option in TOY_TRAIN_OPTIONS if option.startswith("evaluation.")
]
TOY_PROGRAM = f"""
import os, sys
import train.loop
from infer.main import main

os.chdir(os.path.dirname(__file__))
sys.stdout.reconfigure(line_buffering=True)
if os.fork() == 0:  # training leaves its process by os._exit
    main(["train", f"target.path={{sys.argv[1]}}", *{TOY_TRAIN_OPTIONS + TOY_DATA_OPTIONS!r}])
assert os.wait()[1] == 0
best = "runs/toys/checkpoints/best"
data_options = {TOY_DATA_OPTIONS!r}
evaluation_options = {TOY_EVALUATION_OPTIONS!r}
suite_options = ["suite=ddtree", "suite.sets=[riddles]", "suite.folder=riddles"]
suite_options += ["suite.temperatures=[0.0]", *evaluation_options]
evaluation_options += data_options
main(["eval", f"checkpoint={{best}}", "out=evaluation", *evaluation_options])
main(["eval", f"checkpoint={{best}}", "out=riddles", *suite_options])
main(["compare", f"checkpoints=[{{best}}]", "out=comparison", *evaluation_options])
main(["generate", f"checkpoint={{best}}", "decoding.method=comb", "decoding.max_new_tokens=4"])
main(["export", f"checkpoint={{best}}", "format=corrected", "out=exported"])
main(["plan", "+model=tiny-llama"])
"""


def find_code_blocks(section: str) -> list[tuple[str, ...]]:
    """Return (path, "before" or "after", line, text) of every code block with a path."""
    return CODE_BLOCK_PATTERN.findall(section)


def apply_code_block(root: Path, path: str, insert_mode: str, line: str, text: str) -> None:
    """Create the file of a code block, or insert its text before or after a line of the file."""
    file = root / path
    if not insert_mode:
        assert not file.exists()
        file.write_text(text)
        return
    head, mark, tail = file.read_text().partition(f"\n{line}\n")
    assert mark, f"{path} has no line {line}"
    file.write_text(
        f"{head}\n{text}{line}\n{tail}"
        if insert_mode == "before"
        else f"{head}\n{line}\n{text}{tail}"
    )


@pytest.fixture(scope="module")
def page(repo) -> dict[str, str]:
    """Return the page's sections by title."""
    titles_and_texts = re.split(
        r"^## (.+)$", (repo / "docs" / "extending.md").read_text(), flags=re.MULTILINE
    )[1:]
    return dict(zip(titles_and_texts[::2], titles_and_texts[1::2], strict=True))


@pytest.fixture(scope="module")
def toy_repository(repo, page, tmp_path_factory) -> Path:
    """Return a copy of the repository with the code of all sections."""
    root = tmp_path_factory.mktemp("toys") / "copy"
    for folder in ("train", "infer", "data", "conf"):
        # Compiled code that other processes are writing.
        unfinished_files = shutil.ignore_patterns("*.pyc.*", "*.tmp.*")
        shutil.copytree(repo / folder, root / folder, ignore=unfinished_files)
    for section in page.values():
        for block in find_code_blocks(section):
            apply_code_block(root, *block)
    return root


def test_each_section_needs_few_files_and_lines(page):
    assert {
        title: len({path for path, *_ in find_code_blocks(page[title])})
        for title in FILES_PER_SECTION
    } == FILES_PER_SECTION
    for title in FILES_PER_SECTION:
        code = [
            line
            for _, _, _, text in find_code_blocks(page[title])
            for line in text.splitlines()
            if line.strip()
        ]
        assert len(code) < 45, title


@pytest.mark.robustness
def test_the_examples_work_in_training_eval_compare_and_export(
    toy_repository, shallow, start_command
):
    rows = [{"text": f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)} for i in range(100)]
    (toy_repository / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (toy_repository / "riddles").mkdir()
    (toy_repository / "riddles" / "riddles.jsonl").write_text(
        json.dumps({"riddle": "What has keys?"}) + "\n"
    )
    (toy_repository / "program.py").write_text(TOY_PROGRAM)
    printed = start_command(str(toy_repository / "program.py"), [str(shallow)], FRESH="1").finish()
    evaluation = json.loads((toy_repository / "evaluation" / "evaluation.json").read_text())
    assert [method["name"] for method in evaluation["methods"]].count("comb") == 1
    assert all(method["identical"] for method in evaluation["methods"])
    assert "comb" in (toy_repository / "comparison" / "comparison.md").read_text()
    assert "Riddles" in (toy_repository / "riddles" / "suite.md").read_text()
    exported = json.loads((toy_repository / "exported" / "config.json").read_text())
    assert exported["architectures"] == ["CorrectedDraftModel"]
    assert exported["dflash_config"]["pairs_rank"] == 8
    assert "example/tiny-llama" in printed
    losses = [
        json.loads(line)
        for line in (toy_repository / "runs" / "toys" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 2 and all(line["loss"] > 0 for line in losses)
