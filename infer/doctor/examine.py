"""Diagnose why a drafter's acceptance (the number of accepted draft tokens per round) is low.

The acceptance in this process ("here") is compared with that on the drafter's model card, and with
that in another engine. If there is a difference, known causes (`infer.doctor.causes`) are tested.

Some causes are tested with variations: copies of the drafter with one changed setting.
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
    is_significantly_lower,
    sum_absolute_count_differences,
)
from infer.doctor.replay import compute_features_and_agreement, replay_chains
from infer.doctor.variations import DrafterVariation, list_feature_layers
from infer.drafters.base import Drafter
from infer.evaluation.results import AcceptanceCounts, AcceptanceReference
from infer.targets.target import Target

# Used if the acceptance is too low. A changed setting is named as the cause if it explains at least
# this share of the difference between the acceptance in this process and the compared acceptance
# (on the drafter's card or in the other engine).
MIN_EXPLAINED_ACCEPTANCE_LOSS_SHARE = 0.5
# Used if the acceptance is not too low, but differs from the compared acceptance (on the drafter's
# card or in the other engine). A changed setting is named as the cause if it explains at least this
# share of the difference.
MIN_EXPLAINED_SHARE_AT_NORMAL_ACCEPTANCE = 0.8
# Changed settings are tested if the acceptance is too low, or if its relative difference
# (`AcceptanceComparison.relative_count_difference`) is at least this value.
MIN_RELATIVE_ACCEPTANCE_DIFFERENCE_TO_REPLAY = 0.01
EVIDENCE_LABEL_WIDTH = 57

# The measurements of a diagnosis as pairs (label, acceptance). The label is for the user.
Evidence = list[tuple[str, AcceptanceCounts]]


class VariationResult(NamedTuple):
    """The acceptance of a variation (a copy of the drafter with one changed setting), and the cause
    that is tested with it."""

    cause: LowAcceptanceCause
    variation: DrafterVariation
    acceptance: list[AcceptanceCounts]  # one entry for each answer


@dataclass(frozen=True)
class Diagnosis:
    """Whether a drafter's acceptance is as expected, and if not, why.

    healthy: true if the acceptance is as high as expected
    verdict: one or more sentences for the user
    evidence: all measurements, with a label for each
    cause: the cause of low acceptance; None if the acceptance is not low or the cause is unknown
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
    """Compute a drafter's acceptance in this process, compare it with the acceptance on the
    drafter's card and in another engine, and return a diagnosis.

    reference: prompts and answers with which the acceptance is measured
    engine: the measurement of another engine; None if none was measured
    has_card: true if the reference is from the drafter's model card; false if it was just measured
        in this process
    checkpoint: the drafter's path, for commands in the advice
    """
    variations = list_variations(target, drafter)
    feature_layers = dict.fromkeys(list_feature_layers(drafter))
    for _, variation in variations:
        feature_layers |= dict.fromkeys(variation.feature_layers)
    prompts = [answer.prompt_ids for answer in reference.answers]
    answers = [answer.answer_ids for answer in reference.answers]
    states = compute_features_and_agreement(target, prompts, answers, list(feature_layers))
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
    """Return pairs (cause, variation): each known cause with each variation that tests it. A
    variation is a copy of the drafter with one changed setting."""
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
    """Diagnose a drafter without a model card. If one changed setting leads to many more accepted
    draft tokens, return a diagnosis that names this setting, else None.

    local_acceptance: acceptance of the drafter as it is. variation_results: acceptance with each
    changed setting. evidence: measurements to include in the diagnosis.
    """
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
        f"{label} gives {1 + acceptance.mean_accepted:.2f} tokens per round, and the unchanged "
        f"drafter {1 + local.mean_accepted:.2f}"
    )
    advice = best.cause.folder_advice.format(label)
    return make_cause_diagnosis(
        best.cause, verdict, evidence + list_variation_acceptances(variation_results), advice
    )


def make_healthy_diagnosis(
    local: AcceptanceComparison,
    compared_names: list[str],
    engine: EngineMeasurement | None,
    evidence: Evidence,
) -> Diagnosis:
    """Return the diagnosis for a drafter whose acceptance is as high as expected. If acceptance is
    low after long contexts, the diagnosis says so.

    local: a comparison that contains the acceptance in this process
    compared_names: names of the measurements with which this acceptance was compared, for the user
    engine: the measurement of another engine, or None
    """
    local_acceptance = AcceptanceCounts.pool(local.local_acceptance)
    names = " and ".join(compared_names) or "no card, and no engine"
    verdict = (
        f"Healthy: {local_acceptance.mean_accepted + 1:.2f} tokens per round here, compared with "
        f"{names}."
    )
    if engine is not None and engine.incomparable_options:
        verdict += (
            f" For {engine.engine}, the prompts and the answers were compared, not the acceptance: "
            f"it runs with {engine.incomparable_options} and drafts "
            f"{engine.draft_tokens_per_round:.1f} tokens per round. To compare the acceptance "
            "too, start the server with decoding.method=chain "
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
    """Find the cause of a difference between the acceptance in this process and the compared
    acceptance, on the drafter's card or in another engine. Return a diagnosis, or None if the
    acceptance is as high as expected.

    replay_variations: returns the acceptance of the drafter with each changed setting. It is a
        function because computing them takes long; the first call computes them
    evidence: measurements to include in the diagnosis
    names: keys and values of the placeholders {checkpoint} and {target} in the advice
    """

    def format_advice(cause: LowAcceptanceCause, label: str) -> str:
        advice = cause.folder_advice if comparison.engine is None else cause.engine_advice
        return advice.format(label, **names)

    local_tau = 1 + AcceptanceCounts.pool(comparison.local_acceptance).mean_accepted
    compared_tau = 1 + AcceptanceCounts.pool(comparison.compared_acceptance).mean_accepted
    summary = f"{local_tau:.2f} tokens per round here, {compared_tau:.2f} on its card"
    if comparison.engine is not None:
        name = comparison.engine.engine
        summary = f"{compared_tau:.2f} tokens per round in {name}, {local_tau:.2f} here"

    for cause in LOW_ACCEPTANCE_CAUSES:
        sentence = cause.detect(comparison)
        if sentence is not None:
            advice = format_advice(cause, "")
            return make_cause_diagnosis(cause, f"{sentence} ({summary})", evidence, advice)

    is_low = comparison.is_acceptance_low
    if (
        not is_low
        and comparison.relative_count_difference < MIN_RELATIVE_ACCEPTANCE_DIFFERENCE_TO_REPLAY
    ):
        return None
    compared = comparison.compared_acceptance
    results = replay_variations()
    best = min(
        results, key=lambda result: sum_absolute_count_differences(result.acceptance, compared)
    )
    difference = max(1, sum_absolute_count_differences(comparison.local_acceptance, compared))
    explained_share = 1 - sum_absolute_count_differences(best.acceptance, compared) / difference
    all_evidence = evidence + list_variation_acceptances(results)
    min_share = (
        MIN_EXPLAINED_ACCEPTANCE_LOSS_SHARE if is_low else MIN_EXPLAINED_SHARE_AT_NORMAL_ACCEPTANCE
    )
    if explained_share >= min_share:
        label = best.variation.label
        verdict = f"{label} explains {100 * explained_share:.0f} % of the difference ({summary})"
        return make_cause_diagnosis(
            best.cause, verdict, all_evidence, format_advice(best.cause, label)
        )
    if not is_low:
        return None
    return Diagnosis(False, f"Low, and no known cause explains it: {summary}.", all_evidence)


def list_variation_acceptances(results: list[VariationResult]) -> Evidence:
    """Return a pair (label, acceptance) for each tested variation, which is a copy of the drafter
    with one changed setting.
    """
    evidence = []
    for result in results:
        label = f"{result.cause.name}: {result.variation.label}"
        evidence.append((label, AcceptanceCounts.pool(result.acceptance)))
    return evidence


def make_cause_diagnosis(
    cause: LowAcceptanceCause, verdict: str, evidence: Evidence, advice: str
) -> Diagnosis:
    """Return a diagnosis of low acceptance that names a known cause.

    verdict: how the cause was found, as a sentence without a full stop. The function puts the name
        of the cause in front of it
    """
    return Diagnosis(False, f"{cause.name.capitalize()}: {verdict}.", evidence, cause, advice)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Format a diagnosis as text for the user: the verdict, a table of the measurements, and the
    advice."""
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
