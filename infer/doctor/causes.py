"""The table of known causes of low acceptance: for each, how to detect it directly or which
variations of the drafter to replay, and what to do about it.

A variation explains a difference to the extent that it brings the acceptance here to the one that
was measured elsewhere: on the drafter's card, or in an engine."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from infer.api import encode_prompt, max_positions
from infer.doctor.comparison import AcceptanceComparison, is_significantly_lower
from infer.doctor.replay import compute_target_states, replay_chains
from infer.doctor.variations import (
    Variations,
    copy_with_config,
    list_feature_layers,
    make_flag_variation,
    share_first_key_norm,
    vary_layers,
    vary_norm,
    vary_rope_theta,
)
from infer.drafters.base import Drafter, limit_attention_window
from infer.evaluation.results import AcceptanceCounts, ReferenceAnswer
from infer.targets.target import Target

# Share of the answers' tokens that must be the target's own greedy choice. Rounding alone leaves a
# higher share.
MIN_TARGET_GREEDY_AGREEMENT_SHARE = 0.98
# Without a card, another reading of the drafter must accept so many times the drafts.
MIN_DOCTOR_ACCEPTANCE_GAIN_RATIO = 1.25
LONG_CONTEXT_ANSWER_TOKENS = 512  # replayed at the end of a long context
DOCTOR_SHORT_WINDOW_TOKENS = 256  # what the drafter sees there instead of the whole context


def count_tokenization_mismatches(comparison: AcceptanceComparison, chat: bool) -> int:
    """Count the prompts, either chats or plain text, that are tokenized differently from the
    reference: by the target's tokenizer here, or by the engine, which reports their length only."""
    mismatches = 0
    for i, answer in enumerate(comparison.reference.answers):
        if answer.chat != chat:
            continue
        if comparison.engine is not None:
            mismatches += comparison.engine.prompt_tokens[i] != len(answer.prompt_ids)
        else:
            mismatches += encode_reference_prompt(comparison.target, answer) != answer.prompt_ids
    return mismatches


def encode_reference_prompt(target: Target, answer: ReferenceAnswer) -> list[int]:
    """Return a reference prompt as tokenized now; no tokens if the target has no chat template for
    it."""
    prompt = answer.prompt_text
    with suppress(ValueError):
        if answer.chat:
            return encode_prompt(target, [{"role": "user", "content": prompt}])
        return encode_prompt(target, prompt)
    return []


def detect_tokenizer(comparison: AcceptanceComparison) -> str | None:
    """Describe plain prompts with other token ids, or answers whose ids decode to other text."""
    mismatches = count_tokenization_mismatches(comparison, chat=False)
    if mismatches:
        return f"{mismatches} of its plain prompts are other tokens"
    if comparison.engine is None:
        return None

    tokenizer: Any = comparison.target.tokenizer
    different = 0
    for ids, text in zip(comparison.engine.answer_ids, comparison.engine.texts, strict=True):
        local_text = tokenizer.decode(ids, skip_special_tokens=True)
        different += local_text.strip() != text.strip()
    if different > max(1, len(comparison.engine.texts) // 4):
        return f"the token ids of {different} of its answers are other words here"
    return None


def detect_template(comparison: AcceptanceComparison) -> str | None:
    """Describe chats with other token ids."""
    mismatches = count_tokenization_mismatches(comparison, chat=True)
    return f"{mismatches} of its chats are other tokens" if mismatches else None


def detect_draft_length(comparison: AcceptanceComparison) -> str | None:
    """Describe an engine with low acceptance that drafts fewer or more tokens than a block has,
    with or without the anchor's slot."""
    if comparison.engine is None or not comparison.is_low:
        return None
    draft_length = comparison.drafter.block_size - 1
    drafts_per_round = comparison.engine.drafts_per_round
    if draft_length - 0.5 <= drafts_per_round <= draft_length + 1.5:
        return None
    return f"it drafts {drafts_per_round:.1f} tokens a round, of {draft_length}"


def detect_other_target(comparison: AcceptanceComparison) -> str | None:
    """Describe answers with too many tokens that are not the target's own greedy choice."""
    agreement = comparison.target_agreement
    if agreement >= MIN_TARGET_GREEDY_AGREEMENT_SHARE:
        return None
    return f"{100 * agreement:.1f} % of its tokens are this target's own"


def detect_prefix_cache(comparison: AcceptanceComparison) -> str | None:
    """Describe an engine that accepts fewer drafts when a prompt comes from its prefix cache: the
    target does not run on such a prompt, so that the drafter gets no features of it."""
    if comparison.engine is None or not comparison.is_comparable:
        return None
    first = AcceptanceCounts.pool(comparison.engine.acceptance_by_answer)
    repeated = AcceptanceCounts.pool(comparison.engine.repeated_acceptance)
    if not is_significantly_lower(repeated, first):
        return None
    return (
        f"{1 + repeated.mean_accepted:.2f} tokens a round where a prompt is asked a second time, "
        f"{1 + first.mean_accepted:.2f} the first"
    )


def detect_long_context(comparison: AcceptanceComparison) -> str | None:
    """Describe a drafter that accepts fewer drafts after a long context, all answers in a row, than
    if it sees only the end of it: more context than it was trained with distracts it."""
    target = comparison.target
    drafter = comparison.drafter
    ids = []
    for answer in comparison.reference.answers:
        ids += [*answer.prompt_ids, *answer.answer_ids]
    ids = ids[: max_positions(target)]
    if "sliding_window" not in drafter.family.options or len(ids) < 4 * LONG_CONTEXT_ANSWER_TOKENS:
        return None

    context_length = len(ids) - LONG_CONTEXT_ANSWER_TOKENS
    feature_layers = list_feature_layers(drafter)
    states = compute_target_states(
        target, [ids[:context_length]], [ids[context_length:]], feature_layers
    )
    draft_length = drafter.block_size - 1
    [full_context] = replay_chains(target, drafter, states, feature_layers, draft_length)
    windowed = copy_with_config(drafter)
    limit_attention_window(windowed, DOCTOR_SHORT_WINDOW_TOKENS)
    [short_window] = replay_chains(target, windowed, states, feature_layers, draft_length)

    is_better = (
        short_window.mean_accepted >= MIN_DOCTOR_ACCEPTANCE_GAIN_RATIO * full_context.mean_accepted
    )
    if not is_better or not is_significantly_lower(full_context, short_window):
        return None
    return (
        f"{1 + full_context.mean_accepted:.2f} tokens a round after {context_length} others, "
        f"{1 + short_window.mean_accepted:.2f} where it sees the last {DOCTOR_SHORT_WINDOW_TOKENS}"
    )


# Advice: {checkpoint} and {target} are filled in, and {} stands for the variation's label.
RETRAIN_DRAFTER_ADVICE = (
    "./launch.sh drafter.init={checkpoint} target.path={target} data=jsonl "
    "data.path=<texts that this target wrote> name=adapted (docs/training.md, another fine-tune)"
)
EDIT_CONFIG_ADVICE = (
    "write it into config.json of the drafter's folder ({}), or export it again from its checkpoint"
)
REEXPORT_ADVICE = (
    "the engine reads the folder otherwise ({}): export it in the format that the engine knows, or "
    "update it"
)


@dataclass(frozen=True)
class LowAcceptanceCause:
    """A known cause of low acceptance: one row of the table."""

    name: str
    # returns a sentence if the cause is seen directly, None if not
    detect: Callable[[AcceptanceComparison], str | None] = lambda comparison: None
    # yields the variations to replay, for causes that cannot be seen directly
    variations: Callable[[Target, Drafter], Variations] = lambda target, drafter: iter(())
    # what to do about it
    folder_advice: str = EDIT_CONFIG_ADVICE
    engine_advice: str = REEXPORT_ADVICE


LOW_ACCEPTANCE_CAUSES = (
    LowAcceptanceCause(
        "another tokenizer or vocabulary",
        detect_tokenizer,
        folder_advice=(
            "give target.path the model that the drafter was trained for, with that model's own "
            "tokenizer"
        ),
        engine_advice=(
            "start the engine with the target's own tokenizer files (vLLM: --tokenizer; GGUF: "
            "convert again)"
        ),
    ),
    LowAcceptanceCause(
        "another chat template or thinking mode",
        detect_template,
        folder_advice=(
            "give target.path the model with the template that the drafter was trained under, and "
            "target.chat_template_kwargs={{...}} as in the drafter's config.json"
        ),
        engine_advice=(
            "start the engine with the target's own template (--chat-template <its "
            "chat_template.jinja>), and with chat_template_kwargs as the drafter's config.json has "
            "them (vLLM: --default-chat-template-kwargs)"
        ),
    ),
    LowAcceptanceCause(
        "another number of drafts a round",
        detect_draft_length,
        folder_advice="",
        engine_advice=(
            "let it draft block_size - 1 tokens (vLLM: num_speculative_tokens; llama.cpp: "
            "--spec-draft-n-max)"
        ),
    ),
    LowAcceptanceCause(
        "the prefix cache hides the drafter's context",
        detect_prefix_cache,
        folder_advice="",
        engine_advice=(
            "start the engine without one (vLLM: --no-enable-prefix-caching; its issue 47930), or "
            "update it"
        ),
    ),
    LowAcceptanceCause(
        "another target's weights, or the same in few bits",
        detect_other_target,
        folder_advice=(
            "evaluate with the target that the drafter was trained for, or adapt the drafter: "
            + RETRAIN_DRAFTER_ADVICE
        ),
        engine_advice="serve the target in the card's dtype, or adapt the drafter: "
        + RETRAIN_DRAFTER_ADVICE,
    ),
    LowAcceptanceCause("tapped layers off by one", variations=vary_layers),
    LowAcceptanceCause("features taken behind a norm", variations=vary_norm),
    LowAcceptanceCause("causality inside the block", variations=make_flag_variation("causal")),
    LowAcceptanceCause("the anchor's slot", variations=make_flag_variation("sample_from_anchor")),
    LowAcceptanceCause("rotary base", variations=vary_rope_theta),
    LowAcceptanceCause(
        "norms of the context's keys",
        variations=share_first_key_norm,
        engine_advice=(
            "vLLM's kernel for CPUs reads one norm for all layers ({}): serve it on a GPU, or with "
            "an engine whose kernels know a norm a layer"
        ),
    ),
)
LIMIT_DRAFTER_WINDOW_ADVICE = (
    f"drafter.sliding_window={DOCTOR_SHORT_WINDOW_TOKENS} where long texts are decoded (SGLang: "
    "--speculative-dflash-draft-window-size)"
)
# No cause of a difference between two measurements: it is looked for where there is no difference.
LONG_CONTEXT_ACCEPTANCE_CAUSE = LowAcceptanceCause(
    "trained on shorter texts",
    detect_long_context,
    folder_advice=LIMIT_DRAFTER_WINDOW_ADVICE,
    engine_advice=LIMIT_DRAFTER_WINDOW_ADVICE,
)
