"""Check that an output is what the target alone generates, and find the cause of a difference.

In float32 there are no differences. In bfloat16 a pass over a tree rounds differently from a pass
over one token. If two tokens are equally good to within that rounding, either may be chosen: a tie.
Any other difference is a defect.

V: vocabulary size
"""

import torch

from infer.config import TextOptions
from infer.engine.grammar import make_grammar_state
from infer.engine.sampling import SamplingTensors, make_round_noise, mark_seen_tokens, sample_tokens
from infer.targets.target import Target

LOSSLESS_CHECK_CHUNK_POSITIONS = 64  # positions per pass when the logits are computed again
LOSSLESS_CHECK_ONE_BY_ONE_POSITIONS = (
    8  # positions run one by one, to measure how the shape of a pass rounds
)


def classify_difference(
    target: Target, prompt: list[int], ids: list[int], expected: list[int], options: TextOptions
) -> str | None:
    """Compare an output with baseline decoding's and return the cause of the first difference:
    "tie" or "defect", or None if they are equal.

    It is a tie if changing the target's logits at that position by no more than their rounding
    error lets either token be chosen. The rounding error is taken to be two steps of the dtype at
    the largest logit, plus twice the change that results from running the last tokens one by one.

    ids, expected: new tokens of the output and of baseline decoding
    """
    if ids == expected:
        return None
    pairs = enumerate(zip(ids, expected, strict=False))
    index = next((i for i, (token, other) in pairs if token != other), None)
    if index is None:  # one output is longer
        return "defect"

    prefix = prompt + ids[:index]
    logits = compute_last_logits(target, prefix, 0)
    single_logits = compute_last_logits(target, prefix, LOSSLESS_CHECK_ONE_BY_ONE_POSITIONS)
    dtype_rounding = float(logits.abs().max()) * torch.finfo(target.dtype).eps
    shape_rounding = float((logits - single_logits).abs().max())
    rounding = 2 * dtype_rounding + 2 * shape_rounding

    grammar = make_grammar_state(options, target)
    if grammar is not None:
        logits = grammar.mask_scores(logits[0], ids[:index], [])[None]
    choice = TargetChoice(logits, len(prefix) - 1, prefix, options)
    if choice.is_possible(ids[index], rounding) and choice.is_possible(expected[index], rounding):
        return "tie"
    return "defect"


class TargetChoice:
    """The target's choice at one position, for its logits (1, 1, V) and for perturbed ones."""

    def __init__(
        self, logits: torch.Tensor, position: int, prefix: list[int], options: TextOptions
    ) -> None:
        vocabulary_size = logits.shape[-1]
        device = logits.device
        self.logits = logits
        self.sampling = SamplingTensors.from_options([options], vocabulary_size, device)
        positions = torch.tensor([position], device=device)
        self.noise = make_round_noise(self.sampling, positions, 1, vocabulary_size)
        self.seen = None
        if self.sampling.kind.uses_penalty:
            # (1, 1, V)
            self.seen = lambda nodes: mark_seen_tokens([prefix], vocabulary_size, device)[None]

    def choose_token(self, shift: torch.Tensor | float = 0.0) -> int:
        """Return the chosen token when `shift` is added to the logits."""
        depth = torch.zeros(1, 1, dtype=torch.long, device=self.logits.device)
        return int(sample_tokens(self.logits + shift, depth, self.sampling, self.noise, self.seen))

    def is_possible(self, token: int, rounding: float) -> bool:
        """Return whether `token` can be chosen if no logit changes by more than `rounding`.

        Two perturbations are tried: this token up and all others down; and, for the boundary of
        top-p, more likely tokens down and the others up.
        """
        token_up = torch.full_like(self.logits, -rounding)
        token_up[..., token] = rounding
        likelier_down = torch.where(
            self.logits > self.logits[..., token, None], -rounding, rounding
        )
        likelier_down[..., self.choose_token()] = -rounding
        likelier_down[..., token] = rounding
        return token in (self.choose_token(token_up), self.choose_token(likelier_down))


@torch.no_grad()
def compute_last_logits(target: Target, ids: list[int], single_positions: int) -> torch.Tensor:
    """Run the target alone over token ids and return the logits after the last one, (1, 1, V)
    float32. The last `single_positions` positions are run one by one, the others in chunks."""
    chunked = max(0, len(ids) - single_positions)
    starts = [*range(0, chunked, LOSSLESS_CHECK_CHUNK_POSITIONS), *range(chunked, len(ids))]
    with target.allocate_cache(1, len(ids)).add_rows(1) as cache:
        for start in starts:
            end = start + 1
            if start < chunked:
                end = min(start + LOSSLESS_CHECK_CHUNK_POSITIONS, chunked)
            last = target.extend_cache([ids[start:end]], cache, ()).last_hidden_states
    return target.compute_logits(last)[:, -1:].float()
