"""The Python functions that generate text from prompts.

`generate` returns complete outputs with token ids and statistics. `stream` yields the text of one
output piece by piece.
"""

import inspect
import re
import time
from collections import abc
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any, ClassVar, Protocol, cast

import torch
from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from infer.config import DecodeOptions, EngineConfig, SamplingOptions
from infer.drafters.base import Drafter
from infer.engine.detokenize import count_stable_tokens, detokenize
from infer.engine.engine import Engine
from infer.engine.sampling import derive_seed
from infer.engine.sequence import DecodeStats, LogitsProcessor, Sequence, TokenLogprob
from infer.targets.target import Target
from infer.utils.chat_template import convert_tool_arguments

# Maximum sequence length of a target whose config.json gives none
MAX_POSITIONS_OF_UNLIMITED_TARGET = 2**31
# Tokenizers return this character for an incomplete UTF-8 sequence
REPLACEMENT_CHARACTER = "\ufffd"


class NonCausalTarget(Protocol):
    """A target that is not a causal language model, such as a masked diffusion model.

    Its option class and its engine class are in an optional package. Both are therefore given as
    strings "module:class".
    """

    options_class: ClassVar[str]  # class of the argument `options` of `generate`
    engine_class: ClassVar[str]  # called with (target, options, capacity, clock)
    name: str
    tokenizer: Any

    @property
    def config(self) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def eos_token_ids(self) -> frozenset[int]: ...


AnyTarget = Target | NonCausalTarget
# A prompt is a text, a list of token ids, or a list of chat messages {"role", "content"}.
Prompt = str | abc.Sequence[int] | abc.Sequence[dict[str, str]]


@dataclass(frozen=True)
class Generation:
    """The output for one prompt.

    text: the output as text, without special tokens and cut before the first stop string. None if
        the target has no tokenizer
    ids: ids of the generated tokens, with the end token if the model generated one
    prompt_ids: token ids of the prompt
    finish_reason: "stop" after an end token or stop string, "length" at the limit of tokens, or
        "loop" for an output that repeats itself (SamplingOptions.loop_period)
    commits: numbers of tokens that the prefill and then each decoding round added to `ids`; empty
        for a masked diffusion model
    logprobs: one entry for every token of `ids`; empty if log-probabilities were not requested
    stats: number of rounds, time and other statistics of this output
    """

    text: str | None
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str
    commits: list[int]
    logprobs: list[TokenLogprob]
    stats: DecodeStats


def generate(
    target: AnyTarget,
    drafter: Drafter | None,
    prompts: Prompt | abc.Sequence[Prompt],
    options: DecodeOptions | None = None,
    processors: abc.Sequence[LogitsProcessor] = (),
    clock: abc.Callable[[], float] = time.perf_counter,
    **overrides: object,
) -> Generation | list[Generation]:
    """Generate the output of one prompt or of a list of prompts.

    drafter: the drafter. None for baseline decoding and for a masked diffusion model
    prompts: one prompt or a list of prompts. A prompt is a text, a list of token ids, or a list of
        chat messages ({"role": ..., "content": ...}), to which the tokenizer's chat template is
        applied
    options: a DecodeOptions object, or `MaskedOptions` for a masked diffusion model
        (`load_masked`). None means the default options
    processors: Hugging Face logits processors. For every output token, each processor is called
        with the token ids before this token
    clock: function that returns the time in seconds, for the statistics
    overrides: single options by name, such as `generate(target, drafter, "import os",
        max_new_tokens=64, temperature=0.7, seed=1)`

    A drafter never changes the output. Greedy decoding gives the same tokens as baseline decoding.
    Sampling gives the same output for the same seed, whatever the method, node budget and drafter.
    Prompt number i of a list is sampled with the seed `derive_seed(options.seed, i)`, which is
    `options.seed` for i = 0. The other prompts of the list do not affect its output.

    Returns one `Generation`, or a list of them for a list of prompts. Raises ValueError for
    invalid options or prompts.
    """
    options = resolve_options(target, options, overrides)
    is_single_prompt = isinstance(prompts, str) or isinstance(
        next(iter(prompts), None), (int, dict)
    )
    prompt_list = cast(abc.Sequence[Prompt], [prompts] if is_single_prompt else prompts)
    prompt_ids = [encode_prompt(target, prompt) for prompt in prompt_list]
    check_prompt_lengths(target, options, prompt_ids)

    generations = []
    sequences = decode_prompts(target, drafter, prompt_ids, options, clock, processors=processors)
    for sequence in sequences:
        text = None
        if target.tokenizer is not None:
            text = decode_output(target, sequence.ids, sequence.options)
        assert sequence.finish_reason is not None
        generation = Generation(
            text,
            sequence.ids,
            sequence.prompt,
            sequence.finish_reason,
            sequence.commits,
            sequence.logprobs,
            sequence.stats,
        )
        generations.append(generation)
    return generations[0] if is_single_prompt else generations


def stream(
    target: AnyTarget,
    drafter: Drafter | None,
    prompt: Prompt,
    options: DecodeOptions | None = None,
    processors: abc.Sequence[LogitsProcessor] = (),
    **overrides: object,
) -> abc.Iterator[str]:
    """Generate the output of one prompt, and yield new text after every decoding round.

    The joined pieces equal `generate(...).text`. See `generate` for the arguments. Invalid
    arguments raise ValueError in this call already, not when the first piece is requested.
    """
    options = resolve_options(target, options, overrides)
    prompt_ids = encode_prompt(target, prompt)
    check_prompt_lengths(target, options, [prompt_ids])
    capacity = len(prompt_ids) + options.max_new_tokens
    engine = open_engine(target, drafter, replace(options, max_num_seqs=1), capacity)
    sequence = engine.submit(prompt_ids, options, processors)
    return _stream_text(engine, IncrementalDetokenizer(target, sequence))


def _stream_text(engine: Engine, detokenizer: "IncrementalDetokenizer") -> abc.Iterator[str]:
    while engine.has_unfinished_sequences:
        engine.step()
        text = detokenizer.next_text()
        if text:
            yield text


def open_engine(
    target: AnyTarget,
    drafter: Drafter | None,
    options: EngineConfig,
    capacity: int,
    clock: abc.Callable[[], float] = time.perf_counter,
) -> Engine:
    """Return an engine that decodes sequences with a target and its drafter.

    options: an EngineConfig. For a `NonCausalTarget` it is an object of its `options_class`
    capacity: number of KV cache positions for each sequence of a batch; a prompt and its output
        together must fit into them
    clock: function that returns the time in seconds, for the statistics

    Raises ValueError if the options or the drafter do not fit the target.
    """
    if isinstance(target, Target):
        return Engine(target, drafter, options, capacity, clock)
    if drafter is not None:
        raise ValueError(
            f"{target.name} is a masked diffusion model, which cannot be used with a drafter: "
            "give None as the drafter"
        )
    return resolve_name(target.engine_class)(target, options, capacity, clock)


def decode_prompts(
    target: AnyTarget,
    drafter: Drafter | None,
    prompts: list[list[int]],
    options: DecodeOptions,
    clock: abc.Callable[[], float] = time.perf_counter,
    seeds: list[int] | None = None,
    processors: abc.Sequence[LogitsProcessor] = (),
) -> list[Sequence]:
    """Decode prompts in batches of at most `options.max_num_seqs` sequences.

    prompts: token ids of each prompt; a prompt has at least one token
    clock: function that returns the time in seconds, for the statistics
    seeds: the sampling seed of each prompt; None derives the seeds from `options.seed`
    processors: Hugging Face logits processors

    Returns the finished sequences in the order of the prompts.
    """
    options.check()
    if not prompts:
        return []
    if seeds is None:
        seeds = [derive_seed(options.seed, i) for i in range(len(prompts))]

    capacity = max(map(len, prompts)) + options.max_new_tokens
    engine_options = replace(options, max_num_seqs=min(options.max_num_seqs, len(prompts)))
    engine = open_engine(target, drafter, engine_options, capacity, clock)
    sequences = []
    for prompt, seed in zip(prompts, seeds, strict=True):
        sequences.append(engine.submit(prompt, replace(options, seed=seed), processors))
    while engine.has_unfinished_sequences:
        engine.step()
    return sequences


class IncrementalDetokenizer:
    """Converts the tokens of a growing `Sequence` to text, piece by piece, for streaming.

    Characters that later tokens may still change are not returned yet. The end of the text is not
    returned while it may be the beginning of a stop string.

    keep_special_tokens: whether the text contains special tokens. An end token at the end of the
        sequence is never part of the text
    """

    def __init__(
        self, target: AnyTarget, sequence: Sequence, keep_special_tokens: bool = False
    ) -> None:
        if target.tokenizer is None:
            raise ValueError(
                "this target has no tokenizer, so text cannot be streamed: use generate, which "
                "returns token ids"
            )
        self.target = target
        self.sequence = sequence
        self.keep_special_tokens = keep_special_tokens
        self.returned_characters = 0
        self.withheld_text = ""
        self.decoded_tokens = 0  # number of tokens whose text was returned or is in `withheld_text`
        # Index of the first token that is decoded together with new tokens. It is a few tokens
        # before them, because some tokenizers drop a space at the start of a text.
        self.context_start = 0

    def next_text(self) -> str:
        """Return the new text since the last call.

        The joined pieces of a finished sequence equal the result of `decode_output`.
        """
        if self.sequence.finish_reason is None:
            self._decode_new_tokens()
            certain = len(self.withheld_text) - self._possible_stop_characters()
            text = self.withheld_text[:certain]
            self.withheld_text = self.withheld_text[certain:]
        else:
            full_text = decode_output(
                self.target, self.sequence.ids, self.sequence.options, self.keep_special_tokens
            )
            text = full_text[self.returned_characters :]
        self.returned_characters += len(text)
        return text

    def _decode_new_tokens(self) -> None:
        """Append the text of new tokens to `withheld_text`.

        If later tokens may still change the text of a token, this token is left for the next call.
        """
        tokenizer = require_tokenizer(self.target)
        ids = self.sequence.ids
        end = count_stable_tokens(tokenizer, ids, self.decoded_tokens)
        text = detokenize(tokenizer, ids[self.context_start : end], self.keep_special_tokens)
        if end <= self.decoded_tokens or text.endswith(REPLACEMENT_CHARACTER):
            return
        context = ids[self.context_start : self.decoded_tokens]
        context_text = detokenize(tokenizer, context, self.keep_special_tokens)
        self.withheld_text += text[len(context_text) :]
        self.context_start = self.decoded_tokens
        self.decoded_tokens = end

    def _possible_stop_characters(self) -> int:
        """Return how many characters at the end of `withheld_text` may begin a stop string."""
        stop_strings = self.sequence.options.stop
        longest = max(map(len, stop_strings), default=0)
        for length in range(min(longest - 1, len(self.withheld_text)), 0, -1):
            ending = self.withheld_text[-length:]
            if any(stop_string.startswith(ending) for stop_string in stop_strings):
                return length
        return 0


def resolve_options(
    target: AnyTarget, options: DecodeOptions | None, overrides: dict[str, object]
) -> DecodeOptions:
    """Return a checked copy of the options, in which `overrides` replaces single values.

    options: None means the default options of the target's option class
    overrides: keys are option names, values are option values

    Raises TypeError for an unknown option name, and ValueError for an invalid value.
    """
    if options is None:
        options_class = DecodeOptions
        if not isinstance(target, Target):
            options_class = resolve_name(target.options_class)
        options = options_class()
    resolved = replace(options, **cast(dict[str, Any], overrides))
    resolved.check()
    return resolved


def max_positions(target: AnyTarget) -> int:
    """Return the maximum length of a sequence (prompt and output) for a target, in positions."""
    return (
        getattr(target.config, "max_position_embeddings", None) or MAX_POSITIONS_OF_UNLIMITED_TARGET
    )


def check_prompt_lengths(
    target: AnyTarget, options: DecodeOptions, prompts: list[list[int]]
) -> None:
    """Raise ValueError if a prompt and an output of max_new_tokens tokens exceed the target's
    maximum sequence length.

    prompts: token ids of each prompt
    """
    output_positions = options.count_output_positions(options.max_new_tokens)
    positions = max(map(len, prompts), default=0) + output_positions
    limit = max_positions(target)
    if positions > limit:
        raise ValueError(
            f"prompt and output together may need {positions} positions, but the target supports "
            f"only {limit}: shorten the prompt or reduce max_new_tokens"
        )


def encode_prompt(
    target: AnyTarget,
    prompt: Prompt,
    template_options: abc.Mapping[str, object] | None = None,
    tools: abc.Sequence[dict] = (),
) -> list[int]:
    """Return the token ids of a prompt.

    prompt: a text, which is tokenized; chat messages, to which the chat template is applied; or
        token ids, which are returned unchanged
    template_options: variables of the chat template, such as {"enable_thinking": False}
    tools: tool definitions for the chat template

    Raises ValueError if the target has no tokenizer for a text, no chat template for chat messages,
    or a chat template that does not read a variable in `template_options`.
    """
    tokenizer: Any = target.tokenizer
    is_chat = not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], dict)
    if not isinstance(prompt, str) and not is_chat:
        return [int(token_id) for token_id in cast(abc.Sequence[int], prompt)]
    if tokenizer is None:
        raise ValueError("this target has no tokenizer: give the prompt as token ids")
    if is_chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"{target.name} has no chat template: give the whole prompt as one text")
    try:
        if not is_chat:
            return tokenizer(prompt)["input_ids"]
        options = dict(template_options or {})
        _check_template_options(tokenizer, options)
        if tools:
            if not re.search(r"\btools\b", str(tokenizer.get_chat_template())):
                raise ValueError(
                    "this model's chat template does not put tools into the prompt: leave out tools"
                )
            options["tools"] = list(tools)
        options["add_generation_prompt"] = True
        messages = cast(list[dict], list(prompt))
        messages = convert_tool_arguments(tokenizer, messages, **options)
        return tokenizer.apply_chat_template(messages, return_dict=True, **options)["input_ids"]
    except (TypeError, TemplateError) as error:
        # For example, the text contains half of a surrogate pair, or the template refuses a role.
        raise ValueError(f"the prompt cannot be tokenized: {error}") from error


def _check_template_options(tokenizer: Any, options: abc.Mapping[str, object]) -> None:
    """Raise ValueError for template variables that the chat template does not read.

    A name of a parameter of `apply_chat_template` is also refused, because the value would be
    passed to this parameter instead of the template.
    """
    if not options:
        return
    parameters = inspect.signature(tokenizer.apply_chat_template).parameters
    template_words = set(re.findall(r"\w+", tokenizer.get_chat_template()))
    for name in options:
        if name in parameters or name == "messages" or name not in template_words:
            raise ValueError(
                f"chat_template_kwargs.{name}: this model's chat template has no such variable"
            )


def require_tokenizer(target: AnyTarget) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a target, which must have one."""
    assert target.tokenizer is not None
    return target.tokenizer


def decode_output(
    target: AnyTarget, ids: list[int], options: SamplingOptions, keep_special_tokens: bool = False
) -> str:
    """Return the text of an output, cut before the first stop string.

    ids: the token ids of the output; an end token at the end is not part of the text
    options: the options with the stop strings
    keep_special_tokens: whether the text contains special tokens. It never contains the last end
        token
    """
    if ids and ids[-1] in target.eos_token_ids:
        ids = ids[:-1]
    text = detokenize(require_tokenizer(target), ids, keep_special_tokens)
    positions = [text.find(stop_string) for stop_string in options.stop]
    positions = [position for position in positions if position >= 0]
    return text[: min(positions)] if positions else text
