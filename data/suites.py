"""Read public benchmark questions, and build chats from the rows of their data sets.

DDTREE_QUESTION_SETS contains the ten question sets of Table 1 of the DDTree paper. The data sets,
splits, prompts and selected questions are those of the public scripts of DFlash's benchmark, whose
question counts the paper uses (appendix B). Results can therefore be compared with the paper.

SPEED_BENCH_QUESTION_SETS contains the domains and throughput splits of SPEED-Bench (2604.09557).
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from data.rows import EXAMPLE_FILE_SUFFIXES, read_file_records

# A chat as a list of turns. A turn is a list of messages {"role", "content"} that is sent to the
# target before the target answers.
ChatTurns = list[list[dict[str, str]]]

# The prompts are copied word for word from the scripts of DFlash's benchmark. `str.format` turns
# {{}} into {}.
MATH_REASONING_INSTRUCTION = (
    "\nPlease reason step by step, and put your final answer within \\boxed{{}}."
)
MATH_PROMPT = "{problem}" + MATH_REASONING_INSTRUCTION
HUMANEVAL_PROMPT = (
    "Write a solution to the following problem and make sure that it passes the "
    "tests:\n```python\n{prompt}\n```"
)
SWE_BENCH_PROMPT = "Problem Statement:\n{problem_statement}\nPlease fix the issue described above."
LIVECODEBENCH_PROMPT = (
    "You are an expert Python programmer. You will be given a question (problem specification) and "
    "will generate a correct Python program that matches the specification and passes all tests. "
    "You will NOT return anything except for the program\n\n"
    "### Question:\n{question_content}\n\n"
    "### Format: {format}\n```python\n{code}\n```\n\n"
    "### Answer: (use the provided format with backticks)"
)


def format_livecodebench_question(row: dict) -> str:
    """Return the prompt for a row of LiveCodeBench, with the row's starter code if it has any."""
    starter_code = row.get("starter_code")
    if starter_code:
        format_text = "Use the following code structure:"
    else:
        format_text = "Write your code in the following format:"
    return LIVECODEBENCH_PROMPT.format(
        question_content=row["question_content"],
        format=format_text,
        code=starter_code or "# YOUR CODE HERE",
    )


def format_alpaca_question(row: dict) -> str:
    """Return the prompt for a row of Alpaca: its instruction, and its input if it has any."""
    if row.get("input"):
        return f"{row['instruction']}\n\nInput:\n{row['input']}"
    return row["instruction"]


@dataclass(frozen=True)
class QuestionSet:
    """A public question set: where its data set is, and how a row becomes a question.

    name: name of the question set in the option suite.sets
    title: name of the question set in the result table
    published_question_count: number of questions that the published results use
    hub: name of the data set on the Hugging Face hub
    columns: names of the columns from which a question is built
    question_format: a format string with the names of columns, or a function of a row. The function
        returns the text of the question, or a list of texts, one for each turn of the chat
    split: split of the data set on the hub
    configuration: configuration (subset) of the data set on the hub; None for the default
    hub_files: names of the files to read, if `datasets` cannot load the hub repository as a data
        set
    category: only rows with this value in the column "category" belong to the question set. None
        means all rows
    """

    name: str
    title: str
    published_question_count: int
    hub: str
    columns: tuple[str, ...]
    question_format: str | Callable[[dict], str | list[str]]
    split: str = "test"
    configuration: str | None = None
    hub_files: tuple[str, ...] = ()
    category: str | None = None

    def format_turns(self, row: dict) -> list[str]:
        """Return the user messages that are built from a row, one text for each turn of the chat.

        Raises KeyError for a missing column.
        """
        if isinstance(self.question_format, str):
            return [self.question_format.format_map(row)]
        texts = self.question_format(row)
        return [texts] if isinstance(texts, str) else texts

    @property
    def local_file_stem(self) -> str:
        """The name, without suffix, of the file with this question set in suite.folder.

        All question sets with a category that have the same `configuration` share one file, which
        has the name of this configuration.
        """
        if self.category is None:
            return self.name
        assert self.configuration is not None
        return self.configuration

    def contains(self, row: object) -> bool:
        """Return whether a row belongs to this question set, by its category.

        True is also returned for a row that is no dictionary, so that `build_chat` reports the row.
        """
        if self.category is None or not isinstance(row, dict):
            return True
        return row.get("category") == self.category


LIVECODEBENCH_FILES = tuple(f"test{number}.jsonl" for number in ("", 2, 3, 4, 5, 6))
DDTREE_QUESTION_SETS = (
    QuestionSet(
        "aime24", "AIME 2024", 30, "HuggingFaceH4/aime_2024", ("problem",), MATH_PROMPT, "train"
    ),
    QuestionSet(
        "aime25", "AIME 2025", 30, "MathArena/aime_2025", ("problem",), MATH_PROMPT, "train"
    ),
    QuestionSet(
        "alpaca",
        "Alpaca",
        128,
        "tatsu-lab/alpaca",
        ("instruction", "input"),
        format_alpaca_question,
        "train",
    ),
    QuestionSet(
        "gsm8k",
        "GSM8K",
        128,
        "openai/gsm8k",
        ("question",),
        "{question}" + MATH_REASONING_INSTRUCTION,
        configuration="main",
    ),
    QuestionSet(
        "humaneval", "HumanEval", 164, "openai/openai_humaneval", ("prompt",), HUMANEVAL_PROMPT
    ),
    QuestionSet(
        "livecodebench",
        "LiveCodeBench",
        128,
        "livecodebench/code_generation_lite",
        ("question_content", "starter_code"),
        format_livecodebench_question,
        split="train",  # name of the split when `datasets` loads single files
        hub_files=LIVECODEBENCH_FILES,
    ),
    QuestionSet("math500", "MATH-500", 128, "HuggingFaceH4/MATH-500", ("problem",), MATH_PROMPT),
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
        SWE_BENCH_PROMPT,
    ),
)

SPEED_BENCH_HUB_NAME = "nvidia/SPEED-Bench"
SPEED_BENCH_COLUMNS = ("turns", "category")
SPEED_BENCH_DOMAINS = (
    "coding",
    "humanities",
    "math",
    "multilingual",
    "qa",
    "rag",
    "reasoning",
    "roleplay",
    "stem",
    "summarization",
    "writing",
)
SPEED_BENCH_PROMPT_LENGTHS = ("1k", "2k", "8k", "16k", "32k")  # prompt lengths in tokens
SPEED_BENCH_DOMAIN_QUESTIONS = 80
SPEED_BENCH_THROUGHPUT_QUESTIONS = 1536


def _build_domain_question_set(domain: str) -> QuestionSet:
    """Return the question set of one domain of SPEED-Bench."""
    return QuestionSet(
        domain,
        domain,
        SPEED_BENCH_DOMAIN_QUESTIONS,
        SPEED_BENCH_HUB_NAME,
        SPEED_BENCH_COLUMNS,
        itemgetter("turns"),
        configuration="qualitative",
        category=domain,
    )


def _build_throughput_question_set(prompt_length: str) -> QuestionSet:
    """Return a throughput question set of SPEED-Bench with prompts of a length such as "1k"."""
    name = f"throughput_{prompt_length}"
    return QuestionSet(
        name,
        name,
        SPEED_BENCH_THROUGHPUT_QUESTIONS,
        SPEED_BENCH_HUB_NAME,
        SPEED_BENCH_COLUMNS,
        itemgetter("turns"),
        configuration=name,
    )


SPEED_BENCH_QUESTION_SETS = (
    *map(_build_domain_question_set, SPEED_BENCH_DOMAINS),
    *map(_build_throughput_question_set, SPEED_BENCH_PROMPT_LENGTHS),
)

# SPEED-Bench on the hub lacks the text of some questions and has a text with this prefix instead.
WITHHELD_TEXT_PREFIX = "FULL BENCHMARK DATA SHOULD BE FETCHED"

# Keys are names of suites, values are their public question sets. The suite `files` has none: it
# uses the user's own question sets in suite.folder.
QUESTION_SUITES: dict[str, tuple[QuestionSet, ...]] = {
    "ddtree": DDTREE_QUESTION_SETS,
    "speed_bench": SPEED_BENCH_QUESTION_SETS,
    "files": (),
}

MIN_NONZERO_SUITE_TEMPERATURE = 0.001


@dataclass
class SuiteConfig:
    """The question sets that the command `eval` uses instead of held-out prompts.

    name: 'ddtree' is the ten question sets of Table 1 of the DDTree paper, 'speed_bench' is the
        domains and throughput splits of SPEED-Bench, 'files' is your own question sets, one per
        file
    folder: folder of local copies; each question set is a file or a folder with the name of the
        set. null reads the question sets from the Hugging Face hub
    sets: names of the question sets to use; an empty list uses all
    max_questions: maximum number of questions per question set; null uses as many questions as the
        published measurement, or all questions of your own files
    temperatures: each question set is decoded at each of these temperatures; 0 is greedy decoding
    thinking: value of the variable enable_thinking of the chat template; the DDTree paper measured
        without thinking
    """

    name: str | None = None
    folder: str | None = None
    sets: list[str] = field(default_factory=list)
    max_questions: int | None = None
    temperatures: list[float] = field(default_factory=lambda: [0.0, 1.0])
    thinking: bool = False

    def check(self) -> None:
        """Raise ValueError for invalid options. The questions are not read yet."""
        if self.name is None:
            if self.folder is not None or self.sets:
                suites = " or suite=".join(QUESTION_SUITES)
                raise ValueError(f"suite.folder and suite.sets need a suite; add suite={suites}")
            return
        if self.name not in QUESTION_SUITES:
            raise ValueError(
                f"suite.name={self.name} is unknown; use one of {', '.join(QUESTION_SUITES)}"
            )
        if self.max_questions is not None and self.max_questions < 1:
            raise ValueError(
                f"suite.max_questions={self.max_questions} is too small; set it to at least 1"
            )
        if not self.temperatures or not all(map(_is_valid_temperature, self.temperatures)):
            raise ValueError(
                f"suite.temperatures={list(self.temperatures)} is invalid; set at least one "
                "temperature, and each to 0 for greedy decoding or to at least "
                f"{MIN_NONZERO_SUITE_TEMPERATURE} for sampling"
            )
        if self.folder is None and self.name == "files":
            raise ValueError(
                "suite=files needs suite.folder=<a folder of .jsonl or .parquet files, or one file>"
            )
        if self.folder is not None and not Path(self.folder).exists():
            raise ValueError(f"suite.folder={self.folder}: no such file or folder")
        self.select_set_names()

    def select_set_names(self) -> list[str]:
        """Return the names of the question sets that are evaluated.

        Raises ValueError if no question set is available, or if a name in suite.sets is not that of
        an available question set.
        """
        assert self.name is not None
        public_sets = QUESTION_SUITES[self.name]
        local_files = None if self.folder is None else find_set_files(self.folder)

        if not public_sets:
            available = list(local_files or ())
        elif local_files is None:
            available = [question_set.name for question_set in public_sets]
        else:
            available = [
                question_set.name
                for question_set in public_sets
                if question_set.local_file_stem in local_files
            ]
        if not available:
            raise ValueError(
                f"suite.folder={self.folder} contains no question set; expected a file such as "
                "gsm8k.jsonl"
            )

        requested = self.sets or [question_set.name for question_set in public_sets]
        missing = [name for name in requested if name not in available]
        if missing:
            raise ValueError(
                f"the question sets {', '.join(missing)} are not available; choose from "
                f"{', '.join(available)} with suite.sets=[...]"
            )
        if not self.sets:
            return available
        return [name for name in available if name in self.sets]


def _is_valid_temperature(temperature: float) -> bool:
    """Return whether a temperature is 0 (greedy decoding) or large enough for sampling."""
    return temperature == 0 or MIN_NONZERO_SUITE_TEMPERATURE <= temperature < float("inf")


@dataclass(frozen=True)
class LoadedQuestionSet:
    """A question set with the chats that were built from its questions, to be decoded.

    name: name of the question set in the option suite.sets
    title: name of the question set in the result table
    """

    name: str
    title: str
    chats: list[ChatTurns]


def load_suite(config: SuiteConfig) -> list[LoadedQuestionSet]:
    """Read the question sets of a suite from local files or from the hub.

    Raises ValueError if a row is malformed, or if a question set has no questions.
    """
    assert config.name is not None
    local_files = {} if config.folder is None else find_set_files(config.folder)
    public_sets = {question_set.name: question_set for question_set in QUESTION_SUITES[config.name]}
    suite = []
    for name in config.select_set_names():
        question_set = public_sets.get(name)
        if question_set is None:
            title = file_name = name
            limit = config.max_questions
        else:
            title = question_set.title
            file_name = question_set.local_file_stem
            limit = min(
                question_set.published_question_count,
                config.max_questions or question_set.published_question_count,
            )

        if local_files:
            records = _read_all_records(local_files[file_name])
        else:
            assert question_set is not None
            records = load_hub_records(question_set)
        chats = [
            build_chat(question_set, location, record)
            for location, record in records
            if question_set is None or question_set.contains(record)
        ]
        if not chats:
            raise ValueError(
                f"suite.folder={config.folder} contains no questions of the question set {name}; "
                "leave it out of suite.sets"
            )
        suite.append(LoadedQuestionSet(name, title, sample_chats(chats, limit)))
    return suite


def _read_all_records(files: Iterable[Path]) -> Iterator[tuple[str, object]]:
    """Yield (location, record) for each record of several files, one file after another."""
    for file in files:
        yield from read_file_records(file)


def find_set_files(folder: str) -> dict[str, list[Path]]:
    """Find the files of question sets in a folder. Return {name of the question set: its files}.

    A question set consists of the file <folder>/<name>.jsonl (or another suffix of
    EXAMPLE_FILE_SUFFIXES) and of all files in the folder <folder>/<name>/. `folder` may also be the
    path of a single file.
    """
    top = Path(folder)
    sets: dict[str, list[Path]] = {}
    candidates = sorted([*top.glob("*"), *top.glob("*/*")]) if top.is_dir() else [top]
    for file in candidates:
        if not file.is_file() or not file.name.endswith(EXAMPLE_FILE_SUFFIXES):
            continue
        top_name = file.relative_to(top).parts[0] if top.is_dir() else file.name
        set_name, _, _ = top_name.partition(".")
        sets.setdefault(set_name, []).append(file)
    return sets


def load_hub_records(question_set: QuestionSet) -> Iterator[tuple[str, dict]]:
    """Yield (location, row) for each row of a question set on the hub.

    Only data files are loaded; code of the hub repository is never run.
    """
    from datasets import load_dataset

    hub = question_set.hub
    try:
        if question_set.hub_files:
            urls = [f"hf://datasets/{hub}/{name}" for name in question_set.hub_files]
            rows: Any = load_dataset("json", data_files=urls, split=question_set.split)
        else:
            rows = load_dataset(hub, question_set.configuration, split=question_set.split)
    except (OSError, ValueError) as error:  # ConnectionError is an OSError
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"{question_set.title} ({hub}) could not be read from the hub ({reason}); use local "
            "copies with suite.folder=..., or choose other question sets with suite.sets=[...]"
        ) from error
    for number, row in enumerate(rows.select_columns([*question_set.columns])):
        yield f"{hub}, row {number}", row


def build_chat(question_set: QuestionSet | None, location: str, record: object) -> ChatTurns:
    """Build a chat from a record, with one turn for each of the record's questions.

    question_set: the public question set of the record; None for a record {"turns": [texts]} of
        the user's own files
    location: file and line of the record, for error messages

    Raises ValueError with the location if the record contains no questions.
    """
    row = record if isinstance(record, dict) else {}
    # A row written by SPEED-Bench's download script has the column `messages` instead of `turns`.
    if question_set is not None and isinstance(row.get("messages"), list):
        row = row | {"turns": _get_user_texts(row["messages"])}
    if question_set is not None and "turns" not in row:
        missing = [name for name in question_set.columns if name not in row]
        if missing:
            raise ValueError(
                f'{location}: a row of {question_set.title} must have a column "{missing[0]}", or '
                'a column "turns" whose value is a list of texts'
            )
        return build_user_turns(question_set.format_turns(row))

    turns: Any = row.get("turns")
    is_list_of_texts = isinstance(turns, list) and all(
        isinstance(text, str) and text for text in turns
    )
    if not turns or not is_list_of_texts:
        raise ValueError(
            f'{location}: a row must be a JSON object with the key "turns", whose value is a list '
            "of texts"
        )
    if any(text.startswith(WITHHELD_TEXT_PREFIX) for text in turns):
        raise ValueError(
            f"{location}: the hub does not have the text of this row; run SPEED-Bench's own "
            "script and use suite.folder=<the script's output>"
        )
    return build_user_turns(turns)


def _get_user_texts(messages: list) -> list[object]:
    """Return the content of each message whose role is "user"."""
    return [
        message.get("content")
        for message in messages
        if isinstance(message, dict) and message.get("role") == "user"
    ]


def build_user_turns(texts: Iterable[str]) -> ChatTurns:
    """Return a chat in which each text is a turn with a single user message."""
    return [[{"role": "user", "content": text}] for text in texts]


def sample_chats(chats: list[ChatTurns], limit: int | None) -> list[ChatTurns]:
    """Return at most `limit` of the chats: those that DFlash's benchmark chooses, in the same
    order.

    Choice and order are those of `dataset.shuffle(seed=0).select(range(limit))` in the library
    `datasets`.
    """
    if limit is None or len(chats) <= limit:
        return chats
    import numpy as np

    order = np.random.default_rng(0).permutation(len(chats))
    return [chats[index] for index in order[:limit]]
