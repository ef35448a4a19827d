"""Collects the text samples and the example of a decoding round that a report shows.

The text samples mark accepted and rejected draft tokens. Recording rejected draft tokens takes
time, so some prompts are decoded once more for the samples, after all times were measured.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from infer.api import open_engine
from infer.config import DecodeOptions
from infer.drafters.base import Drafter
from infer.engine.sequence import Sequence as DecodedSequence
from infer.evaluation.results import ExampleNode, ExampleRound, TextSample
from infer.targets.target import Target
from infer.trees.tree import DraftTree

MAX_ANSWER_SAMPLES_IN_REPORT = 3
MAX_EXAMPLE_TREE_NODES = 8  # with more nodes, a drawn tree would be hard to read
MAX_EXAMPLE_TREE_LEAVES = 5  # with more leaves, a drawn tree would not fit on a phone
MAX_REJECTED_TOKENS_IN_SAMPLE = 3  # a sample shows at most this many rejected tokens of a round
EXAMPLE_TREE_CONTEXT_CHARACTERS = 120

ReportSamples = tuple[list[TextSample], ExampleRound | None]


def decode_report_samples(
    target: Target, drafter: Drafter, sequences: Sequence[DecodedSequence], options: DecodeOptions
) -> ReportSamples:
    """Decode some sequences again, with trees that are small enough to be drawn.

    sequences: finished sequences that were decoded with `options`; the first ones are used

    Returns a text sample for each of these sequences, and the decoding round that a report shows as
    an example. The round is None if no tree was verified.
    """
    if target.tokenizer is None:
        return [], None
    options = replace(options, max_num_seqs=1, budget=min(options.budget, MAX_EXAMPLE_TREE_NODES))
    samples = []
    rounds = []
    trees = []
    for sequence in sequences[:MAX_ANSWER_SAMPLES_IN_REPORT]:
        capacity = len(sequence.prompt) + options.max_new_tokens
        engine = open_engine(target, drafter, options, capacity)

        def record_tree(proposal: object, build: Callable = engine.runner.build_tree) -> DraftTree:
            trees.append(build(proposal))
            return trees[-1]

        engine.runner.build_tree = record_tree
        traced = engine.submit(sequence.prompt, sequence.options)
        traced.records_rejected = True
        while engine.has_unfinished_sequences:
            engine.step()
            if trees:
                rounds.append(build_example_round(target, trees.pop(), traced))
        samples.append(build_sample(target, traced))
    return samples, max(rounds, key=rank_example_round, default=None)


def build_sample(target: Target, sequence: DecodedSequence) -> TextSample:
    """Cut the output of a sequence into pieces of text, see `TextSample`.

    The first piece is the token that the prefill generated. Each round then has up to three pieces:
    the accepted draft tokens, the rejected draft tokens, and the target's own token, which follows
    the accepted ones.
    """
    tokenizer: Any = target.tokenizer
    decode_prompts = tokenizer.decode
    pieces = []
    start = 0
    for i, count in enumerate(sequence.commits):
        ids = sequence.ids[start : start + count]
        rejected = []
        if i > 0 and sequence.rejected:
            rejected = sequence.rejected[i - 1][:MAX_REJECTED_TOKENS_IN_SAMPLE]
        if ids[:-1]:
            pieces.append([decode_prompts(ids[:-1]), "accepted"])
        if rejected:
            pieces.append([decode_prompts(rejected), "rejected"])
        pieces.append([decode_prompts(ids[-1:]), "corrected" if rejected else "bonus"])
        start += count
    return TextSample(
        decode_prompts(sequence.prompt), decode_prompts(sequence.ids), sequence.commits, pieces
    )


def build_example_round(target: Target, tree: DraftTree, sequence: DecodedSequence) -> ExampleRound:
    """Return the round that a sequence has just finished, in the form in which reports show it.

    tree: the draft tree that the round verified
    """
    tokens = tree.tokens[0].tolist()
    parents = tree.parents[0].tolist()
    log_probs = tree.log_probs[0].tolist()
    committed = sequence.ids[-sequence.commits[-1] :]

    # Find the accepted nodes by following the committed tokens from the root.
    node = 0
    accepted = {0}
    for token in committed[:-1]:
        node = next(
            i for i in range(node + 1, len(tokens)) if parents[i] == node and tokens[i] == token
        )
        accepted.add(node)

    tokenizer: Any = target.tokenizer
    decode_prompts = tokenizer.decode
    nodes = []
    for i, parent in enumerate(parents):
        probability = math.exp(log_probs[i] - log_probs[parent])
        nodes.append(ExampleNode(decode_prompts([tokens[i]]), parent, probability, i in accepted))
    prefix = decode_prompts((sequence.prompt + sequence.ids)[: -len(committed) - 1])
    return ExampleRound(
        prefix[-EXAMPLE_TREE_CONTEXT_CHARACTERS:], nodes, decode_prompts(committed[-1:])
    )


def rank_example_round(example: ExampleRound) -> tuple[bool, int]:
    """Return a sort key for rounds. The round with the highest key is the best example.

    The key is (whether the tree has few enough leaves to be drawn, number of accepted nodes).
    """
    nodes = example.nodes
    parents = {node.parent for node in nodes[1:]}
    leaves = len(nodes) - len(parents)
    return leaves <= MAX_EXAMPLE_TREE_LEAVES, sum(node.accepted for node in nodes)
