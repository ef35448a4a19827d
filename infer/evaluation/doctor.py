"""Why a drafter's acceptance is low: what its card says, what we reach with it, what an engine reaches, and which of
the known causes (`infer.evaluation.causes`) explains the difference.
"""

from dataclasses import dataclass

from infer.drafters.base import Drafter
from infer.evaluation.causes import CAUSES, Case, Cause, Served, Trial, all_taps, all_trials, difference, taps_of
from infer.evaluation.replay import Material, compute, replay
from infer.evaluation.results import Acceptance, Reference
from infer.targets.target import Target

EXPLAINS = 0.5  # share of a difference from which on a trial is called its cause
EXACTLY = 0.8  # the same where acceptance is not low: what is read otherwise and costs little
APART = 0.01  # of the rounds and accepted drafts, from which on it is tried what is read otherwise
MORE = 1.25  # times the drafts accepted, from which on another reading is better than the folder's, where no card tells


@dataclass(frozen=True)
class Evidence:
    """A row of the evidence."""

    what: str
    acceptance: Acceptance
    explains: float | None = None  # of the difference, for a trial


@dataclass(frozen=True)
class Diagnosis:
    """What was found. `cause`: None for a healthy pair, or where no known cause explains it."""

    healthy: bool
    verdict: str
    evidence: list[Evidence]
    cause: Cause | None = None
    mend: str | None = None


def examine(
    target: Target,
    drafter: Drafter,
    reference: Reference,
    served: Served | None = None,
    carded: bool = True,
    checkpoint: str = "<drafter>",
) -> Diagnosis:
    """Compare what a card says (`carded`: the reference is one; else it was measured just now, with this drafter), what
    the drafter reaches here, and what an engine reaches."""
    tried = all_trials(target, drafter)
    prompts, answers = [text.prompt for text in reference.texts], [text.ids for text in reference.texts]
    material = compute(target, prompts, answers, all_taps(tried, drafter))
    margin = reference.block_size - 1
    ours = replay(target, drafter, material, taps_of(drafter), margin)
    here = Acceptance.of_all(ours)
    rows = [Evidence("its card", reference.acceptance)] if carded else []
    rows.append(Evidence("here, as the folder says", here))
    cases = [Case(target, drafter, reference, material, ours, reference.by_text)] if carded else []
    if served is not None:
        rows.append(Evidence(f"{served.engine}", served.acceptance))
        cases.append(Case(target, drafter, reference, material, ours, served.by_text, served))
    names = {"checkpoint": checkpoint, "target": target.name}
    for case in cases:
        if found := diagnose(case, tried, rows, names):
            return found
    if not carded and (found := find_better(target, drafter, material, here, tried, rows, names)):
        return found
    others = ["its card"] * carded + ([] if served is None else [served.engine])
    compared = " and ".join(others) or "no card, and no engine"
    return Diagnosis(True, f"Healthy: {here.mean + 1:.2f} tokens a round here, compared with {compared}.", rows)


def diagnose(
    case: Case, tried: list[tuple[Cause, Trial]], rows: list[Evidence], names: dict[str, str]
) -> Diagnosis | None:
    """Return what is wrong in a comparison, None where nothing is."""
    where = "in this folder" if case.served is None else f"at {case.served.engine}"
    side = 0 if case.served is None else 1
    here, there = 1 + Acceptance.of_all(case.ours).mean, 1 + Acceptance.of_all(case.goal).mean
    short = f"{there:.2f} tokens a round {where}, {here:.2f} here"
    if case.served is None:
        short = f"{here:.2f} tokens a round here, {there:.2f} by its card"
    for cause in CAUSES:
        if (case.low or cause.counts_always) and (seen := cause.shows(case)):
            verdict = f"{cause.name.capitalize()}: {seen} ({short})."
            return Diagnosis(False, verdict, rows, cause, in_words(cause.mend[side], "", names))
    low = case.low
    if not low and case.apart < APART:
        return None
    scored = []
    for cause, trial in tried:
        found = replay(case.target, trial.drafter, case.material, trial.taps, case.reference.block_size - 1)
        scored.append((explained(case, found), cause, trial, Acceptance.of_all(found)))
    scored.sort(key=lambda row: -row[0])
    rows = rows + [Evidence(f"{cause.name}: {trial.label}", found, score) for score, cause, trial, found in scored]
    if not scored or scored[0][0] < (EXPLAINS if low else EXACTLY):
        if not low:
            return None
        return Diagnosis(False, f"Low, and no known cause explains it: {short}.", rows)
    score, cause, trial, _ = scored[0]
    verdict = f"{cause.name.capitalize()}: {trial.label} explains {100 * score:.0f} % of {short}."
    return Diagnosis(False, verdict, rows, cause, in_words(cause.mend[side], trial.label, names))


def find_better(
    target: Target,
    drafter: Drafter,
    material: Material,
    ours: Acceptance,
    tried: list[tuple[Cause, Trial]],
    rows: list[Evidence],
    names: dict[str, str],
) -> Diagnosis | None:
    """Without a card: return which other reading of the folder is accepted far more often, if any is."""
    margin, most, best = drafter.block_size - 1, MORE * ours.mean, None
    for cause, trial in tried:
        found = Acceptance.of_all(replay(target, trial.drafter, material, trial.taps, margin))
        rows = [*rows, Evidence(f"{cause.name}: {trial.label}", found)]
        if found.mean > most:
            most, best = found.mean, (cause, trial)
    if best is None:
        return None
    cause, trial = best
    verdict = (
        f"{cause.name.capitalize()}: {trial.label} gives {1 + most:.2f} tokens a round, {1 + ours.mean:.2f} as it is."
    )
    return Diagnosis(False, verdict, rows, cause, in_words(cause.mend[0], trial.label, names))


def explained(case: Case, found: list[Acceptance]) -> float:
    """Return the share of the difference between ours and the goal that a trial explains."""
    return 1 - difference(found, case.goal) / max(1, difference(case.ours, case.goal))


def in_words(mend: str, label: str, names: dict[str, str]) -> str:
    """Return what to do, with the trial's label and the pair's names."""
    return mend.format(label, **names)


def report(diagnosis: Diagnosis) -> str:
    """Return the verdict, the evidence, and what to do, as text."""
    lines = [diagnosis.verdict, "", f"{'acceptance by position':<58}rounds  τ     1    2    3    4    5    6    7 ..."]
    for row in diagnosis.evidence:
        shares = " ".join(f"{100 * share:3.0f}%" for share in row.acceptance.shares)
        score = "" if row.explains is None else f"  explains {100 * max(0.0, row.explains):.0f} %"
        lines.append(f"{row.what[:57]:<58}{row.acceptance.rounds:6d}  {1 + row.acceptance.mean:4.2f} {shares}{score}")
    return "\n".join(lines + (["", f"What to do: {diagnosis.mend}"] if diagnosis.mend else []))
