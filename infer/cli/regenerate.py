"""`regenerate`: the answers of a data set, written anew by the target."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

from data.rows import DataConfig
from infer.cli.models import MaskedConfig, OfTarget, load, text_options
from infer.config import DecodeOptions, TextOptions
from infer.engine.loops import LONGEST_PERIOD
from infer.utils.checks import above_zero, at_least, check_parts

PROMPT_TOKENS = 96  # of a row that is one text, which are the prompt
MOST_FAILURES = 100  # rows that may fail; more end the run


@dataclass
class QuestionsConfig:
    """How the target writes questions, with data=self: data.max_examples of them, with
    decoding.seed.

    system: system prompts of the chats, used in rotation; empty: what the chat template adds by
        itself
    temperature: sampling temperature, above 0
    top_p: sample from the most likely tokens whose probabilities add up to this value
    length_range: minimum and maximum tokens of a question
    """

    system: list[str] = field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 0.9
    length_range: list[int] = field(default_factory=lambda: [4, 128])

    @property
    def text(self) -> TextOptions:
        """Return how a question is written."""
        sampling = {"temperature": self.temperature, "top_p": self.top_p}
        return TextOptions(
            max_new_tokens=self.length_range[-1], loop_period=LONGEST_PERIOD, **sampling
        )

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        above_zero(self, "questions.", "temperature")
        if len(self.length_range) != 2 or not 1 <= self.length_range[0] <= self.length_range[1]:
            raise ValueError(
                f"questions.length_range={self.length_range}: the fewest and the most, such as [4,128]"
            )
        self.text.check()


@dataclass
class RegenerateCommand(OfTarget):
    """Let the target write new answers for the prompts of a data set, as training data for a
    drafter.

    out: the file that is written, one line per example in the order of the data set; a run that was
        stopped is resumed
    checkpoint: a drafter that makes generation faster, for decoding.method=chain or ddtree
    server: an OpenAI-compatible server to use instead of our engine, such as http://host:8000/v1
    max_concurrent_requests: number of concurrent requests to the server
    shard: which part of the data set to answer: 2/8 is the second of eight equal parts
    max_length: maximum tokens of prompt and answer together in our engine; longer chats are cut
        there; null: enough for all
    target: see TargetConfig in infer/config.py
    data: the prompts, see DataConfig in data/rows.py
    questions: how questions are written with data=self, see QuestionsConfig
    decoding: see DecodeOptions in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    """

    out: str = "runs/answers.jsonl"
    checkpoint: str | None = None
    server: str | None = None
    max_concurrent_requests: int = 64
    shard: str = "1/1"
    max_length: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    questions: QuestionsConfig = field(default_factory=QuestionsConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    masked: MaskedConfig = field(default_factory=MaskedConfig)

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many is answered, counted from 1. Raises ValueError where `shard` does
        not say."""
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"shard={self.shard}: i/n, such as 2/8 for the second of eight parts")
        return int(number), int(count)

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        check_parts(self)
        if self.server is None and self.checkpoint is None and self.decoding.drafts:
            raise ValueError(
                f"decoding.method={self.decoding.method} needs checkpoint=..., or use decoding=plain"
            )
        at_least(self, max_concurrent_requests=1, max_length=2)
        assert self.part


def run(config: RegenerateCommand) -> None:
    from infer.utils.files import locked

    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{out}.lock"), f"out={out}", "out="):
        answer(config, out)


def answer(config: RegenerateCommand, out: Path) -> None:
    """Write the answers to `out`."""
    from data.questions import opening
    from data.template import habits
    from infer.serving.clients import Client
    from infer.serving.regenerate import by_engine, options_of, regenerate, rows_content
    from infer.targets.identity import target_identity
    from infer.targets.loading import load_tokenizer
    from infer.targets.target import tokenizer_digest

    place = config.target
    server = config.server
    options = config.decoding
    itself = config.data.source == "self"
    if not itself:
        print_counts(config.data)
    if server or itself:
        tokenizer = load_tokenizer(place.path, place.trust_remote_code, place.chat_template_kwargs)
        identity = {"tokenizer": tokenizer_digest(tokenizer)}
        # how chats begin, one for every system prompt: refused before weights are read
        openings = (
            [opening(tokenizer, system) for system in config.questions.system or [None]]
            if itself
            else []
        )
    if server is None:  # else it has the model
        # nobody waits for a next token, so prompts need no limit of positions; the trees of many
        # rows do
        options = text_options(
            place,
            options if options.drafts else replace(options, max_num_batched_tokens=None),
            config.masked,
        )
        target, drafter = load(place, config.checkpoint if config.decoding.drafts else None)
        tokenizer = target.tokenizer
        identity = target_identity(place.path, tokenizer_digest(tokenizer))

    def prompt_end(row) -> str:
        return habits(tokenizer, row.template).asks if row.chat else ""

    def write(rows: Callable[[], Iterator], options: TextOptions, out: Path) -> dict[str, int]:
        """Let the target go on from rows, which are the same each time."""
        total, rows_digest = rows_content(rows())
        settings = {"target": place.path, "server": server, "data": asdict(config.data)}
        settings |= {"prompt_tokens": PROMPT_TOKENS, "shard": config.shard} | options_of(options)
        settings["content"] = {"target": identity, "data": rows_digest}
        settings |= (
            {"chat_template_kwargs": place.chat_template_kwargs}
            if place.chat_template_kwargs
            else {}
        )
        settings |= {"quantization": place.quantization} if place.quantization != "none" else {}
        if (
            itself
        ):  # of more questions the first are the same, so that a larger data.max_examples goes on
            settings["content"]["data"] = asdict(config.questions)
            settings |= {"data": {"source": "self"}, "rows": None}
        if server is None:
            capacity = config.max_length or longest(rows(), target, options.max_new_tokens)
            answers = by_engine(target, drafter, options, capacity)
        else:
            answers = Client(server, options, config.max_concurrent_requests, prompt_end).answers
        return regenerate(rows(), answers, out, settings, MOST_FAILURES, total)

    rows = partial(chosen_rows, config, tokenizer)
    if itself:
        file = Path(f"{out}.questions")
        text = replace(config.questions.text, seed=options.seed, stop=openings[0].stop)
        write(partial(opened_rows, config, openings), replace(options, **vars(text)), file)
        rows = partial(iter, asked_rows(config, openings, tokenizer, file))
    counts = write(rows, options, out)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} rows failed")


def print_counts(data: DataConfig) -> None:
    """Read the questions of a data set and print how many there are. Raises ValueError, before a
    model is loaded, where there are none or too many are broken."""
    from data.counts import ExampleCounts
    from data.rows import questions

    counts = ExampleCounts()
    for _ in questions(data, counts):
        pass
    print(*counts.lines(), sep="\n", file=sys.stderr)


def opened_rows(config: RegenerateCommand, openings: list) -> Iterator:
    """Yield the rows of this shard that the target goes on from with a question."""
    from infer.serving.dialogue import Row

    part, parts = config.part
    for index in range(part - 1, config.data.max_examples, parts):
        yield Row(index, openings[index % len(openings)].text)


def asked_rows(config: RegenerateCommand, openings: list, tokenizer, file: Path) -> list:
    """Return the questions that are worth an answer, of those that `opened_rows` were gone on with
    in `file`, as rows. Raises ValueError where there is none."""
    from data.questions import sifted
    from infer.serving.dialogue import Row

    with file.open(encoding="utf-8") as lines:
        kept, dropped = sifted(map(json.loads, lines), tokenizer, config.questions.length_range[0])
    said = "".join(f", {count} {reason}" for reason, count in dropped.most_common())
    print(
        f"data=self: {len(kept)} questions to answer{said}; all of them are in {file}",
        file=sys.stderr,
    )
    if not kept:
        raise ValueError(
            f"data=self: none of the target's questions is worth an answer, see {file}"
        )
    rows = []
    for index, text in kept.items():
        messages = [*openings[index % len(openings)].before, {"role": "user", "content": text}]
        rows.append(Row(index, messages, template=config.target.chat_template_kwargs))
    return rows


def chosen_rows(config: RegenerateCommand, tokenizer) -> Iterator:
    """Yield the rows of the data that this shard answers. Their templates are told what they say
    themselves, and what target.chat_template_kwargs says, which counts more: the answers are
    new."""
    from data.rows import questions
    from infer.serving.dialogue import Row

    part, parts = config.part
    for index, row in enumerate(questions(config.data)):
        if index % parts != part - 1:
            continue
        if row["chat"]:
            chat = row["chat"]
            told = chat["template"] | config.target.chat_template_kwargs
            yield Row(index, chat["messages"], chat["tools"], told)
            continue
        prompt = row["prompt"]
        if not prompt:
            ids = tokenizer(row["text"])["input_ids"][:PROMPT_TOKENS]
            prompt = tokenizer.decode(ids, skip_special_tokens=True)
        yield Row(index, prompt)


def longest(rows: Iterator, target, answer: int) -> int:
    """Return the tokens of the longest row with all its answers, each of so many tokens at most."""
    from infer.api import encode, positions_of

    most = 0
    for row in rows:
        turns = 1 + sum(message["role"] == "assistant" for message in row.prompt) if row.chat else 1
        with suppress(ValueError):  # this row's fault is found again when it is asked
            most = max(
                most, len(encode(target, row.prompt, row.template, row.tools)) + turns * answer
            )
    return min(most, positions_of(target)) or answer + 1
