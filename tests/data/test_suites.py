"""Public question sets: rows in the public formats become the published prompts, and the published
sample of them is chosen."""

import gzip
import json
from unittest.mock import Mock, call

import pytest

from data.suites import DDTREE_QUESTION_SETS, SuiteConfig, load_suite, sample_chats

# Made-up rows in the public format of each set, and the texts of their questions, one a turn.
# Alpaca and LiveCodeBench have rows of two kinds.
REASONING_REQUEST = "\nPlease reason step by step, and put your final answer within \\boxed{}."
LIVECODEBENCH_INTRODUCTION = (
    "You are an expert Python programmer. You will be given a question (problem specification) "
    "and will generate a correct Python program that matches the specification and passes all "
    "tests. You will NOT return anything except for the program\n\n"
)
PUBLIC_ROWS = {
    "aime24": [
        (
            {"id": 60, "problem": "Find $x_{1}$.", "solution": "It is 7.", "answer": "7"},
            "Find $x_{1}$." + REASONING_REQUEST,
        )
    ],
    "aime25": [
        (
            {"problem_idx": 1, "problem": "Count $n$.", "answer": 70},
            "Count $n$." + REASONING_REQUEST,
        )
    ],
    "alpaca": [
        (
            {
                "instruction": "Translate.",
                "input": "Guten Tag",
                "output": "Hello",
                "text": "Below ...",
            },
            "Translate.\n\nInput:\nGuten Tag",
        ),
        (
            {"instruction": "Tell a joke.", "input": "", "output": "No.", "text": "Below ..."},
            "Tell a joke.",
        ),
    ],
    "gsm8k": [
        ({"question": "2 + 2 {apples}?", "answer": "#### 4"}, "2 + 2 {apples}?" + REASONING_REQUEST)
    ],
    "humaneval": [
        (
            {
                "task_id": "HumanEval/0",
                "prompt": "def f(x):\n    '''{x}'''\n",
                "canonical_solution": "",
                "test": "",
            },
            "Write a solution to the following problem and make sure that it passes the "
            "tests:\n```python\ndef f(x):\n    '''{x}'''\n\n```",
        )
    ],
    "livecodebench": [
        (
            {
                "question_title": "A",
                "question_content": "Add two numbers.",
                "starter_code": "",
                "platform": "x",
            },
            LIVECODEBENCH_INTRODUCTION
            + (
                "### Question:\nAdd two numbers.\n\n### Format: Write your code in the following "
                "format:\n```python\n# YOUR CODE HERE\n```\n\n### Answer: (use the provided "
                "format with backticks)"
            ),
        ),
        (
            {
                "question_title": "B",
                "question_content": "Sort.",
                "starter_code": "class Solution:",
                "platform": "y",
            },
            LIVECODEBENCH_INTRODUCTION
            + (
                "### Question:\nSort.\n\n### Format: Use the following code "
                "structure:\n```python\nclass Solution:\n```\n\n### Answer: (use the provided "
                "format with backticks)"
            ),
        ),
    ],
    "math500": [
        (
            {"problem": "Compute $1+1$.", "solution": "$2$", "answer": "2", "level": 1},
            "Compute $1+1$." + REASONING_REQUEST,
        )
    ],
    "mbpp": [
        (
            {"task_id": 2, "prompt": "Write a function.", "code": "", "test_list": []},
            "Write a function.",
        )
    ],
    "mt-bench": [
        (
            {
                "prompt_id": 81,
                "category": "writing",
                "prompt": ["Write.", "Rewrite."],
                "reference": [],
            },
            "Write.",
            "Rewrite.",
        )
    ],
    "swe-bench": [
        (
            {"instance_id": "a__b-1", "problem_statement": "It fails.", "patch": "", "repo": "a/b"},
            "Problem Statement:\nIt fails.\nPlease fix the issue described above.",
        )
    ],
}


def question_texts(chats) -> list[list[str]]:
    """Return the texts of each chat, and check that every message is the user's."""
    assert all(message["role"] == "user" for chat in chats for turn in chat for message in turn)
    return [[message["content"] for turn in chat for message in turn] for chat in chats]


def write_rows(folder, name: str, rows: list[dict]) -> None:
    """Write the rows of a set in one of the file formats of local copies."""
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if name == "humaneval":
        with gzip.open(folder / f"{name}.jsonl.gz", "wt") as file:
            file.write(lines)
    elif name == "math500":
        import pyarrow
        from pyarrow.parquet import write_table

        write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    elif name == "alpaca":
        (folder / f"{name}.json").write_text(json.dumps(rows))
    elif name == "livecodebench":  # as the hub's repository has it: several files
        (folder / name).mkdir()
        (folder / name / "test.jsonl").write_text(json.dumps(rows[0]) + "\n")
        (folder / name / "test2.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows[1:])
        )
    else:
        (folder / f"{name}.jsonl").write_text(lines)


@pytest.fixture
def local_copies(tmp_path):
    """Return a folder with a copy of every set."""
    for name, rows in PUBLIC_ROWS.items():
        write_rows(tmp_path, name, [row for row, *_ in rows])
    return tmp_path


def test_local_rows_become_the_published_prompts(local_copies):
    config = SuiteConfig("ddtree", str(local_copies))
    config.check()
    suite = load_suite(config)
    names = [question_set.name for question_set in suite]
    assert names == list(PUBLIC_ROWS) == [known_set.name for known_set in DDTREE_QUESTION_SETS]
    for question_set in suite:
        expected = [texts for _, *texts in PUBLIC_ROWS[question_set.name]]
        assert question_texts(question_set.chats) == expected


LIVECODEBENCH_URL = "hf://datasets/livecodebench/code_generation_lite/test"
# Expected calls of datasets.load_dataset.
HUB_CALLS = {
    "gsm8k": call("openai/gsm8k", "main", split="test"),
    "livecodebench": call(
        "json",
        data_files=[f"{LIVECODEBENCH_URL}{n}.jsonl" for n in ("", 2, 3, 4, 5, 6)],
        split="train",
    ),
}


@pytest.mark.parametrize("name", HUB_CALLS)
def test_rows_of_the_hub_are_read_by_column(monkeypatch, name):
    """`load_dataset` is called for the published source, and gives rows with the public columns."""
    import datasets

    load = Mock(return_value=datasets.Dataset.from_list([row for row, *_ in PUBLIC_ROWS[name]]))
    monkeypatch.setattr(datasets, "load_dataset", load)
    (question_set,) = load_suite(SuiteConfig("ddtree", sets=[name]))
    assert question_texts(question_set.chats) == [texts for _, *texts in PUBLIC_ROWS[name]]
    assert load.mock_calls == [HUB_CALLS[name]]
    monkeypatch.setattr(datasets, "load_dataset", Mock(side_effect=ConnectionError("no network")))
    with pytest.raises(ValueError, match=r"could not be read .*suite\.folder="):
        load_suite(SuiteConfig("ddtree", sets=[name]))


def test_speed_bench_is_read_as_its_script_writes_it_and_as_the_hub_has_it(tmp_path, monkeypatch):
    """The script writes a file per split with rows {"category", "messages", ...}. The hub has rows
    with `turns`, some of which are withheld."""
    import datasets

    common_columns = {
        "question_id": "0" * 32,
        "sub_category": "x",
        "source": "s",
        "src_id": "1",
        "difficulty": "easy",
    }
    for name, rows in {
        "qualitative": [("coding", ["Sort a list.", "Now in place."]), ("math", ["2 + 2?"])],
        "throughput_1k": [("low_entropy", ["Repeat this."])],
    }.items():
        script_rows = []
        for category, texts in rows:
            messages = [{"role": "user", "content": text} for text in texts]
            script_rows.append(common_columns | {"category": category, "messages": messages})
        write_rows(tmp_path, name, script_rows)
    for name, texts in (
        ("coding", ["Sort a list.", "Now in place."]),
        ("throughput_1k", ["Repeat this."]),
    ):
        (question_set,) = load_suite(SuiteConfig("speed_bench", str(tmp_path), [name]))
        assert question_set.name == name
        assert question_texts(question_set.chats) == [texts]
    with pytest.raises(ValueError, match="throughput_8k are not available; choose from coding"):
        SuiteConfig("speed_bench", str(tmp_path), ["throughput_8k"]).check()
    withheld = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    rows = [
        common_columns | {"category": "coding", "turns": [withheld]},
        common_columns | {"category": "math", "turns": ["2 + 2?"]},
    ]
    load = Mock(return_value=datasets.Dataset.from_list(rows))
    monkeypatch.setattr(datasets, "load_dataset", load)
    (question_set,) = load_suite(SuiteConfig("speed_bench", sets=["math"]))
    assert question_texts(question_set.chats) == [["2 + 2?"]]
    assert load.mock_calls == [call("nvidia/SPEED-Bench", "qualitative", split="test")]
    with pytest.raises(ValueError, match=r"row 0: the hub does not have the text .*suite\.folder="):
        load_suite(SuiteConfig("speed_bench", sets=["coding"]))


def test_samples_are_those_that_datasets_would_shuffle_to_the_front(tmp_path):
    from datasets import Dataset

    rows = [{"question": f"q{i}", "answer": ""} for i in range(300)]
    expected = Dataset.from_list(rows).shuffle(seed=0).select(range(128))["question"][:]
    write_rows(tmp_path, "gsm8k", rows)
    (question_set,) = load_suite(SuiteConfig("ddtree", str(tmp_path), ["gsm8k"]))
    contents = [chat[0][0]["content"] for chat in question_set.chats]
    assert [content.split("\n")[0] for content in contents] == expected
    assert sample_chats([[1], [2]], 2) == [[1], [2]]
    (question_set,) = load_suite(SuiteConfig("ddtree", str(tmp_path), ["gsm8k"], max_questions=3))
    assert len(question_set.chats) == 3


def test_each_file_or_folder_of_the_user_is_a_set(tmp_path):
    (tmp_path / "b").mkdir()
    for name, turns in (("a", ["One.", "Two."]), ("b/first", ["Three."]), ("b/second", ["Four."])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"turns": turns}) + "\n")
    first, second = load_suite(SuiteConfig("files", str(tmp_path)))
    assert (first.name, second.name) == ("a", "b")
    assert question_texts([*first.chats, *second.chats]) == [
        ["One.", "Two."],
        ["Three."],
        ["Four."],
    ]


@pytest.mark.parametrize("line", ["{", "[]", '{"turns": []}', '{"turns": "x"}', '{"text": "x"}'])
def test_invalid_rows_are_named(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"turns": ["x"]}\n' + line + "\n")
    with pytest.raises(
        ValueError, match=r'a\.jsonl, line 2: a row must be a JSON object with the key "turns"'
    ):
        load_suite(SuiteConfig("files", str(tmp_path)))


def test_a_missing_column_is_named(tmp_path):
    (tmp_path / "gsm8k.jsonl").write_text('{"problem": "x"}\n')
    with pytest.raises(
        ValueError, match=r'gsm8k\.jsonl, line 1: a row of GSM8K must have a column "question"'
    ):
        load_suite(SuiteConfig("ddtree", str(tmp_path), ["gsm8k"]))


@pytest.mark.parametrize(
    "config, message",
    [
        (SuiteConfig("nope"), r"suite\.name=nope"),
        (SuiteConfig("files"), r"suite\.folder="),
        (SuiteConfig("ddtree", "nowhere"), "no such file or folder"),
        (SuiteConfig("ddtree", "."), r"suite\.folder=\. contains no question set"),
        (SuiteConfig("ddtree", sets=["gsm9k"]), "gsm9k are not available; choose from aime24"),
        (SuiteConfig("ddtree", max_questions=0), r"suite\.max_questions=0"),
        (SuiteConfig("ddtree", temperatures=[]), r"suite\.temperatures"),
        (SuiteConfig("ddtree", temperatures=[-1.0]), r"suite\.temperatures"),
        (SuiteConfig(None, "."), "need a suite"),
    ],
)
def test_invalid_suite_options_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        config.check()
