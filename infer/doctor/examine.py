"""Diagnoses why a drafter's acceptance is low.

The acceptance in our engine ("here") is compared with that on the drafter's model card and that of
another engine. If there is a difference, the known causes (`infer.doctor.causes`) are tested.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from infer.doctor.causes import (
    LONG_CONTEXT_ACCEPTANCE_CAUSE,
    LOW_ACCEPTANCE_CAUSES,
    MIN_DOCTOR_ACCEPTANCE_GAIN_RATIO,
    LowAcceptanceCause,
)
from infer.doctor.comparison import (
    AcceptanceComparison,
    EngineMeasurement,
    count_difference,
    is_significantly_lower,
)
from infer.doctor.replay import compute_target_states, replay_chains
from infer.doctor.variations import DrafterVariation, list_feature_layers
from infer.drafters.base import Drafter
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference
from infer.targets.target import Target

# A variation is named as the cause if it explains at least this share of a difference.
MIN_EXPLAINED_ACCEPTANCE_LOSS_SHARE = 0.5
# The same limit if acceptance is different but not low
MIN_EXPLAINED_SHARE_AT_NORMAL_ACCEPTANCE = 0.8
# If the relative difference is at least this, variations are replayed even if acceptance is not
# low.
MIN_RELATIVE_ACCEPTANCE_DIFFERENCE_TO_REPLAY = 0.01
EVIDENCE_LABEL_WIDTH = 57

# (label, acceptance) of every measurement
Evidence = list[tuple[str, AcceptanceCounts]]


class VariationResult(NamedTuple):
    """The acceptance of one variation of the drafter, and the cause that it tests."""

    cause: LowAcceptanceCause
    variation: DrafterVariation
    acceptance: list[AcceptanceCounts]  # one entry for each answer


@dataclass(frozen=True)
class Diagnosis:
    """The result of an examination.

    healthy: whether the acceptance is as high as expected
    verdict: a sentence for the user
    evidence: all measurements
    cause: the cause of low acceptance; None if there is none or it is unknown
    advice: what the user can do; None if the cause is None
    """

    healthy: bool
    verdict: str
    evidence: Evidence
    cause: LowAcceptanceCause | None = None
    advice: str | None = None


def diagnose_drafter(
    target: Target,
    drafter: Drafter,
    reference: AcceptanceReference,
    engine: EngineMeasurement | None = None,
    has_card: bool = True,
    checkpoint: str = "<drafter>",
) -> Diagnosis:
    """Compare the acceptance on a drafter's card, here and in an engine, and return a diagnosis.

    engine: the measurement of an engine; None if no engine was measured

    has_card: whether the reference is from the drafter's card; False if it was measured just now
        with this drafter
    checkpoint: the drafter's path, for commands in the advice
    """
    variations = list_variations(target, drafter)
    feature_layers = dict.fromkeys(list_feature_layers(drafter))
    for _, variation in variations:
        feature_layers |= dict.fromkeys(variation.feature_layers)
    prompts = [answer.prompt_ids for answer in reference.answers]
    answers = [answer.answer_ids for answer in reference.answers]
    states = compute_target_states(target, prompts, answers, list(feature_layers))
    draft_length = reference.block_size - 1

    @cache
    def replay_variations() -> list[VariationResult]:
        results = []
        for cause, variation in variations:
            acceptance = replay_chains(
                target, variation.drafter, states, variation.feature_layers, draft_length
            )
            results.append(VariationResult(cause, variation, acceptance))
        return results

    acceptance = replay_chains(target, drafter, states, list_feature_layers(drafter), draft_length)
    local = AcceptanceComparison(target, drafter, reference, states, acceptance, acceptance)
    evidence: Evidence = [("here, as the folder says", AcceptanceCounts.pool(acceptance))]
    comparisons = {}
    if has_card:
        evidence.insert(0, ("its card", reference.acceptance))
        card_acceptance = reference.acceptance_by_answer
        comparisons["its card"] = replace(local, compared_acceptance=card_acceptance)
    if engine is not None:
        engine_acceptance = engine.acceptance_by_answer
        evidence.append((engine.engine, AcceptanceCounts.pool(engine_acceptance)))
        comparisons[engine.engine] = replace(
            local, compared_acceptance=engine_acceptance, engine=engine
        )

    names = {"checkpoint": checkpoint, "target": target.name}
    diagnosis = None
    for comparison in comparisons.values():
        if diagnosis is None:
            diagnosis = diagnose_comparison(comparison, replay_variations, evidence, names)
    if diagnosis is None and not has_card:
        diagnosis = diagnose_without_card(acceptance, replay_variations(), evidence)
    return diagnosis or make_healthy_diagnosis(local, list(comparisons), engine, evidence)


def list_variations(
    target: Target, drafter: Drafter
) -> list[tuple[LowAcceptanceCause, DrafterVariation]]:
    """Return (cause, variation) of all variations of all known causes."""
    return [
        (cause, variation)
        for cause in LOW_ACCEPTANCE_CAUSES
        for variation in cause.variations(target, drafter)
    ]


def diagnose_without_card(
    local_acceptance: list[AcceptanceCounts],
    variation_results: list[VariationResult],
    evidence: Evidence,
) -> Diagnosis | None:
    """Return a diagnosis if a variation accepts many more draft tokens, else None."""
    local = AcceptanceCounts.pool(local_acceptance)
    best = max(
        variation_results, key=lambda result: AcceptanceCounts.pool(result.acceptance).mean_accepted
    )
    acceptance = AcceptanceCounts.pool(best.acceptance)
    min_accepted = MIN_DOCTOR_ACCEPTANCE_GAIN_RATIO * local.mean_accepted
    if acceptance.mean_accepted <= min_accepted or not is_significantly_lower(local, acceptance):
        return None
    label = best.variation.label
    verdict = (
        f"{label} gives {1 + acceptance.mean_accepted:.2f} tokens a round, "
        f"{1 + local.mean_accepted:.2f} "
        "as it is"
    )
    advice = best.cause.folder_advice.format(label)
    return make_cause_diagnosis(
        best.cause, verdict, evidence + list_evidence(variation_results), advice
    )


def make_healthy_diagnosis(
    local: AcceptanceComparison,
    compared_names: list[str],
    engine: EngineMeasurement | None,
    evidence: Evidence,
) -> Diagnosis:
    """Return the diagnosis for a target and a drafter whose acceptance is as high as expected.

    If acceptance is low after long contexts, the diagnosis says so.

    local: a comparison of the acceptance here with itself
    """
    local_acceptance = AcceptanceCounts.pool(local.local_acceptance)
    names = " and ".join(compared_names) or "no card, and no engine"
    verdict = (
        f"Healthy: {local_acceptance.mean_accepted + 1:.2f} tokens a round here, compared with "
        f"{names}."
    )
    if engine is not None and engine.incomparable_options:
        verdict += (
            f" Of {engine.engine} the prompts and the answers were compared, not the acceptance: "
            f"it has {engine.incomparable_options}, {engine.drafts_per_round:.1f} drafts a round "
            "here. To compare that too, start it with decoding.method=chain "
            f"decoding.budget={local.reference.block_size - 1}."
        )
    sentence = LONG_CONTEXT_ACCEPTANCE_CAUSE.detect(local)
    if sentence is None:
        return Diagnosis(True, verdict, evidence)
    verdict += f" But {LONG_CONTEXT_ACCEPTANCE_CAUSE.name}: {sentence}."
    advice = LONG_CONTEXT_ACCEPTANCE_CAUSE.folder_advice
    return Diagnosis(True, verdict, evidence, LONG_CONTEXT_ACCEPTANCE_CAUSE, advice)


def diagnose_comparison(
    comparison: AcceptanceComparison,
    replay_variations: Callable[[], list[VariationResult]],
    evidence: Evidence,
    names: dict[str, str],
) -> Diagnosis | None:
    """Return the diagnosis of one comparison, or None if the acceptance is as high as expected.

    replay_variations: replays all variations when it is first called
    names: values of the placeholders in the advice
    """

    def format_advice(cause: LowAcceptanceCause, label: str) -> str:
        advice = cause.folder_advice if comparison.engine is None else cause.engine_advice
        return advice.format(label, **names)

    local_tau = 1 + AcceptanceCounts.pool(comparison.local_acceptance).mean_accepted
    compared_tau = 1 + AcceptanceCounts.pool(comparison.compared_acceptance).mean_accepted
    summary = f"{local_tau:.2f} tokens a round here, {compared_tau:.2f} by its card"
    if comparison.engine is not None:
        name = comparison.engine.engine
        summary = f"{compared_tau:.2f} tokens a round at {name}, {local_tau:.2f} here"

    for cause in LOW_ACCEPTANCE_CAUSES:
        sentence = cause.detect(comparison)
        if sentence is not None:
            advice = format_advice(cause, "")
            return make_cause_diagnosis(cause, f"{sentence} ({summary})", evidence, advice)

    is_low = comparison.is_low
    if not is_low and comparison.relative_difference < MIN_RELATIVE_ACCEPTANCE_DIFFERENCE_TO_REPLAY:
        return None
    compared = comparison.compared_acceptance
    results = replay_variations()
    best = min(results, key=lambda result: count_difference(result.acceptance, compared))
    difference = max(1, count_difference(comparison.local_acceptance, compared))
    explained_share = 1 - count_difference(best.acceptance, compared) / difference
    all_evidence = evidence + list_evidence(results)
    min_share = (
        MIN_EXPLAINED_ACCEPTANCE_LOSS_SHARE if is_low else MIN_EXPLAINED_SHARE_AT_NORMAL_ACCEPTANCE
    )
    if explained_share >= min_share:
        label = best.variation.label
        verdict = f"{label} explains {100 * explained_share:.0f} % of {summary}"
        return make_cause_diagnosis(
            best.cause, verdict, all_evidence, format_advice(best.cause, label)
        )
    if not is_low:
        return None
    return Diagnosis(False, f"Low, and no known cause explains it: {summary}.", all_evidence)


def list_evidence(results: list[VariationResult]) -> Evidence:
    """Return (label, acceptance) of replayed variations."""
    evidence = []
    for result in results:
        label = f"{result.cause.name}: {result.variation.label}"
        evidence.append((label, AcceptanceCounts.pool(result.acceptance)))
    return evidence


def make_cause_diagnosis(
    cause: LowAcceptanceCause, verdict: str, evidence: Evidence, advice: str
) -> Diagnosis:
    """Return the diagnosis that names a known cause."""
    return Diagnosis(False, f"{cause.name.capitalize()}: {verdict}.", evidence, cause, advice)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the verdict, the evidence and the advice of a diagnosis as text."""
    width = EVIDENCE_LABEL_WIDTH + 1
    lines = [
        diagnosis.verdict,
        "",
        f"{'acceptance by position':<{width}}rounds  τ     1    2    3    4    5    6    7 ...",
    ]
    for label, counts in diagnosis.evidence:
        rates = " ".join(f"{100 * rate:3.0f}%" for rate in counts.acceptance_rates)
        label = f"{label[:EVIDENCE_LABEL_WIDTH]:<{width}}"
        lines.append(f"{label}{counts.rounds:6d}  {1 + counts.mean_accepted:4.2f} {rates}")
    if diagnosis.advice:
        lines += ["", f"What to do: {diagnosis.advice}"]
    return "\n".join(lines)
