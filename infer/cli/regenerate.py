"""The command `regenerate`: lets the target generate the answers of a data set again."""

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from data.rows import DataConfig
from infer.cli.models import (
    CommandWithTarget,
    MaskedConfig,
    load_target_and_drafter,
    resolve_decode_options,
)
from infer.config import DecodeOptions, TextOptions
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS
from infer.utils.checks import check_nested_options, require_at_least, require_positive

if TYPE_CHECKING:
    from infer.serving.regeneration_task import PromptExample

TEXT_PREFIX_TOKENS_AS_PROMPT = 96  # first tokens of a text without a prompt, used as its prompt
MAX_FAILED_EXAMPLES = 100  # more end the run


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
        """How a question is generated."""
        return TextOptions(
            max_new_tokens=self.length_range[-1],
            loop_period=MAX_LOOP_PERIOD_TOKENS,
            temperature=self.temperature,
            top_p=self.top_p,
        )

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        require_positive(self, "questions.", "temperature")
        if len(self.length_range) != 2 or not 1 <= self.length_range[0] <= self.length_range[1]:
            raise ValueError(
                f"questions.length_range={self.length_range}: give the minimum and the maximum, "
                "such as [4,128]"
            )
        self.text.check()


@dataclass
class RegenerateCommand(CommandWithTarget):
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
    def shard_position(self) -> tuple[int, int]:
        """The number of this shard, from 1, and the number of shards.

        Raises ValueError for a malformed `shard`.
        """
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(
                f"shard={self.shard}: give i/n, such as 2/8 for the second of eight parts"
            )
        return int(number), int(count)

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        check_nested_options(self)
        if self.server is None and self.checkpoint is None and self.decoding.uses_drafter:
            raise ValueError(
                f"decoding.method={self.decoding.method} needs checkpoint=...; use decoding=plain "
                "to decode without a drafter"
            )
        require_at_least(self, max_concurrent_requests=1, max_length=2)
        self.shard_position  # noqa: B018  raises ValueError


def run(config: RegenerateCommand) -> None:
    """Write the answers, and print how many there are."""
    from infer.utils.files import hold_lock_file

    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock_file(Path(f"{out}.lock"), f"out={out}", "out="):
        counts = Regeneration(config).write_answers(out)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} examples failed")


class Regeneration:
    """What `regenerate` needs to answer examples: the tokenizer, and an engine or a server.

    identity: identifies the target in the settings that are stored with the answers
    openings: with data=self, how the chats begin, one for each system prompt
    """

    def __init__(self, config: RegenerateCommand) -> None:
        """Load the tokenizer, and the target unless a server has it. Raises ValueError."""
        from data.questions import build_question_prompt
        from infer.targets.identity import target_identity
        from infer.targets.loading import load_tokenizer
        from infer.targets.target import tokenizer_digest

        target_config = config.target
        self.config = config
        self.options: Any = config.decoding
        self.target: Any = None
        self.drafter: Any = None
        self.tokenizer: Any = None
        self.openings = []
        self.generates_questions = config.data.source == "self"
        if not self.generates_questions:
            print_question_counts(config.data)
        if config.server is not None or self.generates_questions:
            self.tokenizer = load_tokenizer(
                target_config.path,
                target_config.trust_remote_code,
                target_config.chat_template_kwargs,
            )
            self.identity: dict = {"tokenizer": tokenizer_digest(self.tokenizer)}
        if self.generates_questions:
            # Before the weights are loaded: it raises ValueError for unsuitable chat templates.
            for system_prompt in config.questions.system or [None]:
                self.openings.append(build_question_prompt(self.tokenizer, system_prompt))
        if config.server is not None:
            return

        decoding = config.decoding
        if not decoding.uses_drafter:
            # The limit of positions keeps the time between two tokens short, and nobody waits for
            # the next token here. With trees, it also limits what many rows compute.
            decoding = replace(decoding, max_num_batched_tokens=None)
        self.options = resolve_decode_options(target_config, decoding, config.masked)
        checkpoint = config.checkpoint if config.decoding.uses_drafter else None
        self.target, self.drafter = load_target_and_drafter(target_config, checkpoint)
        self.tokenizer = self.target.tokenizer
        self.identity = target_identity(target_config.path, tokenizer_digest(self.tokenizer))

    def write_answers(self, out: Path) -> dict[str, int]:
        """Write the answers to `out`, with data=self after the questions.

        Returns {"answers": count, "failed": count}.
        """
        if not self.generates_questions:
            return self.answer_examples(
                lambda: load_data_examples(self.config, self.tokenizer), self.options, out
            )
        question_file = Path(f"{out}.questions")
        question_options = replace(
            self.config.questions.text, seed=self.options.seed, stop=self.openings[0].stop_strings
        )
        self.answer_examples(
            lambda: make_opening_examples(self.config, self.openings),
            replace(self.options, **vars(question_options)),
            question_file,
        )
        examples = load_question_examples(self.config, self.openings, self.tokenizer, question_file)
        return self.answer_examples(lambda: iter(examples), self.options, out)

    def answer_examples(
        self, load_examples: "Callable[[], Iterator[PromptExample]]", options: Any, out: Path
    ) -> dict[str, int]:
        """Write the target's answers to examples.

        `load_examples` returns the same examples at every call.
        """
        from infer.serving.clients import OpenAIClient
        from infer.serving.regenerate import (
            build_engine_answerer,
            digest_examples,
            regenerate_answers,
        )

        count, examples_digest = digest_examples(load_examples())
        settings = self.answer_settings(options, examples_digest)
        server = self.config.server
        if server is None:
            capacity = self.config.max_length
            if capacity is None:
                capacity = compute_required_capacity(
                    load_examples(), self.target, options.max_new_tokens
                )
            answer_examples = build_engine_answerer(self.target, self.drafter, options, capacity)
        else:
            client = OpenAIClient(
                server, options, self.config.max_concurrent_requests, self.prompt_end
            )
            answer_examples = client.answer_examples
        return regenerate_answers(
            load_examples(), answer_examples, out, settings, MAX_FAILED_EXAMPLES, count
        )

    def answer_settings(self, options: Any, examples_digest: str) -> dict:
        """Return everything that determines the answers, for the file of settings."""
        from infer.serving.regenerate import select_output_options

        config = self.config
        settings: dict[str, Any] = {
            "target": config.target.path,
            "server": config.server,
            "data": asdict(config.data),
            "prompt_tokens": TEXT_PREFIX_TOKENS_AS_PROMPT,
            "shard": config.shard,
        }
        settings |= select_output_options(options)
        settings["content"] = {"target": self.identity, "data": examples_digest}
        if config.target.chat_template_kwargs:
            settings["chat_template_kwargs"] = config.target.chat_template_kwargs
        if config.target.quantization != "none":
            settings["quantization"] = config.target.quantization
        if self.generates_questions:
            # Without data.max_examples and the number of examples. A larger limit continues the
            # file, because the first questions are the same.
            settings["content"]["data"] = asdict(config.questions)
            settings["data"] = {"source": "self"}
            settings["rows"] = None
        return settings

    def prompt_end(self, example: "PromptExample") -> str:
        """Return the text with which the chat template begins an answer; "" for a text example."""
        from data.template import detect_template_markers

        return (
            detect_template_markers(self.tokenizer, example.template_options).generation_prompt
            if example.is_chat
            else ""
        )


def print_question_counts(data: DataConfig) -> None:
    """Print to stderr how many questions a data set has.

    Called before a model is loaded. Raises ValueError if there are none, or too many invalid ones.
    """
    from data.counts import ExampleCounts
    from data.rows import read_questions

    counts = ExampleCounts()
    for _ in read_questions(data, counts):
        pass
    print(*counts.format_lines(), sep="\n", file=sys.stderr)


def make_opening_examples(config: RegenerateCommand, openings: list) -> "Iterator[PromptExample]":
    """Yield the prompts of this shard that the target continues with a question."""
    from infer.serving.regeneration_task import PromptExample

    shard_number, shard_count = config.shard_position
    question_count = cast(int, config.data.max_examples)  # required with data=self
    for index in range(shard_number - 1, question_count, shard_count):
        yield PromptExample(index, openings[index % len(openings)].text)


def load_question_examples(
    config: RegenerateCommand, openings: list, tokenizer: Any, question_file: Path
) -> "list[PromptExample]":
    """Return the generated questions that are worth an answer, as chats.

    question_file: the answers to `make_opening_examples`

    Raises ValueError if there is none.
    """
    from data.questions import filter_questions
    from infer.serving.regeneration_task import PromptExample

    with question_file.open(encoding="utf-8") as lines:
        selected, dropped = filter_questions(
            map(json.loads, lines), tokenizer, config.questions.length_range[0]
        )
    dropped_counts = "".join(f", {count} {reason}" for reason, count in dropped.most_common())
    print(
        f"data=self: {len(selected)} questions to answer{dropped_counts}; all of them are in "
        f"{question_file}",
        file=sys.stderr,
    )
    if not selected:
        raise ValueError(
            f"data=self: none of the generated questions can be answered, see {question_file}"
        )
    template_options = config.target.chat_template_kwargs
    examples = []
    for index, text in selected.items():
        question = {"role": "user", "content": text}
        messages = [*openings[index % len(openings)].messages, question]
        examples.append(PromptExample(index, messages, template_options=template_options))
    return examples


def load_data_examples(config: RegenerateCommand, tokenizer: Any) -> "Iterator[PromptExample]":
    """Yield the examples of the data that belong to this shard.

    Options of the chat template are those of the example, overridden by
    target.chat_template_kwargs.
    """
    from data.rows import read_questions
    from infer.serving.regeneration_task import PromptExample

    shard_number, shard_count = config.shard_position
    for index, row in enumerate(read_questions(config.data)):
        if index % shard_count != shard_number - 1:
            continue
        chat = row["chat"]
        if chat:
            template_options = chat["template"] | config.target.chat_template_kwargs
            yield PromptExample(index, chat["messages"], chat["tools"], template_options)
            continue
        prompt = row["prompt"]
        if not prompt:
            ids = tokenizer(row["text"])["input_ids"][:TEXT_PREFIX_TOKENS_AS_PROMPT]
            prompt = tokenizer.decode(ids, skip_special_tokens=True)
        yield PromptExample(index, prompt)


def compute_required_capacity(
    examples: "Iterator[PromptExample]", target: Any, max_new_tokens: int
) -> int:
    """Return the positions that the longest example needs with all its answers.

    max_new_tokens: limit of one answer
    """
    from infer.api import encode_prompt, max_positions

    capacity = 0
    for example in examples:
        answer_count = 1 + sum(message["role"] == "assistant" for message in example.messages)
        # An invalid prompt is reported later, as a failed example.
        with suppress(ValueError):
            prompt_ids = encode_prompt(
                target, example.prompt, example.template_options, example.tools
            )
            capacity = max(capacity, len(prompt_ids) + answer_count * max_new_tokens)
    return min(capacity, max_positions(target)) or max_new_tokens + 1
