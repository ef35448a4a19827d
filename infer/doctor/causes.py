"""The known causes of low acceptance, a row of one table each: how a cause shows directly, how it
is tried, and what mends it.

What is tried is one thing changed in how the drafter is read, and a replay (`infer.doctor.replay`).
A trial explains a difference by as much as it brings our decoding from what we measured to what was
measured elsewhere: that of a card, behind which a folder falls short, or that of an engine.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest

import torch

from infer.api import encode, positions_of
from infer.doctor.replay import Material, Tap, chains, compute, next_norm
from infer.drafters.base import Drafter, narrow
from infer.evaluation.results import Acceptance, KnownText, Reference
from infer.targets.loading import int8_package
from infer.targets.support import rope
from infer.targets.target import Target

LOW = 0.95  # of the drafts accepted a round: what rounding does not explain
STANDARD_ERRORS = 2  # of a difference: what chance does not explain
SAME_TARGET = (
    0.98  # share of a text's tokens that the target itself would choose: rounding leaves more
)
MORE = 1.25  # times the drafts accepted, from which on another reading is better than the folder's, where no card tells
# tokens drafted at a long text's end, and those that a drafter sees there instead of all
LAST = 512
NEAR = 256
# of Qwen2, Qwen3, Llama 3, Qwen3 long, ...
THETAS = (10_000.0, 1_000_000.0, 500_000.0, 5_000_000.0, 10_000_000.0)


@dataclass(frozen=True)
class Served:
    """What an engine did with the prompts of a reference."""

    engine: str
    texts: list[str]
    ids: list[list[int]]
    prompt_tokens: list[int]
    by_text: list[Acceptance]  # one for each text, or one for all
    again: list[Acceptance]  # of the same prompts, each asked once more
    drafted: float  # a round
    # the engine's options, where it says that it does not draft a whole block as a chain each round
    # (ours): its acceptance then says nothing about the drafter
    drafting: str = ""


@dataclass(frozen=True)
class Case:
    """A pair of target and drafter, and where it is compared: with its card, or with an engine."""

    target: Target
    drafter: Drafter
    reference: Reference
    material: Material  # of the reference's texts
    ours: list[Acceptance]  # text by text
    goal: list[Acceptance]  # text by text, or one for all
    served: Served | None = None  # of the comparison with an engine

    @property
    def comparable(self) -> bool:
        """Whether acceptance was measured of whole blocks as chains on both sides."""
        return self.served is None or not self.served.drafting

    @property
    def low(self) -> bool:
        """Whether acceptance is lower than it should be: the card's in a folder, ours in an
        engine."""
        if not self.comparable:
            return False
        found, expected = (self.ours, self.goal) if self.served is None else (self.goal, self.ours)
        return falls_short(Acceptance.of_all(found), Acceptance.of_all(expected))

    @property
    def apart(self) -> float:
        """How many of the rounds and accepted drafts differ, in shares of ours: 0 where the drafter
        is read alike."""
        if not self.comparable:
            return 0.0
        return difference(self.ours, self.goal) / max(
            1, sum(a.rounds + sum(a.accepted) for a in self.ours)
        )

    @property
    def agreement(self) -> float:
        """The share of the tokens of the target that is compared with ours that ours would
        choose."""
        if self.served is None:
            return self.material.agreement
        return compute(
            self.target, [text.prompt for text in self.reference.texts], self.served.ids
        ).agreement


def falls_short(found: Acceptance, expected: Acceptance) -> bool:
    """Return whether fewer drafts are accepted than rounding and chance explain."""
    chance = STANDARD_ERRORS * math.hypot(found.standard_error, expected.standard_error)
    return found.mean < min(LOW * expected.mean, expected.mean - chance)


def difference(a: Sequence[Acceptance], b: Sequence[Acceptance]) -> float:
    """Return how many rounds and accepted drafts two measurements differ by: text by text where
    both know them so, else position by position of all texts together."""
    if len(a) != len(b):
        a = [Acceptance.of_all(a)]
        b = [Acceptance.of_all(b)]
    total = 0
    for one, other in zip(a, b, strict=True):
        pairs = zip_longest(one.accepted, other.accepted, fillvalue=0)
        total += abs(one.rounds - other.rounds) + sum(abs(x - y) for x, y in pairs)
    return total


# What is tried


@dataclass(frozen=True)
class Variation:
    """The drafter read with one thing changed."""

    label: str  # what is changed, to what
    drafter: Drafter
    taps: list[Tap]


def taps_of(drafter: Drafter) -> list[Tap]:
    """Return where a drafter's features are read."""
    return [Tap(layer) for layer in drafter.layer_ids]


def altered(drafter: Drafter, own: dict | None = None, **keys: object) -> Drafter:
    """Return the drafter with some keys of its config.json changed, `own`: of its family's part;
    the same weights."""
    config = deepcopy(drafter.config)
    config.update({drafter.family.config_key: drafter.own | (own or {})} | keys)
    other = type(drafter)(config)
    if drafter.quantised:
        other.init_weights(torch.Generator())  # replaced below; codes are made of finite numbers
        int8_package().quantise_drafter(other)
    other.load_state_dict(drafter.state_dict())
    return (
        other.to(drafter.norm.weight.device, drafter.norm.weight.dtype).eval().requires_grad_(False)
    )


def other_layers(target: Target, drafter: Drafter) -> Iterator[Variation]:
    """Tap the layers one further down, and one further up."""
    count = len(target.body.layers)
    for step in (-1, 1):
        taps = [Tap(layer + step) for layer in drafter.layer_ids]
        if all(0 <= tap.layer < count for tap in taps):
            yield Variation(f"layers {', '.join(str(tap.layer) for tap in taps)}", drafter, taps)


def other_norms(target: Target, drafter: Drafter) -> Iterator[Variation]:
    """Tap behind the norm that the states go into; the last layer before the last norm, if it is
    behind it."""
    count = len(target.body.layers)
    if count in drafter.layer_ids:
        taps = [Tap(count - 1) if layer == count else Tap(layer) for layer in drafter.layer_ids]
        yield Variation("the last layer before the last norm", drafter, taps)
    elif all(next_norm(target, layer) is not None for layer in drafter.layer_ids):
        yield Variation(
            "behind the next norm",
            drafter,
            [Tap(layer, normed=True) for layer in drafter.layer_ids],
        )


def other_flags(key: str) -> Callable[[Target, Drafter], Iterator[Variation]]:
    """Return what tries the other value of a flag of the drafter's family."""

    def trials(target: Target, drafter: Drafter) -> Iterator[Variation]:
        if key in drafter.family.options:
            causal = any(causal for causal, _ in drafter.attention_patterns)
            other = not (causal if key == "causal" else drafter.own.get(key))
            yield Variation(
                f"{key} {str(other).lower()}", altered(drafter, {key: other}), taps_of(drafter)
            )

    return trials


def other_thetas(target: Target, drafter: Drafter) -> Iterator[Variation]:
    own = drafter.config.rope_parameters
    for theta in dict.fromkeys([float(rope(target.config).get("rope_theta", 1e4)), *THETAS]):
        if theta != own["rope_theta"]:
            other = altered(drafter, rope_parameters=own | {"rope_theta": theta})
            yield Variation(f"rope_theta {theta:g}", other, taps_of(drafter))


def one_key_norm(target: Target, drafter: Drafter) -> Iterator[Variation]:
    """Let all layers take the first one's norm for the keys of the context, as vLLM's CPU kernel
    does (0.32: its `rms_norm` of all layers' keys at once reads the first row of their weights)."""
    if drafter.config.num_hidden_layers > 1 and "block_size" in drafter.own:
        other = altered(drafter)
        for layer in other.layers[1:]:
            own = layer.self_attn
            theirs = deepcopy(layer.self_attn)
            theirs.k_norm = other.layers[0].self_attn.k_norm
            # the context's projections have a word, `of`
            own.keys_values = lambda *states, own=own, theirs=theirs, **of: type(own).keys_values(
                theirs if of else own, *states, **of
            )
        yield Variation("the first layer's norm for all context keys", other, taps_of(drafter))


# What is seen


def read_otherwise(case: Case, chat: bool) -> int:
    """Count the prompts, of chats or of plain texts, whose tokens are not those of the reference:
    by this tokenizer, or by the engine, which tells their number."""
    wrong = 0
    for number, text in enumerate(case.reference.texts):
        if text.chat == chat and case.served is not None:
            wrong += case.served.prompt_tokens[number] != len(text.prompt)
        elif text.chat == chat:
            wrong += in_tokens(case.target, text) != text.prompt
    return wrong


def in_tokens(target: Target, text: KnownText) -> list[int]:
    """Return a reference's prompt as the target's tokenizer reads it now; no tokens where it has no
    template."""
    with suppress(ValueError):
        return encode(target, [{"role": "user", "content": text.said}] if text.chat else text.said)
    return []


def show_tokenizer(case: Case) -> str | None:
    wrong = read_otherwise(case, chat=False)
    if wrong:
        return f"{wrong} of its plain prompts are other tokens"
    if case.served is not None:
        said = [
            case.target.tokenizer.decode(ids, skip_special_tokens=True).strip()
            for ids in case.served.ids
        ]
        strange = sum(
            ours != text.strip() for ours, text in zip(said, case.served.texts, strict=True)
        )
        if strange > max(1, len(said) // 4):
            return f"the token ids of {strange} of its answers are other words here"
    return None


def show_template(case: Case) -> str | None:
    wrong = read_otherwise(case, chat=True)
    return f"{wrong} of its chats are other tokens" if wrong else None


def show_drafted(case: Case) -> str | None:
    """Say where fewer or more are drafted than a block has, with the anchor's slot or without, and
    it costs."""
    own = case.drafter.block_size - 1
    if case.served is None or not case.low or own - 0.5 <= case.served.drafted <= own + 1.5:
        return None
    return f"it drafts {case.served.drafted:.1f} tokens a round, of {own}"


def show_other_target(case: Case) -> str | None:
    share = case.agreement
    return (
        None if share >= SAME_TARGET else f"{100 * share:.1f} % of its tokens are this target's own"
    )


def show_hidden(case: Case) -> str | None:
    """Say where fewer drafts are accepted behind a prompt that the engine has in its prefix cache:
    what it restores never went through the target again, whose features are the drafter's
    context."""
    if case.served is None or not case.comparable:
        return None
    first = Acceptance.of_all(case.served.by_text)
    again = Acceptance.of_all(case.served.again)
    if not falls_short(again, first):
        return None
    return f"{1 + again.mean:.2f} tokens a round where a prompt is asked a second time, {1 + first.mean:.2f} the first"


def show_short(case: Case) -> str | None:
    """Say where fewer drafts are accepted behind all the texts, one after the other, than if the
    drafter saw their end alone: more context than it was trained with distracts it."""
    target = case.target
    drafter = case.drafter
    ids = [id for text in case.reference.texts for id in (*text.prompt, *text.ids)][
        : positions_of(target)
    ]
    if "sliding_window" not in drafter.family.options or len(ids) < 4 * LAST:
        return None
    before = len(ids) - LAST
    material = compute(target, [ids[:before]], [ids[before:]], taps_of(drafter))
    other = altered(drafter)
    narrow(other, NEAR)
    all_seen, near = (
        chains(target, one, material, taps_of(one), one.block_size - 1)[0]
        for one in (drafter, other)
    )
    if near.mean < MORE * all_seen.mean or not falls_short(all_seen, near):
        return None
    lengths = f"{1 + all_seen.mean:.2f} tokens a round behind {before} others, {1 + near.mean:.2f}"
    return f"{lengths} where it sees the last {NEAR}"


ADAPT = (
    "./launch.sh drafter.init={checkpoint} target.path={target} data=jsonl data.path=<texts that this target wrote> "
    "name=adapted (docs/training.md, another fine-tune)"
)
EDIT = (
    "write it into config.json of the drafter's folder ({}), or export it again from its checkpoint"
)
READING = "the engine reads the folder otherwise ({}): export it in the format that the engine knows, or update it"


@dataclass(frozen=True)
class Cause:
    """A row of the table. `shows`: a sentence where the cause is seen directly, None where it is
    not. `trials`: what to replay, for causes that cannot be seen. `mend`: what to do, for a folder
    and for an engine; {} stands for the trial's label."""

    name: str
    shows: Callable[[Case], str | None] = lambda case: None
    trials: Callable[[Target, Drafter], Iterator[Variation]] = lambda target, drafter: iter(())
    mend: tuple[str, str] = (EDIT, READING)


CAUSES = (
    Cause(
        "another tokenizer or vocabulary",
        show_tokenizer,
        mend=(
            "give target.path the model that the drafter was trained for, with that model's own tokenizer",
            "start the engine with the target's own tokenizer files (vLLM: --tokenizer; GGUF: convert again)",
        ),
    ),
    Cause(
        "another chat template or thinking mode",
        show_template,
        mend=(
            "give target.path the model with the template that the drafter was trained under, and "
            "target.chat_template_kwargs={{...}} as in the drafter's config.json",
            "start the engine with the target's own template (--chat-template <its chat_template.jinja>), and with "
            "chat_template_kwargs as the drafter's config.json has them (vLLM: --default-chat-template-kwargs)",
        ),
    ),
    Cause(
        "another number of drafts a round",
        show_drafted,
        mend=(
            "",
            "let it draft block_size - 1 tokens (vLLM: num_speculative_tokens; llama.cpp: --spec-draft-n-max)",
        ),
    ),
    Cause(
        "the prefix cache hides the drafter's context",
        show_hidden,
        mend=(
            "",
            "start the engine without one (vLLM: --no-enable-prefix-caching; its issue 47930), or update it",
        ),
    ),
    Cause(
        "another target's weights, or the same in few bits",
        show_other_target,
        mend=(
            "evaluate with the target that the drafter was trained for, or adapt the drafter: "
            + ADAPT,
            "serve the target in the card's dtype, or adapt the drafter: " + ADAPT,
        ),
    ),
    Cause("tapped layers off by one", trials=other_layers),
    Cause("features taken behind a norm", trials=other_norms),
    Cause("causality inside the block", trials=other_flags("causal")),
    Cause("the anchor's slot", trials=other_flags("sample_from_anchor")),
    Cause("rotary base", trials=other_thetas),
    Cause(
        "norms of the context's keys",
        trials=one_key_norm,
        mend=(
            EDIT,
            "vLLM's kernel for CPUs reads one norm for all layers ({}): serve it on a GPU, or with an engine whose "
            "kernels know a norm a layer",
        ),
    ),
)
SHORT = Cause(  # no reason why two measurements differ: tried where there is none
    "trained on shorter texts",
    show_short,
    mend=(
        f"drafter.sliding_window={NEAR} where long texts are decoded (SGLang: --speculative-dflash-draft-window-size)",
    )
    * 2,
)
