"""`regenerate`: the answers of a data set, written anew by the target."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.cli.models import OfTarget, load, text_options
from infer.config import DecodeOptions
from infer.masked.config import MaskedConfig
from infer.utils.checks import at_least, check_parts

PROMPT_TOKENS = 96  # of a row that is one text, which are the prompt
MOST_FAILURES = 100  # rows that may fail; more end the run


@dataclass
class RegenerateCommand(OfTarget):
    """Let the target rewrite the answers of a data set, for a drafter to learn from.

    out: one line a row, in the rows' order; a stopped run goes on where it was
    checkpoint: a drafter that makes it faster, for decoding.method=chain or ddtree
    server: instead of our engine, an address with OpenAI's API, such as http://host:8000/v1
    at_once: requests under way at the server
    shard: which of several equal parts of the rows is answered: 2/8 is the second of eight
    capacity: tokens of prompt and answer together in our engine, at most; longer chats end before;
        None: room for all
    target: see TargetConfig in infer/config.py
    data: the prompts, see DataConfig in data/rows.py
    decoding: see DecodeOptions in infer/config.py
    masked: where the target is a masked diffusion model, see MaskedConfig in infer/masked/config.py
    """

    out: str = "runs/answers.jsonl"
    checkpoint: str | None = None
    server: str | None = None
    at_once: int = 64
    shard: str = "1/1"
    capacity: int | None = None
    data: DataConfig = field(default_factory=DataConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    masked: MaskedConfig = field(default_factory=MaskedConfig)

    @property
    def part(self) -> tuple[int, int]:
        """Which part of how many is answered, counted from 1. Raises ValueError where `shard` does not
        say."""
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(f"shard={self.shard}: i/n, such as 2/8 for the second of eight parts")
        return int(number), int(count)

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        check_parts(self)
        if self.server is None and self.checkpoint is None and self.decoding.drafts:
            raise ValueError(f"decoding.method={self.decoding.method} needs checkpoint=..., or use decoding=plain")
        at_least(self, at_once=1, capacity=2)
        assert self.part


def run(config: RegenerateCommand) -> None:
    from infer.utils.files import locked

    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with locked(Path(f"{out}.lock"), f"out={out}", "out="):
        answer(config, out)


def answer(config: RegenerateCommand, out: Path) -> None:
    """Write the answers to `out`."""
    from data.template import habits
    from infer.serving.clients import by_server
    from infer.serving.regenerate import by_engine, options_of, regenerate, rows_content
    from infer.targets.identity import target_identity
    from infer.targets.loading import load_tokenizer
    from infer.targets.target import tokenizer_digest

    place, server, options = config.target, config.server, config.decoding
    if server is None:
        options = text_options(place, options, config.masked)
        target, drafter = load(place, config.checkpoint if config.decoding.drafts else None)
        tokenizer = target.tokenizer
        identity = target_identity(place.path, tokenizer_digest(tokenizer))
    else:  # it has the model
        tokenizer = load_tokenizer(place.path, place.trust_remote_code, place.chat_template_kwargs)
        identity = {"tokenizer": tokenizer_digest(tokenizer)}

    def rows() -> Iterator:
        return chosen_rows(config, tokenizer)

    total, rows_digest = rows_content(rows())
    settings = {"target": place.path, "server": server, "data": asdict(config.data)}
    settings |= {"prompt_tokens": PROMPT_TOKENS, "shard": config.shard} | options_of(options)
    settings["content"] = {"target": identity, "data": rows_digest}
    settings |= {"chat_template_kwargs": place.chat_template_kwargs} if place.chat_template_kwargs else {}
    if server is None:
        capacity = config.capacity or longest(rows(), target, options.max_new_tokens)
        answers = by_engine(target, drafter, options, capacity)
    else:

        def prompt_end(row) -> str:
            return habits(tokenizer, row.template).asks if row.chat else ""

        answers = by_server(server, options, config.at_once, prompt_end)
    counts = regenerate(rows(), answers, out, settings, MOST_FAILURES, total)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} rows failed")


def chosen_rows(config: RegenerateCommand, tokenizer) -> Iterator:
    """Yield the rows of the data that this shard answers. Their templates are told what they say
    themselves, and what target.chat_template_kwargs says, which counts more: the answers are new."""
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
            most = max(most, len(encode(target, row.prompt, row.template, row.tools)) + turns * answer)
    return min(most, positions_of(target)) or answer + 1
