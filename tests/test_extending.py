"""docs/extending.md: every toy in it, put into a copy of the repository, trained, measured and
exported."""

import json
import re
import shutil
from pathlib import Path

import pytest

SECTIONS = {
    "A divergence": 2,
    "A tree": 2,
    "A drafter family": 3,
    "A conditional head": 3,
    "A kernel": 1,
    "A target family": 2,
    "An evaluation set": 1,
}
BLOCK = re.compile(
    r'^```\w+ (\S+)(?: (before|after) "([^"\n]*)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL
)

TRAIN = [
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
DATA = ["data=jsonl", "data.path=texts.jsonl"]
SMALL = [option for option in TRAIN if option.startswith("evaluation.")]
PROGRAM = f"""
import os, sys
import train.loop
from infer.main import main

os.chdir(os.path.dirname(__file__))
sys.stdout.reconfigure(line_buffering=True)
if os.fork() == 0:  # training leaves its process by os._exit
    main(["train", f"target.path={{sys.argv[1]}}", *{TRAIN + DATA!r}])
assert os.wait()[1] == 0
best = "runs/toys/checkpoints/best"
main(["eval", f"checkpoint={{best}}", "out=evaluation", *{DATA + SMALL!r}])
main(["eval", f"checkpoint={{best}}", "out=riddles", "suite=ddtree", "suite.sets=[riddles]", "suite.folder=riddles",
      "suite.temperatures=[0.0]", *{SMALL!r}])
main(["compare", f"checkpoints=[{{best}}]", "out=comparison", *{DATA + SMALL!r}])
main(["generate", f"checkpoint={{best}}", "decoding.method=comb", "decoding.max_new_tokens=4"])
main(["export", f"checkpoint={{best}}", "format=corrected", "out=exported"])
main(["plan", "+model=tiny-llama"])
"""


def blocks(section: str) -> list[tuple[str, ...]]:
    """(path, before or after, line, text) of every code block with a path."""
    return BLOCK.findall(section)


def write(root: Path, path: str, where: str, line: str, text: str) -> None:
    """Do what a reader of a block does: make the file, or insert the text at the line."""
    file = root / path
    if not where:
        assert not file.exists()
        file.write_text(text)
        return
    head, mark, tail = file.read_text().partition(f"\n{line}\n")
    assert mark, f"{path} has no line {line}"
    file.write_text(
        f"{head}\n{text}{line}\n{tail}" if where == "before" else f"{head}\n{line}\n{text}{tail}"
    )


@pytest.fixture(scope="module")
def page(repo) -> dict[str, str]:
    """The page's sections by title."""
    parts = re.split(
        r"^## (.+)$", (repo / "docs" / "extending.md").read_text(), flags=re.MULTILINE
    )[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.fixture(scope="module")
def copy(repo, page, tmp_path_factory) -> Path:
    """A copy of the repository with all toys."""
    root = tmp_path_factory.mktemp("toys") / "copy"
    for folder in ("train", "infer", "data", "conf"):
        halves = shutil.ignore_patterns(
            "*.pyc.*", "*.tmp.*"
        )  # of compiled code that others are just writing
        shutil.copytree(repo / folder, root / folder, ignore=halves)
    for section in page.values():
        for block in blocks(section):
            write(root, *block)
    return root


def test_a_toy_is_as_few_files_as_the_page_says(page):
    assert {
        title: len({path for path, *_ in blocks(page[title])}) for title in SECTIONS
    } == SECTIONS
    for title in SECTIONS:
        code = [
            line
            for _, _, _, text in blocks(page[title])
            for line in text.splitlines()
            if line.strip()
        ]
        assert len(code) < 45, title


@pytest.mark.robustness
def test_toys_go_through_training_eval_compare_and_export(copy, shallow, start_command):
    rows = [{"text": f"def f{i}(x):\n    return x + {i * i}\n" * (3 + i % 9)} for i in range(100)]
    (copy / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (copy / "riddles").mkdir()
    (copy / "riddles" / "riddles.jsonl").write_text(json.dumps({"riddle": "What has keys?"}) + "\n")
    (copy / "program.py").write_text(PROGRAM)
    printed = start_command(str(copy / "program.py"), [str(shallow)], FRESH="1").finish()
    evaluation = json.loads((copy / "evaluation" / "evaluation.json").read_text())
    assert [method["name"] for method in evaluation["methods"]].count("comb") == 1
    assert all(method["identical"] for method in evaluation["methods"])
    assert "comb" in (copy / "comparison" / "comparison.md").read_text()
    assert "Riddles" in (copy / "riddles" / "suite.md").read_text()
    exported = json.loads((copy / "exported" / "config.json").read_text())
    assert exported["architectures"] == ["CorrectedDraftModel"]
    assert exported["dflash_config"]["pairs_rank"] == 8
    assert "example/tiny-llama" in printed
    losses = [
        json.loads(line)
        for line in (copy / "runs" / "toys" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(losses) == 2 and all(line["loss"] > 0 for line in losses)
