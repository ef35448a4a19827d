"""Public question sets as chats: which columns of a public row make which questions. One row of
SETS each.

The ten sets of SETS are those of DDTree's Table 1. Its appendix B takes sample counts from DFlash's
benchmark; sources, splits, prompts and the choice of samples here are those of that benchmark's
public scripts, word for word, because another prompt would be another measurement. SPEED_BENCH has
the domains and throughput splits of SPEED-Bench (2604.09557). A chat is a list of turns; a turn is
what is said until the model answers, as messages.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path

from data.rows import file_records

Chat = list[list[dict[str, str]]]  # turns of messages: {"role", "content"}

ENDINGS = (".jsonl", ".jsonl.gz", ".json", ".parquet", ".txt")

REASON = "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
PROGRAM = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{prompt}\n```"
ISSUE = "Problem Statement:\n{problem_statement}\nPlease fix the issue described above."
CONTEST = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will generate a "
    "correct Python program that matches the specification and passes all tests. You will NOT return anything except "
    "for the program\n\n### Question:\n{question_content}\n\n### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)


def contest(row: dict) -> str:
    """LiveCodeBench's question, with the code to start from if there is any."""
    begun = row.get("starter_code")
    form = (
        "Use the following code structure:" if begun else "Write your code in the following format:"
    )
    return CONTEST.format(
        question_content=row["question_content"], format=form, code=begun or "# YOUR CODE HERE"
    )


def instruction(row: dict) -> str:
    """Alpaca's instruction, with its input if there is any."""
    return (
        f"{row['instruction']}\n\nInput:\n{row['input']}"
        if row.get("input")
        else row["instruction"]
    )


@dataclass(frozen=True)
class QuestionSet:
    """Where a public set is, and how one of its rows is asked."""

    name: str  # of its local file, and in suite.sets
    title: str  # in the table
    count: int  # questions that the paper asked
    hub: str
    columns: tuple[str, ...]  # that the question needs
    ask: (
        str | Callable[[dict], str | list[str]]
    )  # a template over the columns, or a function: the turns' texts
    split: str = "test"
    configuration: str | None = None
    files: tuple[str, ...] = ()  # of a hub repository that can only be read by its files
    category: str | None = (
        None  # of its rows those of this one, in a local file named as the configuration
    )

    def turns(self, row: dict) -> list[str]:
        """Return what the user says, turn by turn. Raises KeyError for a missing column."""
        asked = self.ask.format_map(row) if isinstance(self.ask, str) else self.ask(row)
        return [asked] if isinstance(asked, str) else asked

    @property
    def file(self) -> str:
        """The name of its local file."""
        return self.configuration if self.category else self.name

    def has(self, row: object) -> bool:
        """Return whether a row of the file or hub configuration belongs to the set."""
        return (
            self.category is None
            or not isinstance(row, dict)
            or row.get("category") == self.category
        )


LIVECODEBENCH = tuple(f"test{n}.jsonl" for n in ("", 2, 3, 4, 5, 6))
PROBLEM = "{problem}" + REASON
SETS = (
    QuestionSet(
        "aime24", "AIME 2024", 30, "HuggingFaceH4/aime_2024", ("problem",), PROBLEM, "train"
    ),
    QuestionSet("aime25", "AIME 2025", 30, "MathArena/aime_2025", ("problem",), PROBLEM, "train"),
    QuestionSet(
        "alpaca", "Alpaca", 128, "tatsu-lab/alpaca", ("instruction", "input"), instruction, "train"
    ),
    QuestionSet(
        "gsm8k",
        "GSM8K",
        128,
        "openai/gsm8k",
        ("question",),
        "{question}" + REASON,
        configuration="main",
    ),
    QuestionSet("humaneval", "HumanEval", 164, "openai/openai_humaneval", ("prompt",), PROGRAM),
    QuestionSet(
        "livecodebench",
        "LiveCodeBench",
        128,
        "livecodebench/code_generation_lite",
        ("question_content", "starter_code"),
        contest,
        split="train",  # what `datasets` calls rows that come from plain files
        files=LIVECODEBENCH,
    ),
    QuestionSet("math500", "MATH-500", 128, "HuggingFaceH4/MATH-500", ("problem",), PROBLEM),
    QuestionSet(
        "mbpp",
        "MBPP",
        128,
        "google-research-datasets/mbpp",
        ("prompt",),
        "{prompt}",
        configuration="sanitized",
    ),
    QuestionSet(
        "mt-bench",
        "MT-Bench",
        80,
        "HuggingFaceH4/mt_bench_prompts",
        ("prompt",),
        itemgetter("prompt"),
        "train",
    ),
    QuestionSet(
        "swe-bench",
        "SWE-bench Lite",
        128,
        "princeton-nlp/SWE-bench_Lite",
        ("problem_statement",),
        ISSUE,
    ),
)

SPEED = ("nvidia/SPEED-Bench", ("turns", "category"), itemgetter("turns"), "test")
DOMAINS = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
)
DOMAINS += ("summarization", "writing")
SPLITS = tuple(
    f"throughput_{size}" for size in ("1k", "2k", "8k", "16k", "32k")
)  # tokens of a prompt
SPEED_BENCH = (
    *(
        QuestionSet(name, name, 80, *SPEED, configuration="qualitative", category=name)
        for name in DOMAINS
    ),
    *(QuestionSet(name, name, 1536, *SPEED, configuration=name) for name in SPLITS),
)
WITHHELD = "FULL BENCHMARK DATA SHOULD BE FETCHED"  # what the hub has where a source forbids copies
SUITES = {
    "ddtree": SETS,
    "speed_bench": SPEED_BENCH,
    "files": (),
}  # files: whatever sets the folder has


@dataclass
class SuiteConfig:
    """Question sets that `eval` uses instead of held-out prompts.

    name: ddtree: the ten sets of DDTree's table 1; speed_bench: the domains and throughput splits
        of SPEED-Bench; files: your own, one set per file
    folder: local copies, a file or folder per set, with the set's name; null: from the hub
    sets: names of the sets to use; empty: all
    max_questions: maximum number of questions per set; null: as many as in the paper, or the whole
        file
    temperatures: every set is decoded at each of these temperatures; 0 is greedy decoding
    thinking: value of enable_thinking for chat templates that have it; the paper's results are
        without
    """

    name: str | None = None
    folder: str | None = None
    sets: list[str] = field(default_factory=list)
    max_questions: int | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    thinking: bool = False

    def check(self) -> None:
        """Raise ValueError for a suite that cannot be asked, before anything is loaded."""
        if self.name is None:
            if self.folder is not None or self.sets:
                raise ValueError(
                    f"suite.folder and suite.sets need a suite: suite={' or suite='.join(SUITES)}"
                )
            return
        if self.name not in SUITES:
            raise ValueError(f"suite.name={self.name}: use {', '.join(SUITES)}")
        if self.max_questions is not None and self.max_questions < 1:
            raise ValueError(
                f"suite.max_questions={self.max_questions}: at least 1 question of a set"
            )
        if not self.temperatures or any(
            not (t == 0 or 0.001 <= t < float("inf")) for t in self.temperatures
        ):
            raise ValueError(
                f"suite.temperatures={list(self.temperatures)}: 0 for greedy decoding, or at least 0.001"
            )
        if self.folder is None and self.name == "files":
            raise ValueError(
                "suite=files needs suite.folder=<a folder of .jsonl or .parquet files, or one file>"
            )
        if self.folder is not None and not Path(self.folder).exists():
            raise ValueError(f"suite.folder={self.folder}: no such file or folder")
        self.names()

    def names(self) -> list[str]:
        """Return the sets that are asked. Raises ValueError for one that is not there."""
        found = None if self.folder is None else set_files(self.folder)
        public = SUITES[self.name]
        known = (
            [one.name for one in public if found is None or one.file in found]
            if public
            else list(found)
        )
        missing = [name for name in self.sets or [one.name for one in public] if name not in known]
        if not known:
            raise ValueError(f"suite.folder={self.folder}: no questions there, such as gsm8k.jsonl")
        if missing:
            raise ValueError(
                f"suite.sets: no {', '.join(missing)} among {', '.join(known)}: name those that are there by "
                "suite.sets=[...]"
            )
        return [name for name in known if not self.sets or name in self.sets]


@dataclass(frozen=True)
class Questions:
    """A set that is ready to be asked."""

    name: str
    title: str
    chats: list[Chat]


def load_suite(config: SuiteConfig) -> list[Questions]:
    """Return the sets of a checked configuration. Raises ValueError, naming set, file and line, for
    what cannot be read."""
    suite = []
    files = {} if config.folder is None else set_files(config.folder)
    public = {one.name: one for one in SUITES[config.name]}
    for name in config.names():
        one = public.get(name)
        limit = config.max_questions
        file = name
        if one is not None:
            limit = min(one.count, limit or one.count)
            file = one.file
        rows = (
            (pair for part in files[file] for pair in file_records(part))
            if files
            else hub_rows(one)
        )
        chats = [asked_chat(one, where, row) for where, row in rows if one is None or one.has(row)]
        if not chats:
            raise ValueError(f"suite.folder={config.folder}: no questions of {name}")
        suite.append(Questions(name, one.title if one else name, sample(chats, limit)))
    return suite


def set_files(folder: str) -> dict[str, list[Path]]:
    """Return the files of a folder by the sets that they belong to, or the one file:
    <folder>/<set>.jsonl (.jsonl.gz, .json, .parquet, .txt), or all in <folder>/<set>/."""
    top = Path(folder)
    sets: dict[str, list[Path]] = {}
    for file in sorted([*top.glob("*"), *top.glob("*/*")]) if top.is_dir() else [top]:
        if file.is_file() and file.name.endswith(ENDINGS):
            part = file.relative_to(top).parts[0] if top.is_dir() else file.name
            sets.setdefault(part.split(".")[0], []).append(file)
    return sets


def hub_rows(one: QuestionSet) -> Iterator[tuple[str, dict]]:
    """Yield (where, row) of a set of the hub: data only, no code that comes with it."""
    from datasets import load_dataset

    try:
        if one.files:
            urls = [f"hf://datasets/{one.hub}/{name}" for name in one.files]
            rows = load_dataset("json", data_files=urls, split=one.split)
        else:
            rows = load_dataset(one.hub, one.configuration, split=one.split)
    except (OSError, ValueError) as error:  # a ConnectionError is an OSError
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{one.title} ({one.hub}) could not be read from the hub ({reason}): give suite.folder=<your copies>, or "
            "leave it out by suite.sets=[...]"
        ) from error
    yield from (
        (f"{one.hub}, row {number}", row)
        for number, row in enumerate(rows.select_columns([*one.columns]))
    )


def asked_chat(one: QuestionSet | None, where: str, row: object) -> Chat:
    """Return what a row of a public set asks, or a row of the user's own: {"turns": [texts]}.
    Raises ValueError for a row that asks nothing."""
    row = row if isinstance(row, dict) else {}
    if one is not None and isinstance(
        row.get("messages"), list
    ):  # as SPEED-Bench's script writes turns
        asked = [
            message
            for message in row["messages"]
            if isinstance(message, dict) and message.get("role") == "user"
        ]
        row = row | {"turns": [message.get("content") for message in asked]}
    if one is not None and "turns" not in row:
        missing = [name for name in one.columns if name not in row]
        if missing:
            raise ValueError(
                f"{where}: {one.title} has no column {missing[0]} here; a list of texts in turns would do"
            )
        return said(one.turns(row))
    turns = row.get("turns")
    if (
        not isinstance(turns, list)
        or not turns
        or not all(isinstance(text, str) and text for text in turns)
    ):
        raise ValueError(f"{where}: a row is a JSON object with turns, a list of texts")
    if any(text.startswith(WITHHELD) for text in turns):
        raise ValueError(
            f"{where}: the hub has no text of this row; fill it in with SPEED-Bench's own script, and give "
            "suite.folder=<what it wrote>"
        )
    return said(turns)


def said(texts: Iterable[str]) -> Chat:
    """Return the user's texts, turn by turn, as a chat."""
    return [[{"role": "user", "content": text}] for text in texts]


def sample(chats: list[Chat], limit: int | None) -> list[Chat]:
    """Return at most `limit` of the chats: those that `datasets` gives by
    shuffle(seed=0).select(range(limit)), which is how the published figures were measured."""
    if limit is None or len(chats) <= limit:
        return chats
    import numpy as np

    return [chats[i] for i in np.random.default_rng(0).permutation(len(chats))[:limit]]
