"""The table of known causes of low acceptance, with advice for each cause.

Some causes are detected directly. For others, variations of the drafter are replayed
(infer/doctor/variations.py). A variation explains a difference between two measurements if the
acceptance that it has in our engine is close to the acceptance on the drafter's card, or in the
other engine.
"""

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

# If a smaller share of the answers' tokens is the target's greedy choice, the answers come from
# another target. Rounding errors alone leave a higher share.
MIN_TARGET_GREEDY_AGREEMENT_SHARE = 0.98
# Without a model card, a variation counts as better than the drafter if it accepts at least this
# many times as many draft tokens.
MIN_DOCTOR_ACCEPTANCE_GAIN_RATIO = 1.25
LONG_CONTEXT_ANSWER_TOKENS = 512  # number of tokens that are replayed after a long context
DOCTOR_SHORT_WINDOW_TOKENS = (
    256  # the drafter is also replayed with attention to only so many tokens
)


def count_tokenization_mismatches(comparison: AcceptanceComparison, chat: bool) -> int:
    """Count the prompts whose token ids differ from those of the reference.

    If an engine was measured, the lengths of the prompts are compared, because engines report only
    these. Otherwise the prompts are tokenized here with the target's tokenizer.

    chat: true counts the chats, and false the plain texts
    """
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
    """Tokenize a reference prompt with the target's tokenizer, and return the token ids.

    Returns an empty list for a chat if the target has no chat template.
    """
    prompt = answer.prompt_text
    with suppress(ValueError):
        if answer.chat:
            return encode_prompt(target, [{"role": "user", "content": prompt}])
        return encode_prompt(target, prompt)
    return []


def detect_tokenizer(comparison: AcceptanceComparison) -> str | None:
    """Detect another tokenizer, and describe the evidence. Return None if there is none.

    The evidence is plain prompts with other token ids, or answers whose ids decode to other text.
    """
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
    """Detect another chat template, and describe the evidence. Return None if there is none.

    The evidence is chats with other token ids.
    """
    mismatches = count_tokenization_mismatches(comparison, chat=True)
    return f"{mismatches} of its chats are other tokens" if mismatches else None


def detect_draft_length(comparison: AcceptanceComparison) -> str | None:
    """Detect an engine that drafts fewer or more tokens per round than a block has.

    Returns a description, or None if the number of drafts is right or acceptance is not low. Both
    block_size - 1 and block_size drafted tokens are right, because the position of the bonus token
    may draft, too.
    """
    if comparison.engine is None or not comparison.is_low:
        return None
    draft_length = comparison.drafter.block_size - 1
    drafts_per_round = comparison.engine.drafts_per_round
    if draft_length - 0.5 <= drafts_per_round <= draft_length + 1.5:
        return None
    return f"it drafts {drafts_per_round:.1f} tokens a round, of {draft_length}"


def detect_other_target(comparison: AcceptanceComparison) -> str | None:
    """Detect answers that come from another target, and describe the evidence.

    Returns None if nearly all tokens of the answers are the target's greedy choice.
    """
    agreement = comparison.target_agreement
    if agreement >= MIN_TARGET_GREEDY_AGREEMENT_SHARE:
        return None
    return f"{100 * agreement:.1f} % of its tokens are this target's own"


def detect_prefix_cache(comparison: AcceptanceComparison) -> str | None:
    """Detect an engine that accepts fewer draft tokens if a prompt is in its prefix cache.

    The target does not run on such a prompt, so an engine may not give the drafter the features of
    the prompt. Returns a description, or None if acceptance is as high as without the cache.
    """
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
    """Detect a drafter whose acceptance is low after a context longer than in its training.

    All prompts and answers are joined to a long context. The acceptance at its end is compared with
    that of the same drafter with a sliding window. Returns a description if the window accepts many
    more draft tokens, else None.
    """
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
        f"{1 + short_window.mean_accepted:.2f} "
        f"where it sees the last {DOCTOR_SHORT_WINDOW_TOKENS}"
    )


# In the advice, {checkpoint}, {target} and {} are replaced by the path of the drafter, the name of
# the target, and the label of the variation.
RETRAIN_DRAFTER_ADVICE = (
    "./launch.sh drafter.init={checkpoint} target.path={target} data=jsonl data.path=<texts that "
    "this target wrote> name=adapted (docs/training.md, another fine-tune)"
)
EDIT_CONFIG_ADVICE = (
    "write it into config.json of the drafter's folder ({}), or export it again from its checkpoint"
)
REEXPORT_ADVICE = (
    "the engine reads the folder otherwise ({}): export it in the format that the engine knows, "
    "or update it"
)


@dataclass(frozen=True)
class LowAcceptanceCause:
    """A known cause of low acceptance.

    detect: returns a sentence that describes the evidence for this cause, or None if there is none
    variations: yields the variations of the drafter that are replayed, for a cause that cannot be
        detected directly
    folder_advice: what to do if the folder of the drafter has the problem
    engine_advice: what to do if the engine has the problem
    """

    name: str
    detect: Callable[[AcceptanceComparison], str | None] = lambda comparison: None
    variations: Callable[[Target, Drafter], Variations] = lambda target, drafter: iter(())
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
            "chat_template.jinja>), and with chat_template_kwargs as the drafter's config.json "
            "has them (vLLM: --default-chat-template-kwargs)"
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
            "vLLM's kernel for CPUs reads one norm for all layers ({}): serve it on a GPU, or "
            "with an engine whose kernels know a norm a layer"
        ),
    ),
)
LIMIT_DRAFTER_WINDOW_ADVICE = (
    f"drafter.sliding_window={DOCTOR_SHORT_WINDOW_TOKENS} where long texts are decoded (SGLang: "
    "--speculative-dflash-draft-window-size)"
)
# This cause lowers both measurements in the same way. It is therefore not part of the table above,
# and is tested if there is no difference between the measurements.
LONG_CONTEXT_ACCEPTANCE_CAUSE = LowAcceptanceCause(
    "trained on shorter texts",
    detect_long_context,
    folder_advice=LIMIT_DRAFTER_WINDOW_ADVICE,
    engine_advice=LIMIT_DRAFTER_WINDOW_ADVICE,
)
