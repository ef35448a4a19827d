"""Searches for trees that an n-gram model judges, compiled for the CPU: marginals of different positions are
independent, n-grams count which token follows which (DART section 4). Two searches over the same lookups:

- `beam`: DART's algorithm 1, scores as in its appendix D; what the appendix leaves open is the caller's choice;
- `best_first`: DDTree's algorithm 1 on scores that depend on the path. A token's probability is multiplied by its
  n-gram probability behind the path, and the products are normalised over the position's K likeliest tokens, to the
  probability that these have together. A step is at most 0 in log space, so that scores fall along a path and the best
  prefixes are found exactly, as with marginals alone. What the text itself says so far (`recall`) corrects what the
  corpus says: a text repeats its own names and turns of phrase.

L drafted positions, K tokens a position, M nodes with the root, O order of the n-gram model.

When a path grows by a token, each of its suffixes moves to a child in the trie. So a path carries the nodes of its
O - 1 suffixes (`suffixes[k]`: the node of the last k + 1 tokens, -1 if they were never seen), and a step is one lookup
among the children of each: no context is searched for from the root of the trie.

Arrays are copied in loops, number by number: assignments to slices double the time that compiling takes. Callers hand
over contiguous arrays of the same types, so that every search is compiled once.
"""

from typing import NamedTuple

import numpy as np

from infer.ngrams.model import children, count_of, find, find_children, token_of
from infer.utils.jit import njit

EPSILON = 1e-5  # of the best-first search: added to probabilities, so that unseen tokens have a score
LOGIT_DECAY, NGRAM_WEIGHT, LEVEL_POWER = 0.9, 0.5, -0.7  # DART appendix D
MORE = 16  # candidates behind a path that n-grams add to those the drafter lists
FOLLOWERS = 64  # children of a node in the trie at most: behind what has more, anything may come
REACH = 8  # tokens: the longest end of a path that is looked for earlier in the text
LOWEST = -1e30  # log-probability of a token that a sampling filter forbids: below all others, and finite
ENDED = 1e6  # more than any score: a prefix that ends its text is extended after all others


class Candidates(NamedTuple):
    """The tokens that a row's positions choose from, ascending in each position: (L, K) each."""

    tokens: np.ndarray  # int64
    log_q: np.ndarray  # float64 and finite: log-probabilities under the drafter
    unigrams: np.ndarray  # float64: Pr(token) where it was never seen behind any suffix of the path


class Judged(NamedTuple):
    """What DART's algorithm 1 needs besides these candidates: (L, K) each."""

    q: np.ndarray  # float64: the drafter's probabilities, as scores count them
    ends: np.ndarray  # bool: whether the token ends a text


class Table(NamedTuple):
    """What the best-first search chooses from, for a row."""

    tokens: np.ndarray  # (L, K) int64
    first: np.ndarray  # (K,) float32: log q of the first position's tokens
    steps: np.ndarray  # (L - 1, R, K) float32: of the others', behind each of the position before (R = K), or any (1)
    alone: np.ndarray  # (L, V) float32: log q of every token by itself; (L, 1): of all that are not listed


@njit
def begin(arrays, context, suffixes):
    """Fill suffixes (O - 1,) int64 for a text that ends in context (C,) int64."""
    for k in range(len(suffixes)):
        start = len(context) - 1 - k
        suffixes[k] = find(arrays, context, start, len(context)) if start >= 0 else -1


@njit
def unigrams(arrays, total, tokens, out):
    """Fill out (K,) with the unigram probabilities of tokens (K,) int64."""
    for i in range(len(tokens)):
        out[i] = count_of(arrays, find(arrays, tokens, i, i + 1)) / max(total, 1)


@njit
def ascend(given, tokens, places):
    """Fill tokens (K,) with the given ones (K,) in ascending order, and places (K,) with where they stood."""
    for i in range(len(given)):
        hole = i
        while hole > 0 and tokens[hole - 1] > given[i]:
            tokens[hole], places[hole] = tokens[hole - 1], places[hole - 1]
            hole -= 1
        tokens[hole], places[hole] = given[i], i


@njit
def extend(arrays, suffixes, tokens, alone, grown, probabilities):
    """Extend a path by one step: fill probabilities (K,) with Pr(token | path) of tokens (K,) int64, ascending, as
    `NGram.probabilities` has it, and grown (O, K) with the suffixes of the path behind each of them, and in its last
    row with the n-grams of order O that end there; `alone` (K,) are their `unigrams`."""
    for i in range(len(tokens)):
        probabilities[i] = alone[i]
        grown[0, i] = tokens[i] if tokens[i] < arrays.vocabulary else -1
    for k in range(len(suffixes)):  # a longer context overrides a shorter one
        found = grown[k + 1]
        if find_children(arrays, suffixes[k], tokens, found) == 0:
            continue
        context = count_of(arrays, suffixes[k])
        for i in range(len(tokens)):
            if found[i] >= 0 and context > 0:
                count = count_of(arrays, found[i])
                if count > 0:
                    probabilities[i] = count / context


@njit
def newest(context, recent):
    """Fill recent (REACH,) with the last tokens of context (C,) int64, the newest first, -1 where it is too short."""
    for k in range(len(recent)):
        recent[k] = context[len(context) - 1 - k] if k < len(context) else -1


@njit
def meet(text, recent, ends, lengths):
    """Find a path's last tokens, recent (REACH,) as `newest` has them, earlier in the text (T,) int64: fill ends (T,)
    with where the last one stands, from the end of the text on, and lengths (T,) with how many stand there; return how
    many places there are."""
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
    """Correct probabilities (K,) of tokens (K,) int64, ascending, by what followed the path's last tokens earlier in
    the text, at the `count` places that `meet` found.

    Prediction by partial matching (Cleary and Witten 1984): from the last token alone to the last REACH, p becomes
    (times the token followed + p) / (times they came + 1)."""
    came, followed = np.zeros(REACH), np.zeros((REACH, len(tokens)))
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
    """Insert a token among the first `count` of tokens, ascending, unless it is there, with the place -1; return how
    many there are."""
    at = np.searchsorted(tokens[:count], token)
    if at < count and tokens[at] == token:
        return count
    for i in range(count, at, -1):
        tokens[i], places[i] = tokens[i - 1], places[i - 1]
    tokens[at], places[at] = token, -1
    return count + 1


@njit
def widen(arrays, suffixes, vocabulary, text, ends, met, tokens, places, listed):
    """Insert into tokens and places (K + MORE,), whose first `listed` are a position's candidates, up to MORE tokens
    below `vocabulary` that the drafter did not list and that followed the path: in the text, at the `met` places of
    `ends`, the latest first, then in the corpus, behind the longest of its suffixes with few followers. Return how many
    there are."""
    count, most = listed, len(tokens)
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
def _worse(score, index, other_score, other_index):
    """Return whether an entry ranks below another one: by score, then by index."""
    return score < other_score or (score == other_score and index > other_index)


@njit
def _best(scores, first, last, chosen):
    """Fill chosen (C,) with the best indices of scores[first:last], best first, the earlier of equal ones; return how
    many there are. Keeps a heap of the best so far, the worst of them on top, so that most entries cost one
    comparison."""
    size = 0
    for index in range(first, last):
        if size < len(chosen):
            hole = size
            size += 1
            while hole > 0:
                above = (hole - 1) // 2
                if not _worse(scores[index], index, scores[chosen[above]], chosen[above]):
                    break
                chosen[hole] = chosen[above]
                hole = above
            chosen[hole] = index
        elif _worse(scores[chosen[0]], chosen[0], scores[index], index):
            _sift(scores, chosen, size, index)
    for left in range(size - 1, 0, -1):  # heap sort: the worst goes last
        worst, moving = chosen[0], chosen[left]
        _sift(scores, chosen, left, moving)
        chosen[left] = worst
    return size


@njit
def _sift(scores, heap, size, moving):
    """Replace the top of the heap by `moving`."""
    hole = 0
    while True:
        child = 2 * hole + 1
        if child >= size:
            break
        other = child + 1
        if other < size and _worse(scores[heap[other]], heap[other], scores[heap[child]], heap[child]):
            child = other
        if not _worse(scores[heap[child]], heap[child], scores[moving], moving):
            break
        heap[hole] = heap[child]
        hole = child
    heap[hole] = moving


@njit
def beam(arrays, order, epsilon, candidates, judged, context, width, nodes, log_probs):
    """Run DART algorithm 1 for one row: `Candidates` and `Judged`, a context (C,) int64 that ends with the bonus token,
    the beam's width. Fills nodes (3, M - 1), that is tokens, parents and depths, best first, and log_probs (M - 1,) of
    their prefixes under the drafter alone; return how many there are.

    As in the authors' code: the first position is judged by the drafter alone, and a prefix that ends its text is
    extended only where others are lacking. A step is at most 0, which rounding could exceed: no child before its
    parent."""
    tokens, log_q, alone = candidates
    length, ranks = tokens.shape
    budget, longest = nodes.shape[1], max(order - 1, 1)
    most = ranks + (length - 1) * width * ranks
    score, hopes, drafted = np.empty(most), np.empty(most), np.empty(most)
    token, parent, depth = np.empty(most, np.int64), np.empty(most, np.int64), np.empty(most, np.int64)
    active, of_active = np.empty(width, np.int64), np.empty((width, longest), np.int64)
    chosen = np.empty(width, np.int64)
    grown = np.empty((width, longest + 1, ranks), np.int64)
    probabilities, of_logit = np.empty(ranks), np.empty(ranks)
    unseen = np.log(epsilon)
    active[0], count = -1, 1
    begin(arrays, context, of_active[0])
    size = 0
    for level in range(length):
        level_weight, first = (level + 1.0) ** LEVEL_POWER, size
        for i in range(ranks):
            of_logit[i] = LOGIT_DECAY**level * np.log(judged.q[level, i] + epsilon)
        for b in range(count):
            extend(arrays, of_active[b], tokens[level], alone[level], grown[b], probabilities)
            above = active[b]
            for i in range(ranks):
                step = of_logit[i]
                if level > 0:
                    step += NGRAM_WEIGHT * (np.log(probabilities[i] + epsilon) if probabilities[i] else unseen)
                score[size] = min(step * level_weight, 0.0) + (score[above] if above >= 0 else 0.0)
                hopes[size] = score[size] - (ENDED if judged.ends[level, i] else 0.0)
                drafted[size] = log_q[level, i] + (drafted[above] if above >= 0 else 0.0)
                token[size], parent[size], depth[size] = tokens[level, i], above, level + 1
                size += 1
        count = _best(hopes, first, size, chosen)
        for b in range(count):
            before, i = divmod(chosen[b] - first, ranks)
            active[b] = chosen[b]
            for k in range(longest):
                of_active[b, k] = grown[before, k, i]
    kept = np.empty(budget, np.int64)
    count = _best(score, 0, size, kept)
    place = np.zeros(size, np.int64)
    for node in range(count):
        at = kept[node]
        place[at] = node + 1
        nodes[0, node], nodes[2, node], log_probs[node] = token[at], depth[at], drafted[at]
        nodes[1, node] = place[parent[at]] if parent[at] >= 0 else 0
    return count


@njit
def judge(log_q, probabilities, weight, step):
    """Fill step (K,) with log q (K,), at least LOWEST, plus n-gram log-probabilities times `weight`; return what to
    take off so that the candidates together keep the probability that they have under q. All of it is finite, even
    where none of them may be chosen."""
    highest, judged, drafted = -np.inf, 0.0, 0.0
    for i in range(len(step)):
        step[i] = log_q[i] + max(weight * np.log(probabilities[i] + EPSILON), LOWEST)
        highest = max(highest, step[i])
    for i in range(len(step)):
        judged += np.exp(step[i] - highest)
        drafted += np.exp(log_q[i])
    return highest + np.log(judged) - (min(np.log(drafted), 0.0) if drafted > 0 else LOWEST)


@njit
def judge_level(arrays, weight, text, tokens, alone, log_q, suffixes, recent, grown):
    """Judge the candidates tokens (K,) behind P paths with `suffixes` (P, O - 1) and `recent` tokens (P, REACH) in a
    text (T,): change log_q (P, K), float64, in place, and fill grown (P, O, K) as `extend` does."""
    probabilities, step = np.empty(len(tokens)), np.empty(len(tokens))
    ends, lengths = np.empty(len(text), np.int64), np.empty(len(text), np.int64)
    for p in range(len(log_q)):
        extend(arrays, suffixes[p], tokens, alone, grown[p], probabilities)
        recall(text, ends, lengths, meet(text, recent[p], ends, lengths), tokens, probabilities)
        norm = judge(log_q[p], probabilities, weight, step)
        for i in range(len(tokens)):
            log_q[p, i] = min(step[i] - norm, 0.0)


@njit
def drafted(table, level, before, tokens, places, log_q):
    """Fill log_q (K,) with the drafter's log-probabilities of a position's tokens (K,), those listed at their places,
    behind the candidate `before` of the position before it, -1 where that was not listed."""
    for i in range(len(tokens)):
        value = table.alone[level, max(0, min(tokens[i], table.alone.shape[1] - 1))]
        if places[i] >= 0 and level == 0:
            value = table.first[places[i]]
        elif places[i] >= 0 and (before >= 0 or table.steps.shape[1] == 1):
            value = table.steps[level - 1, before if table.steps.shape[1] > 1 else 0, places[i]]
        log_q[i] = value if value > LOWEST else LOWEST  # NaN is not above it


@njit
def best_waiting(waiting, taken, counts, nodes):
    """Return which of the first `nodes` nodes has the best child that was not taken, the first of equal ones. A node
    whose children were all taken is never chosen, whatever the scores."""
    best = -1
    for node in range(nodes):
        if taken[node] < counts[node] and (best < 0 or waiting[node] > waiting[best]):
            best = node
    return best


@njit
def best_first(arrays, total, order, vocabulary, weight, table, context, nodes, scores):
    """Find the best prefixes under the drafter's probabilities times n-gram probabilities to the power of `weight`, for
    one row: a `Table`, how many tokens the model counted in all, the target's vocabulary, the text (T,) so far, else
    arguments as in `beam`. Fills nodes (3, M - 1) and scores (M - 1,), all of them, best first: there must be so many
    prefixes of listed tokens."""
    length, listed = table.tokens.shape
    ranks, budget, longest = listed + MORE, nodes.shape[1], max(order - 1, 1)
    by_token, by_place = np.empty((length, listed), np.int64), np.empty((length, listed), np.int64)
    for level in range(length):
        ascend(table.tokens[level], by_token[level], by_place[level])
    # of every node: its candidates, ascending, where they are listed (-1: nowhere), and how many; which are likeliest,
    # their scores, and how many were taken; its suffixes and last tokens
    tokens, places = np.empty((budget, ranks), np.int64), np.empty((budget, ranks), np.int64)
    which, score = np.empty((budget, ranks), np.int64), np.empty((budget, ranks))
    counts, taken = np.zeros(budget, np.int64), np.zeros(budget, np.int64)
    suffixes, grown = np.empty((budget, longest), np.int64), np.empty((budget, longest + 1, ranks), np.int64)
    recent = np.empty((budget, REACH), np.int64)
    waiting = np.empty(budget)  # the score of its best child that was not taken
    last = np.full(budget + 1, -1)  # where the token of a node is listed
    log_q, probabilities, step, shares = np.empty(ranks), np.empty(ranks), np.empty(ranks), np.empty(ranks)
    ends, lengths = np.empty(len(context), np.int64), np.empty(len(context), np.int64)
    begin(arrays, context, suffixes[0])
    newest(context, recent[0])
    for node in range(budget):  # score the node's children, then take the best node that waits
        level = nodes[2, node - 1] if node > 0 else 0
        if level < length:
            for i in range(listed):
                tokens[node, i], places[node, i] = by_token[level, i], by_place[level, i]
            met = meet(context, recent[node], ends, lengths)
            count = widen(arrays, suffixes[node], vocabulary, context, ends, met, tokens[node], places[node], listed)
            given = tokens[node, :count]
            unigrams(arrays, total, given, shares)
            extend(arrays, suffixes[node], given, shares, grown[node], probabilities)
            recall(context, ends, lengths, met, given, probabilities)
            drafted(table, level, last[node], given, places[node], log_q)
            norm = judge(log_q[:count], probabilities, weight, step[:count])
            _best(step, 0, count, which[node])
            for rank in range(count):
                above = scores[node - 1] if node > 0 else 0.0
                score[node, rank] = above + min(step[which[node, rank]] - norm, 0.0)
            waiting[node], counts[node] = score[node, 0], count
        parent = best_waiting(waiting, taken, counts, node + 1)
        rank = taken[parent]
        i = which[parent, rank]
        level = nodes[2, parent - 1] if parent > 0 else 0
        nodes[0, node], nodes[1, node], nodes[2, node] = tokens[parent, i], parent, level + 1
        scores[node], last[node + 1] = waiting[parent], places[parent, i]
        if node + 1 < budget:
            for k in range(longest):
                suffixes[node + 1, k] = grown[parent, k, i]
            recent[node + 1, 0] = nodes[0, node]
            for k in range(1, REACH):
                recent[node + 1, k] = recent[parent, k - 1]
        taken[parent] += 1
        if rank + 1 < counts[parent]:
            waiting[parent] = score[parent, rank + 1]
