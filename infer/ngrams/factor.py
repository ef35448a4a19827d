"""What n-grams say about a step of a tree, compiled for the CPU: marginals of different positions
are independent, n-grams count which token follows which (DART section 4).

A token's probability is multiplied by its n-gram probability behind the path, and the products are
normalised over the candidates, to the probability that these have together. A step is at most 0 in
log space, so that scores fall along a path and DDTree's search finds the best prefixes exactly, as
with marginals alone. What the text itself says so far (`recall`) corrects what the corpus says: a
text repeats its own names and turns of phrase.

L drafted positions, K tokens a position, N drafted nodes, O order of the n-gram model, T tokens of
text.

When a path grows by a token, each of its suffixes moves to a child in the trie. So a path carries
the nodes of its O - 1 suffixes (`suffixes[k]`: the node of the last k + 1 tokens, -1 if they were
never seen), and a step is one lookup among the children of each: no context is searched for from
the root of the trie.

Arrays are copied in loops, number by number: assignments to slices double the time that compiling
takes. Callers hand over contiguous arrays of the same types, so that every search is compiled once.
"""

from typing import NamedTuple

import numpy as np

from infer.ngrams.model import Arrays, begin, children, extend, token_of, unigrams
from infer.utils.jit import njit

EPSILON = 1e-5  # added to probabilities, so that unseen tokens have a score
MORE = 16  # candidates behind a path that n-grams add to those the drafter lists
FOLLOWERS = 64  # children of a node in the trie at most: behind what has more, anything may come
REACH = 8  # tokens: the longest end of a path that is looked for earlier in the text
LOWEST = (
    -1e30
)  # log-probability of a token that a sampling filter forbids: below all others, and finite


class Guide(NamedTuple):
    """What a search with n-grams chooses from, for a row, and what it knows of the nodes that it
    opened."""

    arrays: Arrays
    total: int  # tokens that the n-gram model counted
    weight: float  # of n-gram probabilities: their power
    vocabulary: int  # the target's
    before: int  # R: 1, or K where the token before counts
    text: np.ndarray  # (T,) int64, the bonus token included
    tokens: np.ndarray  # (L, K) int64, ascending in each position
    places: np.ndarray  # (L, K) int64: where these stand below
    # (1 + (L - 1) R, K) float32: log q of the first position's tokens, and of the others' behind it
    table: np.ndarray
    alone: (
        np.ndarray
    )  # (L, V) float32: log q of every token by itself; (L, 1): of all that are not listed
    # (N, K + MORE) int64: the places of a node's candidates, -1 for those that n-grams added
    listed: np.ndarray
    suffixes: np.ndarray  # (N, O - 1) int64
    grown: np.ndarray  # (N, O, K + MORE) int64: suffixes behind each of a node's candidates
    recent: np.ndarray  # (N, REACH) int64, a node's last tokens: `newest`


@njit
def newest(context, recent):
    """Fill recent (REACH,) with the last tokens of context (C,) int64, the newest first, -1 where
    it is too short."""
    for k in range(len(recent)):
        recent[k] = context[len(context) - 1 - k] if k < len(context) else -1


@njit
def meet(text, recent, ends, lengths):
    """Find a path's last tokens, recent (REACH,) as `newest` has them, earlier in the text (T,)
    int64: fill ends (T,) with where the last one stands, from the end of the text on, and lengths
        (T,) with
    how many stand there; return how many places there are."""
    count = 0
    for at in range(len(text) - 2, -1, -1):
        if text[at] != recent[0]:
            continue
        length = 1
        while length < min(len(recent), at + 1) and text[at - length] == recent[length]:
            length += 1
        ends[count], lengths[count] = at, length
        count += 1
    return count


@njit
def recall(text, ends, lengths, count, tokens, probabilities):
    """Correct probabilities (K,) of tokens (K,) int64, ascending, by what followed the path's last
    tokens earlier in the text, at the `count` places that `meet` found.

    Prediction by partial matching (Cleary and Witten 1984): from the last token alone to the last
    REACH, p becomes (times the token followed + p) / (times they came + 1)."""
    came = np.zeros(REACH)
    followed = np.zeros((REACH, len(tokens)))
    for place in range(count):
        after = text[ends[place] + 1]
        i = np.searchsorted(tokens, after)
        hit = i < len(tokens) and tokens[i] == after
        for k in range(lengths[place]):
            came[k] += 1
            if hit:
                followed[k, i] += 1
    for k in range(REACH):
        if came[k] == 0:
            break
        for i in range(len(tokens)):
            probabilities[i] = (followed[k, i] + probabilities[i]) / (came[k] + 1)


@njit
def insert(token, tokens, places, count):
    """Insert a token among the first `count` of tokens, ascending, unless it is there, with the
    place
    -1; return how many there are."""
    at = np.searchsorted(tokens[:count], token)
    if at < count and tokens[at] == token:
        return count
    for i in range(count, at, -1):
        tokens[i], places[i] = tokens[i - 1], places[i - 1]
    tokens[at], places[at] = token, -1
    return count + 1


@njit
def widen(arrays, suffixes, vocabulary, text, ends, met, tokens, places, listed):
    """Insert into tokens and places (K + MORE,), whose first `listed` are a position's candidates,
    up to MORE tokens below `vocabulary` that the drafter did not list and that followed the path:
    in the text, at the `met` places of `ends`, the latest first, then in the corpus, behind the
    longest of its suffixes with few followers. Return how many there are."""
    count = listed
    most = len(tokens)
    for place in range(met):
        token = text[ends[place] + 1]
        if count == most:
            return count
        if 0 <= token < vocabulary:
            count = insert(token, tokens, places, count)
    for k in range(len(suffixes) - 1, -1, -1):
        first, last = children(arrays, suffixes[k])
        if last - first > FOLLOWERS:
            return count
        for child in range(first, last):
            if count == most:
                return count
            token = token_of(arrays, child)
            if token < vocabulary:
                count = insert(token, tokens, places, count)
    return count


@njit
def judge(log_q, probabilities, weight):
    """Add n-gram log-probabilities times `weight` to log_q (K,), at least LOWEST, and take off what
    leaves the candidates together the probability that they have under q. All of it is finite, even
    where none of them may be chosen."""
    highest = -np.inf
    judged = 0.0
    drafted = 0.0
    for i in range(len(log_q)):
        drafted += np.exp(log_q[i])
        log_q[i] += max(weight * np.log(probabilities[i] + EPSILON), LOWEST)
        highest = max(highest, log_q[i])
    for i in range(len(log_q)):
        judged += np.exp(log_q[i] - highest)
    norm = highest + np.log(judged) - (min(np.log(drafted), 0.0) if drafted > 0 else LOWEST)
    for i in range(len(log_q)):
        log_q[i] = min(log_q[i] - norm, 0.0)


@njit
def row_of(level, before, which):
    """Return where a table (1 + (L - 1) before, K) has a level's tokens behind candidate `which` of
    the one before."""
    return max(0, 1 + (level - 1) * before + min(which, before - 1))


@njit
def drafted(guide, level, which, tokens, places, log_q):
    """Fill log_q (K,) with the drafter's log-probabilities of a position's tokens (K,), those
    listed at their places, behind the candidate `which` of the position before it, -1 where that
    was not listed."""
    known = level == 0 or which >= 0 or guide.before == 1
    for i in range(len(tokens)):
        value = guide.alone[level, max(0, min(tokens[i], guide.alone.shape[1] - 1))]
        if places[i] >= 0 and known:
            value = guide.table[row_of(level, guide.before, max(which, 0)), places[i]]
        log_q[i] = value if value > LOWEST else LOWEST  # NaN is not above it


@njit
def judge_children(guide, node, level, parent, which, log_q, tokens):
    """Open a node of this level, child `which` of its parent: fill its rows of tokens (N, K + MORE)
    with its candidates, ascending, and of log_q (N, K + MORE) float64 with their steps, NaN behind
    the last."""
    text = guide.text
    places = guide.listed[node]
    suffixes = guide.suffixes[node]
    recent = guide.recent[node]
    listed = guide.tokens.shape[1]
    before = -1
    if level == 0:
        begin(guide.arrays, text, suffixes)
        newest(text, recent)
    else:
        before = guide.listed[parent, which]
        for k in range(len(suffixes)):
            suffixes[k] = guide.grown[parent, k, which]
        recent[0] = tokens[parent, which]
        for k in range(1, REACH):
            recent[k] = guide.recent[parent, k - 1]
    for i in range(listed):
        tokens[node, i], places[i] = guide.tokens[level, i], guide.places[level, i]
    probabilities = np.empty(len(places))
    shares = np.empty(len(places))
    ends = np.empty(len(text), np.int64)
    lengths = np.empty(len(text), np.int64)
    met = meet(text, recent, ends, lengths)
    count = widen(
        guide.arrays, suffixes, guide.vocabulary, text, ends, met, tokens[node], places, listed
    )
    given = tokens[node, :count]
    unigrams(guide.arrays, guide.total, given, shares)
    extend(guide.arrays, suffixes, given, shares, guide.grown[node], probabilities)
    recall(text, ends, lengths, met, given, probabilities)
    drafted(guide, level, before, given, places, log_q[node])
    judge(log_q[node, :count], probabilities, guide.weight)
    for i in range(count, len(places)):
        log_q[node, i] = np.nan
