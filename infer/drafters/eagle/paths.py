"""Drafting behind every prefix of a tree with an autoregressive drafter: one pass of its layer for the kept prefixes of
a depth, which see the context and their own ancestors.

B rows, P prefixes of a depth, M candidates behind a prefix, S attended positions, D hidden size, H key/value heads, E
head size, V vocabulary.
"""

from collections.abc import Callable, Mapping

import numpy as np
import torch

from infer.drafters.heads.draft import CHUNK, Judge
from infer.drafters.shifted import Shifted, ShiftedState
from infer.targets.target import Target


class Memory:
    """Keys and values (B, H, S, E) that a layer attends to and adds to; what transformers' layers ask of a cache."""

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        self.keys, self.values = keys, values

    def update(self, keys: torch.Tensor, values: torch.Tensor, *layer: object) -> tuple[torch.Tensor, torch.Tensor]:
        """Add keys and values (B, H, P, E); return all."""
        self.keys, self.values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        return self.keys, self.values


class Paths:
    """The kept prefixes of one depth behind bonus tokens (B,), begun at the root; `infer.trees.tree.Steps` whose
    candidates are each prefix's own M likeliest tokens. It goes one way: `begin`, then `choose` and `extend` in turns.

    `judge` is what the texts' options and the target's noise make of scores; without one they count as they are.
    """

    recurrent = True

    def __init__(
        self,
        drafter: Shifted,
        target: Target,
        bonus: torch.Tensor,
        state: ShiftedState,
        judge: Judge | None,
        candidates: int,
    ) -> None:
        self.drafter, self.target, self.judge, self.depth = drafter, target, judge, 0
        self.length, self.count = drafter.block_size - 1, min(candidates, drafter.config.vocab_size)
        rows, cache = len(bonus), state.cache
        window = cache.window(1).layers()[0]
        self.memory = Memory(window.keys[:rows], window.values[:rows])
        self.ends, self.angles = cache.ends_of(rows), state.angles
        inside = torch.arange(self.memory.keys.shape[2], device=bonus.device) < self.ends[:, None]
        self.seen = inside[:, None]  # (B, P, S) what each prefix attends to
        self.states = drafter.project(state.pending[:rows, None])  # (B, P, D) one position before each prefix's token
        self.tokens = bonus[:, None]  # (B, P) the prefixes' last ones
        self.candidates = self.tokens  # (B, P, M) behind each prefix
        self.allowed: Mapping[int, Callable[[list[int]], np.ndarray]] = {}
        self.drafted = self.tokens[..., None][..., :0]  # (B, P, depth) the prefixes' drafted tokens
        self.alive = torch.ones_like(self.tokens, dtype=torch.bool)  # (B, P) no grammar forbids the prefix

    def narrow(self, allowed: Mapping[int, Callable[[list[int]], np.ndarray]]) -> None:
        """Let grammars have their say: for each row that follows one, which tokens may follow a prefix's drafted
        tokens, (V,) bool. Nothing follows a prefix that is forbidden itself."""
        self.allowed = allowed

    @torch.no_grad()
    def outputs(self) -> torch.Tensor:
        """Run the layer at the prefixes' last tokens, which later prefixes then can attend to; return its states
        (B, P, D)."""
        drafter, (rows, width) = self.drafter, self.tokens.shape
        at = (self.ends + self.depth)[:, None].expand(-1, width)  # (B, P)
        rotary = tuple(table[0, at] for table in self.angles)  # (B, P, E) each
        itself = torch.eye(width, dtype=torch.bool, device=at.device).expand(rows, -1, -1)
        self.seen = torch.cat([self.seen, itself], 2)
        following = drafter.embed(self.target, self.tokens)
        found = drafter.layers[0](self.states, following, at, rotary, self.memory, self.seen[:, None])
        self.states = drafter.handed_on(found)
        return found

    def judged(self, states: torch.Tensor, first: int = 0) -> torch.Tensor:
        """The layer's states (B, p, D) at the prefixes from `first` on to scores of the token behind each, (B, p, V),
        not normalised."""
        drafter, count = self.drafter, states.shape[1]
        scores = drafter.whole_vocabulary(drafter.logits(self.target, drafter.last_norm(states)))
        if self.judge is not None:
            scores = self.judge(scores, torch.full((count,), self.depth, device=states.device))
        for row, allowed in self.allowed.items():
            for place, alive in enumerate(self.alive[row, first : first + count].tolist()):
                may = np.zeros(scores.shape[-1], bool)
                if alive:
                    may = allowed(self.drafted[row, first + place].tolist())[: scores.shape[-1]]
                scores[row, place].masked_fill_(~torch.from_numpy(may).to(scores.device), -torch.inf)
        return scores

    def log_probs(self) -> torch.Tensor:
        """Run the layer, and return log q (B, P, V)."""
        return self.judged(self.outputs()).log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)

    def begin(self) -> tuple[torch.Tensor, None]:
        """Return log q (B, 1, M) of the candidates of slot 0, likeliest first. There is no memory to carry."""
        return self.extend(0, self.tokens, None)

    def extend(self, slot: int, which: torch.Tensor, memory: None) -> tuple[torch.Tensor, None]:
        """Return log q (B, P, M) of the candidates behind the prefixes that were chosen."""
        states, found, tokens = self.outputs(), [], []
        size = max(1, CHUNK // (len(states) * self.drafter.config.vocab_size))
        for first in range(0, states.shape[1], size):
            scores = self.judged(states[:, first : first + size], first)
            top = scores.topk(self.count, dim=-1)
            log_q = (top.values - scores.logsumexp(-1, keepdim=True)).clamp(max=0)
            found.append(log_q.nan_to_num(nan=-torch.inf, neginf=-torch.inf))
            tokens.append(top.indices)
        self.candidates, self.log_q = torch.cat(tokens, 1), torch.cat(found, 1)
        return self.log_q, None

    def choose(self, slot: int, prefix: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
        """Keep the prefixes that grow out of `prefix` (B, P) by their candidates `which` (B, P); return these
        tokens."""

        def of(kept: torch.Tensor) -> torch.Tensor:  # (B, P before, n) -> (B, P, n)
            return kept.gather(1, prefix[..., None].expand(-1, -1, kept.shape[-1]))

        self.tokens = of(self.candidates).gather(2, which[..., None])[..., 0]
        self.states, self.seen = of(self.states), of(self.seen)
        if self.allowed:
            likely = of(self.log_q).gather(2, which[..., None])[..., 0]  # (B, P)
            self.alive = self.alive.gather(1, prefix) & (likely > -torch.inf)
            self.drafted = torch.cat([of(self.drafted), self.tokens[..., None]], 2)
        self.depth += 1
        return self.tokens

    def follow(self, tokens: torch.Tensor) -> None:
        """Go on behind one token of each row, (B,), where there is one prefix."""
        self.tokens, self.depth = tokens[:, None], self.depth + 1
        self.drafted = torch.cat([self.drafted, self.tokens[..., None]], 2)

    def chain(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the likeliest token behind the ones before, again and again, (B, length), and its log q."""
        tokens, steps = [], []
        for _ in range(length):
            best = self.log_probs()[:, 0].max(-1)
            self.follow(best.indices)
            tokens.append(best.indices)
            steps.append(best.values)
        return torch.stack(tokens, 1), torch.stack(steps, 1)
