"""The functions for users: text or token ids in; text, ids and statistics out, at once or piece by
piece."""

import inspect
import re
import time
from collections import abc
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Protocol

from jinja2 import TemplateError

from infer.config import DecodeOptions, EngineConfig, TextOptions
from infer.drafters.base import Drafter
from infer.engine.engine import Engine
from infer.engine.sampling import derived_seed
from infer.engine.sequence import DecodeStats, Processor, Sequence, TokenLogprob
from infer.engine.words import firm_length, words_of
from infer.targets.target import Target
from infer.utils.chat_template import readable_messages


class OtherTarget(Protocol):
    """A model that is no causal language model (`infer.targets.kinds`), whose optional package
    decodes it."""

    name: str
    tokenizer: object | None
    options_class: str  # "module:class" of what `generate` takes for it
    engine_class: str  # "module:class": (model, options, capacity, clock) -> an `Engine`


AnyTarget = Target | OtherTarget
Options = TextOptions  # DecodeOptions; of another target than a causal one, its `options_class`
Prompt = (
    str | abc.Sequence[int] | abc.Sequence[dict[str, str]]
)  # a text, token ids, or the messages of a chat


@dataclass(frozen=True)
class Generation:
    """One answer. `text` ends before a stop string and has no special tokens; `ids` hold an end
    token if one came."""

    text: str | None  # None when the target has no tokenizer
    ids: list[int]
    prompt_ids: list[int]
    finish_reason: str  # "stop", "length", or "loop" (TextOptions.loop_period)
    # how many of `ids` each round committed, the prefill's one first (a masked model has none)
    commits: list[int]
    logprobs: list[TokenLogprob]  # one a token, if asked for
    stats: DecodeStats


def generate(
    target: AnyTarget,
    drafter: Drafter | None,
    prompts: Prompt | abc.Sequence[Prompt],
    options: Options | None = None,
    processors: abc.Sequence[Processor] = (),
    clock: abc.Callable[[], float] = time.perf_counter,
    **overrides: object,
) -> Generation | list[Generation]:
    """Continue one prompt or many: a string, token ids, or chat messages ({"role": ..., "content":
    ...}), which go through the tokenizer's chat template. Options are those of `DecodeOptions`, as
    one object or by name: `generate(target, drafter, "import os", max_new_tokens=64,
    temperature=0.7, seed=1)`.

    A masked diffusion model (`load_masked`) has the options of `MaskedOptions`, and None as its
    drafter.

    The output is the target's own: greedy, the same tokens as plain decoding; sampled, the same
    text for the same seed, whatever the method, budget and drafter. Of many prompts, number i is
    sampled with `derived_seed(seed, i)`, and the first with the seed itself: each gets the text
    that it gets alone with that seed. `processors` are Hugging Face logits processors; each sees
    the true prefix of every token it judges. Raises ValueError for options or prompts that make no
    sense.
    """
    options = settings(target, options, overrides)
    one = isinstance(prompts, str) or isinstance(next(iter(prompts), None), (int, dict))
    ids = [encode(target, prompt) for prompt in ([prompts] if one else prompts)]
    check_length(target, options, ids)
    answers = []
    for text in decode(target, drafter, ids, options, clock, processors=processors):
        words = None if target.tokenizer is None else answer_text(target, text.ids, text.options)
        said = Generation(
            words, text.ids, text.prompt, text.finish, text.commits, text.logprobs, text.stats
        )
        answers.append(said)
    return answers[0] if one else answers


def stream(
    target: AnyTarget,
    drafter: Drafter | None,
    prompt: Prompt,
    options: Options | None = None,
    processors: abc.Sequence[Processor] = (),
    **overrides: object,
) -> abc.Iterator[str]:
    """Continue one prompt and yield its text as rounds commit it: the pieces joined are
    `generate(...).text`."""
    options = settings(target, options, overrides)
    ids = encode(target, prompt)
    check_length(target, options, [ids])
    engine = open_engine(
        target, drafter, replace(options, max_num_seqs=1), len(ids) + options.max_new_tokens
    )
    return _pieces(engine, TextStream(target, engine.submit(ids, options, processors)))


def _pieces(engine: Engine, pieces: "TextStream") -> abc.Iterator[str]:
    while engine.busy:
        engine.step()
        if piece := pieces.next():
            yield piece


def open_engine(
    target: AnyTarget,
    drafter: Drafter | None,
    options: EngineConfig | object,
    capacity: int,
    clock: abc.Callable[[], float] = time.perf_counter,
) -> Engine:
    """Return the engine that decodes this kind of model. `options`: an EngineConfig, or what the
    model's `engine_class` takes. Raises ValueError where options or drafter do not fit it."""
    if not has_own_engine(target):
        return Engine(target, drafter, options, capacity, clock)
    if drafter is not None:
        raise ValueError(
            f"{target.name} is no causal language model and drafts for itself: give None as its drafter"
        )
    return resolve_name(target.engine_class)(target, options, capacity, clock)


def decode(
    target: AnyTarget,
    drafter: Drafter | None,
    prompts: list[list[int]],
    options: Options,
    clock: abc.Callable[[], float] = time.perf_counter,
    seeds: list[int] | None = None,
    processors: abc.Sequence[Processor] = (),
) -> list[Sequence]:
    """Decode prompts (token ids, none empty), `options.max_num_seqs` at a time, and return their texts in
    the same order. `seeds` gives every text its sampling seed; without them they are derived from
    options.seed, one for each text."""
    options.check()
    if not prompts:
        return []
    seeds = [derived_seed(options.seed, i) for i in range(len(prompts))] if seeds is None else seeds
    longest = max(map(len, prompts)) + options.max_new_tokens
    engine = open_engine(
        target,
        drafter,
        replace(options, max_num_seqs=min(options.max_num_seqs, len(prompts))),
        longest,
        clock,
    )
    texts = [
        engine.submit(prompt, replace(options, seed=seed), processors)
        for prompt, seed in zip(prompts, seeds, strict=True)
    ]
    while engine.busy:
        engine.step()
    return texts


class TextStream:
    """The text of a `Sequence` that grows: `next()` gives what is new and certain. Held back are
    characters whose bytes are not all there yet or may still change, and ends that may turn out to
    begin a stop string. special: special tokens are part of the text, but an end token at its end
    is not."""

    def __init__(self, target: AnyTarget, text: Sequence, special: bool = False) -> None:
        if target.tokenizer is None:
            raise ValueError("this target has no tokenizer: there is no text to stream")
        self.target = target
        self.text = text
        self.special = special
        self.given = 0  # characters
        self.held = ""
        self.start = self.read = (
            0  # tokens: `held` has those before `read`, decoding begins at `start`
        )

    def next(self) -> str:
        """Return the text since the last call. The pieces of a finished text make up its
        `answer_text`."""
        if self.text.finish is not None:
            piece = answer_text(self.target, self.text.ids, self.text.options, self.special)[
                self.given :
            ]
        else:
            # A few tokens before the new ones are decoded with them: some tokenizers drop a leading
            # space.
            tokenizer = self.target.tokenizer
            ids = self.text.ids
            firm = firm_length(tokenizer, ids, self.read)
            window = words_of(tokenizer, ids[self.start : firm], self.special)
            if firm > self.read and not window.endswith("\ufffd"):
                self.held += window[
                    len(words_of(tokenizer, ids[self.start : self.read], self.special)) :
                ]
                self.start = self.read
                self.read = firm
            certain = len(self.held) - self._undecided()
            piece = self.held[:certain]
            self.held = self.held[certain:]
        self.given += len(piece)
        return piece

    def _undecided(self) -> int:
        """Return how many characters at the end may begin a stop string."""
        stops = self.text.options.stop
        longest = max(map(len, stops), default=0)
        sizes = range(min(longest - 1, len(self.held)), 0, -1)
        return next(
            (size for size in sizes if any(stop.startswith(self.held[-size:]) for stop in stops)), 0
        )


def has_own_engine(target: AnyTarget) -> bool:
    """Return whether a model is no causal language model and brings engine and options of its
    own."""
    return not isinstance(target, Target)


def settings(target: AnyTarget, options: Options | None, overrides: dict[str, object]) -> Options:
    """Return checked options for this kind of model. Raises TypeError for unknown names."""
    options_class = resolve_name(target.options_class) if has_own_engine(target) else DecodeOptions
    options = replace(options or options_class(), **overrides)
    options.check()
    return options


def positions_of(target: AnyTarget) -> int:
    """Return how many positions prompt and answer may take together."""
    return getattr(target.config, "max_position_embeddings", None) or 2**31


def check_length(target: AnyTarget, options: Options, prompts: list[list[int]]) -> None:
    """Raise ValueError when the target has fewer positions than a prompt and its answer may
    take."""
    answer = options.room(options.max_new_tokens)
    positions = max(map(len, prompts), default=0) + answer
    limit = positions_of(target)
    if positions > limit:
        raise ValueError(
            f"prompt and answer may take {positions} positions, the target has {limit}: shorten either"
        )


def encode(
    target: AnyTarget,
    prompt: Prompt,
    template_options: abc.Mapping[str, object] | None = None,
    tools: abc.Sequence[dict] = (),
) -> list[int]:
    """Return a prompt's token ids; messages go through the chat template, which is told
    `template_options`, such as {"enable_thinking": False}, and shown `tools`. Raises ValueError
    where there is no template, or none that knows the options."""
    tokenizer = target.tokenizer
    chat = len(prompt) > 0 and isinstance(prompt[0], dict)
    if not isinstance(prompt, str) and not chat:
        return [int(id) for id in prompt]
    if tokenizer is None:
        raise ValueError("this target has no tokenizer: give token ids")
    if chat and getattr(tokenizer, "chat_template", None) is None:
        raise ValueError(f"{target.name} has no chat template: give the whole prompt as one text")
    try:
        if chat:
            options = dict(template_options or {})
            _check_template_options(tokenizer, options)
            if tools and not re.search(r"\btools\b", str(tokenizer.get_chat_template())):
                raise ValueError("this model's chat template does not show tools")
            options |= {"tools": list(tools)} if tools else {}
            options |= {"add_generation_prompt": True}
            messages = readable_messages(tokenizer, list(prompt), **options)
            found = tokenizer.apply_chat_template(messages, return_dict=True, **options)
        else:
            found = tokenizer(prompt)
        return found["input_ids"]
    except (
        TypeError,
        TemplateError,
    ) as error:  # half of a surrogate pair; roles that the template refuses
        raise ValueError(f"the prompt cannot be read: {error}") from error


def _check_template_options(tokenizer: object, options: abc.Mapping[str, object]) -> None:
    """Raise ValueError for names that the chat template does not read, or that are
    `apply_chat_template`'s own."""
    own = inspect.signature(tokenizer.apply_chat_template).parameters
    words = set(re.findall(r"\w+", tokenizer.get_chat_template())) if options else set()
    for name in options:
        if name in own or name == "messages" or name not in words:
            raise ValueError(
                f"chat_template_kwargs.{name}: this model's chat template has no such option"
            )


def answer_text(
    target: AnyTarget, ids: list[int], options: TextOptions, special: bool = False
) -> str:
    """Return the answer, cut before the first stop string, without an end token at its end; and
    without special tokens, unless `special`."""
    if ids and ids[-1] in target.end_ids:
        ids = ids[:-1]
    text = words_of(target.tokenizer, ids, special)
    ends = [at for stop in options.stop if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text
