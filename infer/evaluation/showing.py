"""What a report shows of the texts themselves: samples with what became of every draft, and one
round as an example.

Texts are decoded once more for it, after everything is timed, because noting drafts takes time.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from infer.api import open_engine
from infer.config import DecodeOptions
from infer.drafters.base import Drafter
from infer.engine.sequence import Sequence as Text
from infer.evaluation.results import ExampleRound, RoundNode, TextSample
from infer.targets.target import Target
from infer.trees.tree import DraftTree

SAMPLES = 3  # texts that are shown
ROUND_NODES = 8  # of the example: more make no picture
MOST_LEAVES = 5  # of its tree: more fit no phone
REJECTED = 3  # tokens of a rejected draft that a sample shows at most

Shown = tuple[
    list[TextSample], ExampleRound | None
]  # of an evaluation's texts: samples, and an example


def show_texts(
    target: Target, drafter: Drafter, texts: Sequence[Text], options: DecodeOptions
) -> Shown:
    """Decode the first texts again, which `options` wrote, by trees that can be drawn, with what
    was rejected; look for an example among their rounds."""
    if target.tokenizer is None:
        return [], None
    options = replace(options, max_num_seqs=1, budget=min(options.budget, ROUND_NODES))
    samples = []
    rounds = []
    trees = []
    for text in texts[:SAMPLES]:
        engine = open_engine(target, drafter, options, len(text.prompt) + options.max_new_tokens)

        def keep(proposal: object, build: Callable = engine.runner.build) -> DraftTree:
            trees.append(build(proposal))
            return trees[-1]

        engine.runner.build = keep
        again = engine.submit(text.prompt, text.options)
        again.trace = True
        while engine.busy:
            engine.step()
            if trees:
                rounds.append(last_round(target, trees.pop(), again))
        samples.append(sample(target, again))
    return samples, max(rounds, key=shows, default=None)


def sample(target: Target, text: Text) -> TextSample:
    """Cut a decoded text into pieces: the prefill's first token, then of each round the drafts that
    were accepted, what was rejected behind them, and the target's own token: a correction, or where
    nothing was rejected, a bonus."""
    decode = target.tokenizer.decode
    pieces = []
    at = 0
    for round, count in enumerate(text.commits):
        ids = text.ids[at : at + count]
        rejected = text.rejected[round - 1][:REJECTED] if round and text.rejected else []
        if ids[:-1]:
            pieces.append([decode(ids[:-1]), "accepted"])
        if rejected:
            pieces.append([decode(rejected), "rejected"])
        pieces.append([decode(ids[-1:]), "corrected" if rejected else "bonus"])
        at += count
    return TextSample(decode(text.prompt), decode(text.ids), text.commits, pieces)


def last_round(target: Target, tree: DraftTree, text: Text) -> ExampleRound:
    """Return the last round of a text, which verified this tree."""
    tokens, parents, logs = (
        side[0].tolist() for side in (tree.tokens, tree.parents, tree.log_probs)
    )
    committed = text.ids[-text.commits[-1] :]
    node = 0
    accepted = {0}
    for token in committed[:-1]:
        node = next(
            i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token
        )
        accepted.add(node)
    decode = target.tokenizer.decode
    nodes = [
        RoundNode(
            decode([tokens[i]]), parents[i], math.exp(logs[i] - logs[parents[i]]), i in accepted
        )
        for i in range(len(tokens))
    ]
    before = decode((text.prompt + text.ids)[: -len(committed) - 1])
    return ExampleRound(before[-120:], nodes, decode(committed[-1:]))


def shows(example: ExampleRound) -> tuple[bool, int]:
    """Return how much a round shows: whether its leaves are few enough to be drawn, and how many
    drafts were accepted."""
    nodes = example.nodes
    leaves = len(nodes) - len({node.parent for node in nodes[1:]})
    return leaves <= MOST_LEAVES, sum(node.accepted for node in nodes)
