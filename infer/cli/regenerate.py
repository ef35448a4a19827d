"""The command `regenerate`: replaces the answers of a data set by answers of the target."""

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
from infer.config import DecodeOptions, SamplingOptions
from infer.engine.repetition import MAX_LOOP_PERIOD_TOKENS
from infer.utils.checks import check_nested_options, require_at_least, require_positive

if TYPE_CHECKING:
    from infer.serving.regeneration_task import PromptExample

TEXT_PREFIX_TOKENS_AS_PROMPT = (
    # If an example is a plain text without a prompt, its first tokens up to this number are the
    # prompt
    96
)
# Maximum number of failed examples; with more, the run ends with an error
MAX_FAILED_EXAMPLES = 100


@dataclass
class QuestionsConfig:
    """How the target generates questions with data=self. In this case, the target first generates
    all questions and then answers them. The number of questions is data.max_examples, and the
    random seed is decoding.seed.

    system: system prompts of the chats, used in rotation. An empty list means the system prompt
        that the chat template adds by default, if it has one
    temperature: sampling temperature, above 0
    top_p: sample only from the most likely tokens whose probabilities add up to this value
    length_range: minimum and maximum number of tokens of a question
    """

    system: list[str] = field(default_factory=list)
    temperature: float = 1.0
    top_p: float = 0.9
    length_range: list[int] = field(default_factory=lambda: [4, 128])

    @property
    def sampling_options(self) -> SamplingOptions:
        """The sampling options for generating a question."""
        return SamplingOptions(
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
                f"questions.length_range={self.length_range}: give the minimum and the maximum "
                "number of tokens, such as [4,128]"
            )
        self.sampling_options.check()


@dataclass
class RegenerateCommand(CommandWithTarget):
    """Let the target generate new answers for the prompts of a data set, as training data for a
    drafter.

    out: the JSON lines file that is written, with one line per example in the order of the data
        set. If an earlier run with the same options was stopped, its file is continued
    checkpoint: a drafter that makes generation faster, for decoding.method=chain or ddtree
    server: address of an OpenAI-compatible server that is used instead of our engine, such as
        http://host:8000/v1. null means our engine
    max_concurrent_requests: maximum number of requests that the server runs at the same time
    shard: the part of the data set that is answered; 2/8 is the second of eight equal parts
    max_length: maximum number of tokens of a prompt and its answers together in our engine. Longer
        chats end at this length. null means as many as the longest example needs
    target: see TargetConfig in infer/config.py
    data: the data set with the prompts, see DataConfig in data/rows.py
    questions: how the target generates questions with data=self, see QuestionsConfig in this file
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
        """The option `shard` as (number of this shard, from 1; number of shards).

        Raises ValueError for a malformed `shard`.
        """
        number, _, count = self.shard.partition("/")
        if not (number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)):
            raise ValueError(
                f"shard={self.shard}: give number/count, such as 2/8 for the second of eight parts"
            )
        return int(number), int(count)

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        check_nested_options(self)
        if self.server is None and self.checkpoint is None and self.decoding.uses_drafter:
            raise ValueError(
                f"decoding.method={self.decoding.method} needs a drafter: give checkpoint=..., or "
                "decoding=plain to decode without a drafter"
            )
        require_at_least(self, max_concurrent_requests=1, max_length=2)
        self.shard_position  # noqa: B018  raises ValueError if `shard` is malformed


def run(config: RegenerateCommand) -> None:
    """Generate the answers, write them to `config.out`, and print how many there are."""
    from infer.utils.files import hold_lock_file

    out = Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with hold_lock_file(Path(f"{out}.lock"), f"out={out}", "out="):
        counts = Regeneration(config).generate_and_write_answers(out)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} examples failed")


class Regeneration:
    """A run of the command `regenerate`, with the loaded target and drafter.

    identity: digests of the target's files, which are stored with the answers; if a server
        generates the answers, only the digest of the tokenizer
    question_prompts: prompts that end where a user's question begins, one for each system prompt;
        empty unless data=self
    """

    def __init__(self, config: RegenerateCommand) -> None:
        """Load the tokenizer. If no server is used, also load the target and the drafter.

        Raises ValueError if the data are invalid, if the chat template cannot be used with
        data=self, or if the target or the drafter cannot be loaded.
        """
        from data.questions import build_question_prompt
        from infer.targets.identity import compute_target_digests
        from infer.targets.loading import load_tokenizer
        from infer.targets.target import tokenizer_digest

        target_config = config.target
        self.config = config
        self.options: Any = config.decoding
        self.target: Any = None
        self.drafter: Any = None
        self.tokenizer: Any = None
        self.question_prompts = []
        self.generates_questions = config.data.source == "self"
        if not self.generates_questions:
            print_usable_question_count(config.data)
        if config.server is not None or self.generates_questions:
            self.tokenizer = load_tokenizer(
                target_config.path,
                target_config.trust_remote_code,
                target_config.chat_template_kwargs,
            )
            self.identity: dict = {"tokenizer": tokenizer_digest(self.tokenizer)}
        if self.generates_questions:
            # `build_question_prompt` raises ValueError if the chat template is unsuitable, so it is
            # called before the weights are loaded.
            for system_prompt in config.questions.system or [None]:
                self.question_prompts.append(build_question_prompt(self.tokenizer, system_prompt))
        if config.server is not None:
            return

        decoding = config.decoding
        if not decoding.uses_drafter:
            # max_num_batched_tokens shortens the time between two tokens of a sequence. Here only
            # the total time matters, so the limit is removed for baseline decoding. It is kept with
            # a drafter, because it also limits the sizes of the draft trees.
            decoding = replace(decoding, max_num_batched_tokens=None)
        self.options = resolve_decode_options(target_config, decoding, config.masked)
        checkpoint = config.checkpoint if config.decoding.uses_drafter else None
        self.target, self.drafter = load_target_and_drafter(target_config, checkpoint)
        self.tokenizer = self.target.tokenizer
        self.identity = compute_target_digests(target_config.path, tokenizer_digest(self.tokenizer))

    def generate_and_write_answers(self, out: Path) -> dict[str, int]:
        """Generate the answers and write them to the file `out`.

        With data=self, the target first generates the questions, which are written to the file
        <out>.questions. Returns {"answers": number of answered examples, "failed": number of failed
        examples}.
        """
        if not self.generates_questions:
            return self.answer_and_write_examples(
                lambda: load_data_examples(self.config, self.tokenizer), self.options, out
            )
        question_file = Path(f"{out}.questions")
        question_options = replace(
            self.config.questions.sampling_options,
            seed=self.options.seed,
            stop=self.question_prompts[0].stop_strings,
        )
        self.answer_and_write_examples(
            lambda: make_question_prompt_examples(self.config, self.question_prompts),
            replace(self.options, **vars(question_options)),
            question_file,
        )
        examples = load_question_examples(
            self.config, self.question_prompts, self.tokenizer, question_file
        )
        return self.answer_and_write_examples(lambda: iter(examples), self.options, out)

    def answer_and_write_examples(
        self, load_examples: "Callable[[], Iterator[PromptExample]]", options: Any, out: Path
    ) -> dict[str, int]:
        """Generate the target's answers to examples, and write them to the file `out`.

        load_examples: function that returns a new iterator over the same examples at every call
        options: the sampling and decoding options

        Returns {"answers": number of answered examples, "failed": number of failed examples}.
        """
        from infer.serving.clients import OpenAIClient
        from infer.serving.regenerate import (
            build_engine_answerer,
            digest_examples,
            regenerate_answers,
        )

        count, examples_digest = digest_examples(load_examples())
        settings = self.build_settings_record(options, examples_digest)
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
                server,
                options,
                self.config.max_concurrent_requests,
                self.get_generation_prompt_suffix,
            )
            answer_examples = client.answer_examples
        return regenerate_answers(
            load_examples(), answer_examples, out, settings, MAX_FAILED_EXAMPLES, count
        )

    def build_settings_record(self, options: Any, examples_digest: str) -> dict:
        """Return the options and digests that determine the answers.

        They are stored in a file beside the answers. A later run continues these answers only if
        its own settings are equal.
        """
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
            # The settings contain neither data.max_examples nor the number of examples. A later run
            # with a larger data.max_examples can therefore continue the file: its first questions
            # are the same.
            settings["content"]["data"] = asdict(config.questions)
            settings["data"] = {"source": "self"}
            settings["rows"] = None
        return settings

    def get_generation_prompt_suffix(self, example: "PromptExample") -> str:
        """Return the generation prompt: the text that the chat template adds before an answer.

        For an example that is a plain text, "" is returned.
        """
        from data.template import detect_template_markers

        return (
            detect_template_markers(self.tokenizer, example.template_options).generation_prompt
            if example.is_chat
            else ""
        )


def print_usable_question_count(data: DataConfig) -> None:
    """Print to stderr how many questions a data set has, and how many examples are unusable.

    Raises ValueError if the data set has no questions, or too many invalid examples.
    """
    from data.counts import ExampleCounts
    from data.rows import read_questions

    counts = ExampleCounts()
    for _ in read_questions(data, counts):
        pass
    print(*counts.format_lines(), sep="\n", file=sys.stderr)


def make_question_prompt_examples(
    config: RegenerateCommand, question_prompts: list
) -> "Iterator[PromptExample]":
    """Yield the prompts of this shard from which the target generates questions.

    question_prompts: prompts that end where a user's question begins, used in rotation
    """
    from infer.serving.regeneration_task import PromptExample

    shard_number, shard_count = config.shard_position
    # This is not None, because data=self requires the option.
    question_count = cast(int, config.data.max_examples)
    for index in range(shard_number - 1, question_count, shard_count):
        yield PromptExample(index, question_prompts[index % len(question_prompts)].text)


def load_question_examples(
    config: RegenerateCommand, question_prompts: list, tokenizer: Any, question_file: Path
) -> "list[PromptExample]":
    """Return the generated questions as chats that the target has to answer.

    Unusable questions, such as duplicates, are left out.

    question_prompts: prompts from which the questions were generated, used in rotation; each has
        the messages before the question
    question_file: JSON lines file with the generated questions

    Raises ValueError if no question is usable.
    """
    from data.questions import filter_questions
    from infer.serving.regeneration_task import PromptExample

    with question_file.open(encoding="utf-8") as lines:
        selected, dropped = filter_questions(
            map(json.loads, lines), tokenizer, config.questions.length_range[0]
        )
    dropped_counts = "".join(f", {count} {reason}" for reason, count in dropped.most_common())
    print(
        f"data=self: {len(selected)} questions to answer{dropped_counts}; {question_file} "
        "contains all generated questions",
        file=sys.stderr,
    )
    if not selected:
        raise ValueError(
            f"data=self: none of the generated questions is usable; see {question_file}, and "
            "change questions.temperature, questions.top_p or questions.length_range"
        )
    template_options = config.target.chat_template_kwargs
    examples = []
    for index, text in selected.items():
        question = {"role": "user", "content": text}
        messages = [*question_prompts[index % len(question_prompts)].messages, question]
        examples.append(PromptExample(index, messages, template_options=template_options))
    return examples


def load_data_examples(config: RegenerateCommand, tokenizer: Any) -> "Iterator[PromptExample]":
    """Yield the examples of the data set that this shard has to answer.

    The chat template variables of an example are kept. If target.chat_template_kwargs sets the same
    variable, its value is used instead.
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
    """Return how many KV cache positions the longest example needs, with all its answers.

    The returned number is at most the maximum sequence length of the target.

    max_new_tokens: maximum number of tokens of one answer
    """
    from infer.api import encode_prompt, max_positions

    capacity = 0
    for example in examples:
        answer_count = 1 + sum(message["role"] == "assistant" for message in example.messages)
        # A prompt that raises ValueError is skipped here. It is reported later as a failed example.
        with suppress(ValueError):
            prompt_ids = encode_prompt(
                target, example.prompt, example.template_options, example.tools
            )
            capacity = max(capacity, len(prompt_ids) + answer_count * max_new_tokens)
    return min(capacity, max_positions(target)) or max_new_tokens + 1
