"""The round loop: draft, build, verify, walk, commit. One loop for every method.

A chain is a tree of width one and plain decoding is a tree with a root alone, so that baselines and methods are
measured by the same code. DDTree section 4.1 lists the steps.

B rows, M tree nodes, L drafted positions, V vocabulary.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from infer.config import DecodeOptions
from infer.dflash import DFlash
from infer.sampling import Sampling, choose
from infer.target import Target
from infer.trees import TREES, root_only
from infer.verify import walk

STAGES = ("draft", "build", "verify", "commit")


@dataclass
class DecodeStats:
    """What decoding one text took. A round commits the accepted drafts and the next bonus token; the prefill yields the
    first bonus token, so `tokens = 1 + sum of the rounds' commits`. Of rows decoded together, each is given
    the whole batch's seconds."""

    prompt_tokens: int
    tokens: int = 0  # kept new tokens
    rounds: int = 0
    histogram: list[int] = field(default_factory=list)  # [i]: rounds that committed i + 1 kept tokens
    seconds: float = 0.0  # wall-clock, prefill included
    stage_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *STAGES), 0.0))

    @property
    def tau(self) -> float:
        """Acceptance length: tokens committed per round."""
        return (self.tokens - 1) / self.rounds if self.rounds else 1.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Decoded:
    """New token ids of one row, nothing past its end; `commits` are the ids' counts round by round, prefill first."""

    ids: list[int]
    finish: str  # "stop" (an end token or a stop string) or "length"
    commits: list[int]
    stats: DecodeStats


@dataclass
class _Row:
    """One text while it is being written."""

    stats: DecodeStats
    ids: list[int] = field(default_factory=list)
    commits: list[int] = field(default_factory=list)
    finish: str | None = None

    def take(self, new: list[int], ends: Callable[[list[int], int], tuple[int, str] | None]) -> None:
        """Adds a round's tokens up to the end of the text."""
        before = len(self.ids)
        self.ids += new
        found = ends(self.ids, before)
        if found is not None:
            length, self.finish = found
            del self.ids[length:]
        self.commits.append(len(self.ids) - before)


def text_end(
    options: DecodeOptions, end_ids: frozenset[int], decode: Callable[[list[int]], str] | None
) -> Callable[[list[int], int], tuple[int, str] | None]:
    """A rule that finds where a text ends: (ids, first new index) -> (length to keep, reason) or None.

    An end token is kept, a stop string's tokens up to the one that completes it (the text is cut before it later).
    """

    def ends(ids: list[int], first: int) -> tuple[int, str] | None:
        limit = min(len(ids), options.max_new_tokens)
        for i in range(first, limit):
            if ids[i] in end_ids:
                return i + 1, "stop"
            if options.stop and any(text in decode(ids[: i + 1]) for text in options.stop):
                return i + 1, "stop"
        return (limit, "length") if limit == options.max_new_tokens else None

    return ends


@torch.inference_mode()
def decode(
    target: Target,
    drafter: DFlash | None,
    prompts: list[list[int]],
    options: DecodeOptions,
    clock: Callable[[], float] = time.perf_counter,
    seeds: list[int] | None = None,
) -> list[Decoded]:
    """Decodes a batch of prompts (token ids, none empty); every row has its own length, tree, acceptance and end.

    `clock` times the stages; a benchmark on CUDA passes one that synchronises. `seeds` gives every row a sampling seed
    of its own instead of options.seed. The drafter may be None for plain.
    """
    options.check()
    build = None if options.method == "plain" else TREES[options.method]
    if build is not None and drafter is None:
        raise ValueError(f"method={options.method} needs a drafter: load one with load_drafter, or use method=plain")
    if not prompts or any(not prompt for prompt in prompts):
        raise ValueError("every prompt needs at least one token")
    sampling = Sampling(temperature=options.temperature, seed=options.seed)
    layers = drafter.layer_ids if build is not None else ()
    tokenizer = target.tokenizer
    ends = text_end(options, target.end_ids, tokenizer.decode if tokenizer is not None else None)
    rows = [_Row(DecodeStats(prompt_tokens=len(prompt))) for prompt in prompts]
    seconds = dict.fromkeys(("prefill", *STAGES), 0.0)
    device = target.device
    row_seeds = None if seeds is None else torch.tensor(seeds, device=device)

    # Prefill: the prompt's features feed the first draft, its last position yields the first bonus token.
    began = mark = clock()
    capacity = max(map(len, prompts)) + options.max_new_tokens + (options.budget if build is not None else 0) + 1
    cache = target.cache(len(prompts), capacity + (drafter.block_size if build is not None else 0))
    state = drafter.state(len(prompts), cache.capacity) if build is not None else None
    features = target.prefill(prompts, cache, layers)
    counts = list(cache.lengths)
    last = torch.tensor(counts, device=device) - 1
    hidden = features.last.gather(1, last.view(-1, 1, 1).expand(-1, 1, features.last.shape[-1]))  # (B, 1, D)
    bonus = choose(target.head(hidden), torch.zeros_like(last)[:, None], last, 0, sampling, row_seeds)[:, 0]  # (B,)
    context = features.context
    for row, token in zip(rows, bonus.tolist(), strict=True):
        row.take([token], ends)
    seconds["prefill"] = (now := clock()) - mark

    while any(row.finish is None for row in rows):
        mark = now
        if build is None:
            tree = root_only(bonus)
        else:
            marginals = drafter.draft(target, context, counts, bonus, state)  # (B, L, V)
            seconds["draft"] += (now := clock()) - mark
            mark = now
            tree = build(bonus, marginals, options.budget)
        ancestors = tree.ancestors()  # (B, M, M)
        seconds["build"] += (now := clock()) - mark

        mark = now
        start = torch.tensor(cache.lengths, device=device)
        features = target.verify(tree, ancestors, cache, layers)
        chosen = choose(target.head(features.last), tree.depths, start, tree.max_depth, sampling, row_seeds)  # (B, M)
        seconds["verify"] += (now := clock()) - mark

        mark = now
        accepted = walk(tree, chosen, ancestors)
        lengths, bonus = accepted.lengths.tolist(), accepted.bonus
        path = accepted.path[:, : max(lengths)]  # (B, W)
        drafted = tree.tokens.gather(1, path).tolist()
        for i, (row, token) in enumerate(zip(rows, bonus.tolist(), strict=True)):
            if row.finish is not None:
                lengths[i] = 0  # a finished row stands still until the others are done
                continue
            row.take(drafted[i][1 : lengths[i]] + [token], ends)
            row.stats.rounds += 1
        counts = lengths
        cache.commit(path, counts)
        if build is not None:
            context = features.context.gather(1, path[..., None].expand(-1, -1, features.context.shape[-1]))
        seconds["commit"] += (now := clock()) - mark

    total = now - began
    for row in rows:
        stats = row.stats
        stats.tokens, stats.seconds, stats.stage_seconds = len(row.ids), total, dict(seconds)
        stats.histogram = [0] * (drafter.block_size if build is not None else 1)
        for commit in row.commits[1:]:
            stats.histogram[commit - 1] += 1
    return [Decoded(row.ids, row.finish, row.commits, row.stats) for row in rows]
