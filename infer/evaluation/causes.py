"""The known causes of low acceptance, a row of one table each: how a cause shows directly, how it is tried, and what
mends it.

What is tried is one thing changed in how the drafter is read, and a replay (`infer.evaluation.replay`). A trial
explains a difference by as much as it brings our decoding from what we measured to what was measured elsewhere: that of
a card, behind which a folder falls short, or that of an engine.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from itertools import zip_longest

import torch

from infer.api import encode
from infer.drafters.base import Drafter, DraftState, default_mask_token
from infer.evaluation.replay import Material, Tap, compute, next_norm
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


@dataclass(frozen=True)
class Cause:
    """A row of the table. `shows`: a sentence where the cause is seen directly, None where it is not; a cause that
    `counts_always` is named even where acceptance is not low. `trials`: what to replay, for causes that cannot be seen.
    `mend`: what to do, for a folder and for an engine; {} stands for the trial's label."""

    name: str
    mend: tuple[str, str]
    shows: Callable[[Case], str | None] = lambda case: None
    trials: Callable[[Target, Drafter], Iterator[Trial]] = lambda target, drafter: iter(())
    counts_always: bool = False


def taps_of(drafter: Drafter) -> list[Tap]:
    """Return where a drafter's features are read."""
    return [Tap(layer) for layer in drafter.layer_ids]


def altered(drafter: Drafter, own: dict | None = None, **keys: object) -> Drafter:
    """Return the drafter with some keys of its config.json changed, `own`: of its family's part; the same weights."""
    config = deepcopy(drafter.config)
    getattr(config, drafter.family.config_key).update(own or {})
    for key, value in keys.items():
        setattr(config, key, value)
    other = type(drafter)(config)
    other.load_state_dict(drafter.state_dict())
    return other.to(drafter.norm.weight.device, drafter.norm.weight.dtype).eval().requires_grad_(False)


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
        yield Trial(f"causal {str(causal).lower()}", altered(drafter, {"causal": causal}), taps_of(drafter))


def other_anchor(target: Target, drafter: Drafter) -> Iterator[Trial]:
    if "sample_from_anchor" in drafter.family.options:
        there = not drafter.own.get("sample_from_anchor")
        other = altered(drafter, {"sample_from_anchor": there})
        yield Trial(f"sample_from_anchor {str(there).lower()}", other, taps_of(drafter))


def other_thetas(target: Target, drafter: Drafter) -> Iterator[Trial]:
    own = dict(getattr(drafter.config, "rope_parameters", None) or {})
    wanted = [float(rope(target.config).get("rope_theta", 1e4)), *THETAS]
    for theta in dict.fromkeys(wanted):
        if own and theta != own["rope_theta"]:
            other = altered(drafter, rope_parameters=own | {"rope_theta": theta})
            yield Trial(f"rope_theta {theta:g}", other, taps_of(drafter))


def other_scaling(target: Target, drafter: Drafter) -> Iterator[Trial]:
    own = dict(getattr(drafter.config, "rope_parameters", None) or {})
    if not own:
        return
    plain = {"rope_type": "default", "rope_theta": own["rope_theta"]}
    ways = [("no rope_scaling", plain)]
    ways += [(f"rope_scaling linear {n}", plain | {"rope_type": "linear", "factor": float(n)}) for n in (2, 4, 8)]
    theirs = dict(rope(target.config))
    if theirs.get("rope_type", "default") in ("yarn", "llama3", "linear"):
        ways.insert(0, ("the target's rope_scaling", plain | theirs))
    for label, parameters in ways:
        if parameters != own:
            with suppress(KeyError, ValueError):  # the target's has keys that a drafter does not know
                yield Trial(label, altered(drafter, rope_parameters=parameters), taps_of(drafter))


def other_masks(target: Target, drafter: Drafter) -> Iterator[Trial]:
    own, tokenizer = drafter.mask_token_id, target.tokenizer
    if own is None:
        return
    names = ("mask_token_id", "pad_token_id", "eos_token_id", "bos_token_id", "unk_token_id")
    wanted = [getattr(tokenizer, name, None) for name in names] + [0, target.config.vocab_size - 1]
    with suppress(ValueError, AttributeError):
        wanted.insert(0, default_mask_token(tokenizer, target.config.vocab_size, target.end_ids))
    for mask in dict.fromkeys(wanted):
        if mask is not None and mask != own:
            yield Trial(f"mask_token_id {mask}", altered(drafter, {"mask_token_id": mask}), taps_of(drafter))


def other_blocks(target: Target, drafter: Drafter) -> Iterator[Trial]:
    """Try other block sizes of a drafter whose slots all enter one pass."""
    own = drafter.config.block_size
    if "block_size" not in drafter.own:
        return
    for size in dict.fromkeys((own + 1, own - 1, 8, 10, 16, 4, 2 * own)):
        if size not in (own, 1):
            yield Trial(f"block_size {size}", altered(drafter, {"block_size": size}, block_size=size), taps_of(drafter))


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
    for i, text in enumerate(case.reference.texts):
        if text.chat != chat:
            continue
        expected = text.prompt if told is None else in_tokens(case, text, told)
        if case.served is None:
            wrong += (text.prompt if told is not None else in_tokens(case, text)) != expected
        else:
            wrong += case.served.prompt_tokens[i] != len(expected)
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
    names = sorted(set(re.findall(THINKING, str(getattr(case.target.tokenizer, "chat_template", "")))))
    for told in ({name: value} for name in names for value in (True, False)):
        if not read_otherwise(case, chat=True, told=told):
            return f"its prompts are those of chat_template_kwargs {told}"
    return None


def show_template(case: Case) -> str | None:
    wrong = read_otherwise(case, chat=True)
    return f"{wrong} of its chats are other tokens" if wrong else None


def show_cut(case: Case) -> str | None:
    drafted = case.drafter.block_size - 1
    if case.served is not None and case.served.drafted < drafted - 0.5:
        return f"it drafts {case.served.drafted:.1f} tokens a round, of {drafted}"
    return None


def show_block(case: Case) -> str | None:
    more = case.drafter.block_size + 0.5  # one more than a block has is the anchor's slot
    if case.served is not None and case.served.drafted > more:
        return f"it drafts {case.served.drafted:.1f} tokens a round, of {case.drafter.block_size - 1}"
    return None


def theirs(case: Case) -> Material | None:
    """Return the texts of the target that is compared with ours, seen by ours; None where they are the same."""
    material = case.material
    if case.served is not None:
        ids = case.served.ids or [
            case.target.tokenizer(text, add_special_tokens=False)["input_ids"] for text in case.served.texts
        ]
        pairs = [(text.prompt, own) for text, own in zip(case.reference.texts, ids, strict=True) if own]
        material = compute(case.target, *map(list, zip(*pairs, strict=True)))
    return material if material.agreement < SAME_TARGET else None


def show_precision(case: Case) -> str | None:
    """Say where the target's texts are as far from ours as rounding of its weights explains."""
    found = theirs(case)
    if found is None:
        return None
    seen = f"{100 * found.agreement:.1f} % of its tokens are this target's own"
    if case.served is None:
        quantised = looks_quantised(case.target)
        return f"{seen}, whose weights are {quantised}" if quantised else None
    texts = case.reference.texts
    prompts, answers = [text.prompt for text in texts], [text.ids for text in texts]
    with rounded(case.target):
        limit = compute(case.target, prompts, answers, library=True).regret
    if found.regret <= 2 * limit:
        return f"{seen}, as of a target in few bits (a regret of {found.regret:.3f} nats; in 4 bits {limit:.3f})"
    return None


def show_other_target(case: Case) -> str | None:
    found = theirs(case)
    return None if found is None else f"{100 * found.agreement:.1f} % of its tokens are this target's own"


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


def looks_quantised(target: Target) -> str | None:
    """Say how a target's weights are quantised, None where they are not."""
    named = getattr(target.config, "quantization_config", None) or getattr(
        target.model.config, "quantization_config", None
    )
    if named is not None:
        return "quantised by its own config.json"
    weights = [part.weight for part in linears(target)[:8]]
    if weights and all(close(four_bits(weight), weight) for weight in weights):
        return "those of 4 bits"
    steps = [weight.float() / weight.float().abs().amax(1, keepdim=True).clamp(min=1e-12) * 127 for weight in weights]
    if weights and all((step.round() - step).abs().mean() < 0.1 for step in steps):  # of any weights: 0.25
        return "those of 8 bits"
    return None


def close(a: torch.Tensor, b: torch.Tensor, most: float = 0.01) -> bool:
    return bool((a.float() - b.float()).norm() <= most * b.float().norm())


ADAPT = (
    "./launch.sh drafter.init={checkpoint} target.path={target} data=jsonl data.path=<texts that this target wrote> "
    "name=adapted (docs/training.md, another fine-tune)"
)
EDIT = "write it into config.json of the drafter's folder ({}), or export it again from its checkpoint"
READING = "the engine reads the folder otherwise ({}): export it in the format that the engine knows, or update it"

CAUSES = (
    Cause(
        "another tokenizer or vocabulary",
        (
            "give target.path the model that the drafter was trained for, with that model's own tokenizer",
            "start the engine with the target's own tokenizer files (vLLM, SGLang: --tokenizer; GGUF: convert again)",
        ),
        show_tokenizer,
        counts_always=True,
    ),
    Cause(
        "thinking mode",
        (
            "target.chat_template_kwargs={{...}} as in the drafter's config.json",
            "send chat_template_kwargs with every request as the drafter's config.json has it, or start vLLM with "
            "--default-chat-template-kwargs",
        ),
        show_thinking,
        counts_always=True,
    ),
    Cause(
        "another chat template",
        (
            "give target.path the model with the template that the drafter was trained under",
            "start the engine with the target's own template: --chat-template <its chat_template.jinja>",
        ),
        show_template,
        counts_always=True,
    ),
    Cause(
        "drafted tokens cut by the engine's settings",
        ("", "vLLM: num_speculative_tokens; SGLang: --speculative-num-draft-tokens; llama.cpp: --spec-draft-n-max"),
        show_cut,
    ),
    Cause("another block size", (EDIT, "let it draft block_size - 1 tokens a round"), show_block, other_blocks),
    Cause(
        "the target's dtype or quantisation",
        (
            "evaluate with the target that the drafter was trained for, or train it on: " + ADAPT,
            "serve the target in the dtype of the card, or train the drafter on for the quantised one: " + ADAPT,
        ),
        show_precision,
        counts_always=True,
    ),
    Cause("another target's weights", ("adapt the drafter: " + ADAPT,) * 2, show_other_target, counts_always=True),
    Cause("tapped layers off by one", (EDIT, READING), trials=other_layers),
    Cause("features taken behind a norm", (EDIT, READING), trials=other_norms),
    Cause("causality inside the block", (EDIT, READING), trials=other_causality),
    Cause("the anchor's slot", (EDIT, READING), trials=other_anchor),
    Cause("rotary base", (EDIT, READING), trials=other_thetas),
    Cause("rotary scaling", (EDIT, READING), trials=other_scaling),
    Cause("another mask token", (EDIT, READING), trials=other_masks),
    Cause(
        "norms of the context's keys",
        (
            EDIT,
            "vLLM's kernel for CPUs reads one norm for all layers ({}): serve it on a GPU, or with an engine whose "
            "kernels know a norm a layer",
        ),
        trials=one_key_norm,
    ),
)


def all_trials(target: Target, drafter: Drafter) -> list[tuple[Cause, Trial]]:
    """Return everything that can be tried."""
    return [(cause, trial) for cause in CAUSES for trial in cause.trials(target, drafter)]


def all_taps(trials: Sequence[tuple[Cause, Trial]], drafter: Drafter) -> list[Tap]:
    """Return every tap that trials and the drafter itself read."""
    return list(dict.fromkeys([*taps_of(drafter), *(tap for _, trial in trials for tap in trial.taps)]))
