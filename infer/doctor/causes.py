"""The known causes of low acceptance, a row of one table each: how a cause shows directly, how it is tried, and what
mends it.

What is tried is one thing changed in how the drafter is read, and a replay (`infer.doctor.replay`). A trial
explains a difference by as much as it brings our decoding from what we measured to what was measured elsewhere: that of
a card, behind which a folder falls short, or that of an engine.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

import torch

from infer.api import encode
from infer.doctor.replay import Material, Tap, compute, next_norm
from infer.drafters.base import Drafter, DraftState, default_mask_token
from infer.evaluation.results import Acceptance, KnownText, Reference
from infer.targets.lean import Norm
from infer.targets.support import rope
from infer.targets.target import Target

SAME_TARGET = 0.98  # share of a text's tokens that the target itself would choose: rounding leaves more
THETAS = (10_000.0, 1_000_000.0, 500_000.0, 5_000_000.0, 10_000_000.0)  # of Qwen2, Qwen3, Llama 3, Qwen3 long, ...
THINKING = r"\b(?:enable_thinking|thinking)\b"


@dataclass(frozen=True)
class Served:
    """What an engine did with the prompts of a reference."""

    engine: str
    texts: list[str]
    ids: list[list[int]] | None  # None: the engine does not say
    prompt_tokens: list[int]
    by_text: list[Acceptance]  # one for each text, or one for all
    drafted: float  # a round

    @property
    def acceptance(self) -> Acceptance:
        """Of all texts together."""
        return Acceptance.of_all(self.by_text)


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
    def low(self) -> bool:
        """Whether acceptance is lower than it should be: the card's in a folder, ours in an engine."""
        return falls_short(self.ours, self.goal) if self.served is None else falls_short(self.goal, self.ours)

    @property
    def apart(self) -> float:
        """How many of the rounds and accepted drafts differ, in shares of ours: 0 where the drafter is read alike."""
        return difference(self.ours, self.goal) / max(1, sum(a.rounds + sum(a.accepted) for a in self.ours))

    @property
    def drafted(self) -> float:
        """Drafts a round."""
        return self.drafter.block_size - 1 if self.served is None else self.served.drafted

    @cached_property
    def theirs(self) -> Material:
        """The texts of the target that is compared with ours, seen by ours."""
        if self.served is None:
            return self.material
        read = self.target.tokenizer
        ids = self.served.ids or [read(text, add_special_tokens=False)["input_ids"] for text in self.served.texts]
        pairs = [(text.prompt, own) for text, own in zip(self.reference.texts, ids, strict=True) if own]
        return compute(self.target, *map(list, zip(*pairs, strict=True)))


LOW = 0.95  # of the drafts accepted a round, where texts cannot be paired: what rounding does not explain
FEWEST = 5  # texts whose pairs can tell
RESAMPLES = 2000


def falls_short(found: Sequence[Acceptance], expected: Sequence[Acceptance]) -> bool:
    """Return whether fewer drafts a round are accepted than should be. Texts that are known one by one are compared in
    pairs: it is surely less, in 99 of 100 drawings of as many texts with replacement."""
    if len(found) != len(expected) or len(found) < FEWEST:
        return Acceptance.of_all(found).mean < LOW * Acceptance.of_all(expected).mean
    sums = [[(a.rounds, sum(a.accepted)) for a in side] for side in (found, expected)]
    table = torch.tensor(sums, dtype=torch.double)  # (2, texts, 2)
    drawn = torch.randint(len(found), (RESAMPLES, len(found)), generator=torch.Generator().manual_seed(0))
    rounds, drafts = table[:, drawn].sum(2).unbind(-1)  # (2, RESAMPLES) each
    means = drafts / rounds.clamp(min=1)
    return bool((means[0] < means[1]).double().mean() > 0.99)


def difference(a: Sequence[Acceptance], b: Sequence[Acceptance]) -> float:
    """Return how many rounds and accepted drafts two measurements differ by: text by text where both know them so, else
    position by position of all texts together."""
    if len(a) != len(b):
        a, b = [Acceptance.of_all(a)], [Acceptance.of_all(b)]
    total = 0
    for one, other in zip(a, b, strict=True):
        pairs = zip_longest(one.accepted, other.accepted, fillvalue=0)
        total += abs(one.rounds - other.rounds) + sum(abs(x - y) for x, y in pairs)
    return total


@dataclass(frozen=True)
class Trial:
    """The drafter read with one thing changed."""

    label: str  # what is changed, to what
    drafter: Drafter
    taps: list[Tap]


def taps_of(drafter: Drafter) -> list[Tap]:
    """Return where a drafter's features are read."""
    return [Tap(layer) for layer in drafter.layer_ids]


def altered(drafter: Drafter, own: dict | None = None, **keys: object) -> Drafter:
    """Return the drafter with some keys of its config.json changed, `own`: of its family's part; the same weights."""
    config = deepcopy(drafter.config)
    config.update({drafter.family.config_key: drafter.own | (own or {})} | keys)
    other = type(drafter)(config)
    other.load_state_dict(drafter.state_dict())
    return other.to(drafter.norm.weight.device, drafter.norm.weight.dtype).eval().requires_grad_(False)


def with_keys(drafter: Drafter, label: str, own: dict | None = None, **keys: object) -> Trial:
    """Return a trial of the drafter with some keys of its config.json changed."""
    return Trial(label, altered(drafter, own, **keys), taps_of(drafter))


# What is tried


def other_layers(target: Target, drafter: Drafter) -> Iterator[Trial]:
    """Tap the layers one further down, and one further up."""
    count = len(target.body.layers)
    for step in (-1, 1):
        taps = [Tap(layer + step) for layer in drafter.layer_ids]
        if all(0 <= tap.layer < count for tap in taps):
            yield Trial(f"layers {', '.join(str(tap.layer) for tap in taps)}", drafter, taps)


def other_norms(target: Target, drafter: Drafter) -> Iterator[Trial]:
    """Tap behind the norm that the states go into; the last layer before the last norm, if it is behind it."""
    count = len(target.body.layers)
    if count in drafter.layer_ids:
        taps = [Tap(count - 1) if layer == count else Tap(layer) for layer in drafter.layer_ids]
        yield Trial("the last layer before the last norm", drafter, taps)
    elif all(next_norm(target, layer) is not None for layer in drafter.layer_ids):
        yield Trial("behind the next norm", drafter, [Tap(layer, normed=True) for layer in drafter.layer_ids])


def other_causality(target: Target, drafter: Drafter) -> Iterator[Trial]:
    if "causal" in drafter.family.options:
        causal = not any(causal for causal, _ in drafter.attention_patterns)
        yield with_keys(drafter, f"causal {str(causal).lower()}", {"causal": causal})


def other_anchor(target: Target, drafter: Drafter) -> Iterator[Trial]:
    if "sample_from_anchor" in drafter.family.options:
        there = not drafter.own.get("sample_from_anchor")
        yield with_keys(drafter, f"sample_from_anchor {str(there).lower()}", {"sample_from_anchor": there})


def other_thetas(target: Target, drafter: Drafter) -> Iterator[Trial]:
    own = drafter.config.rope_parameters
    for theta in dict.fromkeys([float(rope(target.config).get("rope_theta", 1e4)), *THETAS]):
        if theta != own["rope_theta"]:
            yield with_keys(drafter, f"rope_theta {theta:g}", rope_parameters=own | {"rope_theta": theta})


def other_scaling(target: Target, drafter: Drafter) -> Iterator[Trial]:
    own, theirs = drafter.config.rope_parameters, dict(rope(target.config))
    plain = {"rope_type": "default", "rope_theta": own["rope_theta"]}
    ways = {"no rope_scaling": plain}
    ways |= {f"rope_scaling linear {n}": plain | {"rope_type": "linear", "factor": float(n)} for n in (2, 4, 8)}
    if theirs.get("rope_type", "default") in ("yarn", "llama3", "linear"):
        ways["the target's rope_scaling"] = plain | theirs
    for label, parameters in ways.items():
        if parameters != own:
            with suppress(KeyError, ValueError):  # the target's has keys that a drafter does not know
                yield with_keys(drafter, label, rope_parameters=parameters)


def other_masks(target: Target, drafter: Drafter) -> Iterator[Trial]:
    if drafter.mask_token_id is None:
        return
    tokenizer, vocabulary = target.tokenizer, target.config.vocab_size
    names = ("mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    wanted = [getattr(tokenizer, name) for name in names] + [0, vocabulary - 1]
    with suppress(ValueError):  # no token is left for it
        wanted.append(default_mask_token(tokenizer, vocabulary, target.end_ids))
    for mask in dict.fromkeys(wanted):
        if mask not in (None, drafter.mask_token_id):
            yield with_keys(drafter, f"mask_token_id {mask}", {"mask_token_id": mask})


def other_blocks(target: Target, drafter: Drafter) -> Iterator[Trial]:
    """Try other block sizes of a drafter whose slots all enter one pass."""
    own = drafter.config.block_size
    sizes = dict.fromkeys((own + 1, own - 1, 8, 10, 16, 4, 2 * own)) if "block_size" in drafter.own else ()
    for size in sizes:
        if size not in (own, 1):
            yield with_keys(drafter, f"block_size {size}", {"block_size": size}, block_size=size)


def one_key_norm(target: Target, drafter: Drafter) -> Iterator[Trial]:
    """Let all layers take the first one's norm for the keys of the context, as vLLM's CPU kernel does (0.32: its
    `rms_norm` of all layers' keys at once reads the first row of their weights)."""
    if drafter.config.num_hidden_layers > 1 and "block_size" in drafter.own:
        other = altered(drafter)
        make = other.make_state

        def make_state(*place: object) -> DraftState:
            state = make(*place)
            weight = state.key_norm.weight  # (layers, 1, E)
            state.key_norm = Norm(weight[:1].expand_as(weight), state.key_norm.eps)
            return state

        other.make_state = make_state
        yield Trial("the first layer's norm for all context keys", other, taps_of(drafter))


# What is seen


def in_tokens(case: Case, text: KnownText, told: dict | None = None) -> list[int]:
    """Return a reference's prompt as the target's tokenizer reads it now; `told`: the template's settings."""
    prompt = [{"role": "user", "content": text.said}] if text.chat else text.said
    with suppress(ValueError):  # no template, or none that knows the settings
        return encode(case.target, prompt, told)
    return []


def read_otherwise(case: Case, chat: bool, told: dict | None = None) -> int:
    """Count the prompts, of chats or of plain texts, whose tokens are not those of the reference: by this tokenizer, or
    by the engine, which tells their number. told: settings with which they would be the same."""
    wrong = 0
    for number, text in enumerate(case.reference.texts):
        if text.chat != chat:
            continue
        if case.served is None:
            wrong += in_tokens(case, text, told) != text.prompt
        else:
            expected = text.prompt if told is None else in_tokens(case, text, told)
            wrong += case.served.prompt_tokens[number] != len(expected)
    return wrong


def show_tokenizer(case: Case) -> str | None:
    wrong = read_otherwise(case, chat=False)
    if wrong:
        return f"{wrong} of its plain prompts are other tokens"
    if case.served is not None and case.served.ids is not None:
        decode = case.target.tokenizer.decode
        pairs = zip(case.served.ids, case.served.texts, strict=True)
        strange = sum(clean(decode(ids, skip_special_tokens=True)) != clean(text) for ids, text in pairs)
        if strange > max(1, len(case.served.texts) // 4):
            return f"the token ids of {strange} of its answers are other words here"
    return None


def clean(text: str) -> str:
    """Return a text without what tokenizers tidy up differently at its ends."""
    return text.strip().strip("\ufffd")


def show_thinking(case: Case) -> str | None:
    if not read_otherwise(case, chat=True):
        return None
    names = sorted(set(re.findall(THINKING, str(case.target.tokenizer.chat_template))))
    for told in ({name: value} for name in names for value in (True, False)):
        if not read_otherwise(case, chat=True, told=told):
            return f"its prompts are those of chat_template_kwargs {told}"
    return None


def show_template(case: Case) -> str | None:
    wrong = read_otherwise(case, chat=True)
    return f"{wrong} of its chats are other tokens" if wrong else None


def show_cut(case: Case) -> str | None:
    return drafts_of(case) if case.drafted < case.drafter.block_size - 1.5 else None


def show_block(case: Case) -> str | None:
    """Say where more are drafted than a block and the anchor's slot have."""
    return drafts_of(case) if case.drafted > case.drafter.block_size + 0.5 else None


def drafts_of(case: Case) -> str:
    return f"it drafts {case.drafted:.1f} tokens a round, of {case.drafter.block_size - 1}"


def show_precision(case: Case) -> str | None:
    """Say where the texts of an engine's target are as far from ours as rounding of its weights explains."""
    seen = show_other_target(case)
    if seen is None or case.served is None:
        return None
    with rounded(case.target):
        limit = compute(case.target, case.material.prompts, case.material.answers, library=True).regret
    if case.theirs.regret <= 2 * limit:
        return f"{seen}, as of a target in few bits (a regret of {case.theirs.regret:.3f} nats; in 4 bits {limit:.3f})"
    return None


def show_other_target(case: Case) -> str | None:
    share = case.theirs.agreement
    return None if share >= SAME_TARGET else f"{100 * share:.1f} % of its tokens are this target's own"


def linears(target: Target) -> list[torch.nn.Linear]:
    """Return the layers' projections that are held as plain matrices."""
    return [part for part in target.body.layers.modules() if isinstance(part, torch.nn.Linear)]


def four_bits(weight: torch.Tensor) -> torch.Tensor:
    """Round a matrix (out, in) to 15 steps a group of 32 inputs, as int4 formats do."""
    groups = weight.float().unflatten(1, (-1, 32)) if weight.shape[1] % 32 == 0 else weight.float()[:, None]
    scale = groups.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 7
    return ((groups / scale).round() * scale).flatten(1).to(weight.dtype)


@contextmanager
def rounded(target: Target) -> Iterator[None]:
    """Give the target's projections weights of 4 bits for a while, in transformers' own layers."""
    kept = [part.weight.data for part in linears(target)]
    try:
        for part in linears(target):
            part.weight.data = four_bits(part.weight.data)
        yield
    finally:
        for part, weight in zip(linears(target), kept, strict=True):
            part.weight.data = weight


ADAPT = (
    "./launch.sh drafter.init={checkpoint} target.path={target} data=jsonl data.path=<texts that this target wrote> "
    "name=adapted (docs/training.md, another fine-tune)"
)
EDIT = "write it into config.json of the drafter's folder ({}), or export it again from its checkpoint"
READING = "the engine reads the folder otherwise ({}): export it in the format that the engine knows, or update it"


@dataclass(frozen=True)
class Cause:
    """A row of the table. `shows`: a sentence where the cause is seen directly, None where it is not; a cause that
    `counts_always` is named even where acceptance is not low. `trials`: what to replay, for causes that cannot be seen.
    `mend`: what to do, for a folder and for an engine; {} stands for the trial's label."""

    name: str
    shows: Callable[[Case], str | None] = lambda case: None
    trials: Callable[[Target, Drafter], Iterator[Trial]] = lambda target, drafter: iter(())
    mend: tuple[str, str] = (EDIT, READING)
    counts_always: bool = False


CAUSES = (
    Cause(
        "another tokenizer or vocabulary",
        show_tokenizer,
        mend=(
            "give target.path the model that the drafter was trained for, with that model's own tokenizer",
            "start the engine with the target's own tokenizer files (vLLM: --tokenizer; GGUF: convert again)",
        ),
        counts_always=True,
    ),
    Cause(
        "thinking mode",
        show_thinking,
        mend=(
            "target.chat_template_kwargs={{...}} as in the drafter's config.json",
            "send chat_template_kwargs with every request as the drafter's config.json has it, or start vLLM with "
            "--default-chat-template-kwargs",
        ),
        counts_always=True,
    ),
    Cause(
        "another chat template",
        show_template,
        mend=(
            "give target.path the model with the template that the drafter was trained under",
            "start the engine with the target's own template: --chat-template <its chat_template.jinja>",
        ),
        counts_always=True,
    ),
    Cause(
        "drafted tokens cut by the engine's settings",
        show_cut,
        mend=("", "vLLM: num_speculative_tokens; llama.cpp: --spec-draft-n-max"),
    ),
    Cause("another block size", show_block, other_blocks, (EDIT, "let it draft block_size - 1 tokens a round")),
    Cause(
        "the target's dtype or quantisation",
        show_precision,
        mend=("", "serve the target in the card's dtype, or train the drafter on for the quantised one: " + ADAPT),
        counts_always=True,
    ),
    Cause(
        "another target's weights",
        show_other_target,
        mend=(
            "evaluate with the target that the drafter was trained for, or adapt the drafter: " + ADAPT,
            "adapt the drafter: " + ADAPT,
        ),
        counts_always=True,
    ),
    Cause("tapped layers off by one", trials=other_layers),
    Cause("features taken behind a norm", trials=other_norms),
    Cause("causality inside the block", trials=other_causality),
    Cause("the anchor's slot", trials=other_anchor),
    Cause("rotary base", trials=other_thetas),
    Cause("rotary scaling", trials=other_scaling),
    Cause("another mask token", trials=other_masks),
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
