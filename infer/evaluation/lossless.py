"""Checks that an output equals the output of baseline decoding, and finds the cause of a
difference.

In float32 there are no differences. In bfloat16, a forward pass over a tree rounds differently from
a forward pass over one token. If the logits of two tokens differ by less than the rounding error,
either token may be chosen. Such a difference is called a tie. Any other difference is a defect.
"""

import torch

from infer.config import SamplingOptions
from infer.engine.grammar import make_grammar_state
from infer.engine.sampling import SamplingTensors, make_round_noise, mark_seen_tokens, sample_tokens
from infer.targets.target import Target

# Number of tokens per forward pass when the logits of a finished sequence are computed again
LOSSLESS_CHECK_CHUNK_POSITIONS = 64
# To estimate rounding errors, logits are computed a second time with a separate forward pass for
# each of this many last tokens.
LOSSLESS_CHECK_ONE_BY_ONE_POSITIONS = 8


def classify_difference(
    target: Target, prompt: list[int], ids: list[int], expected: list[int], options: SamplingOptions
) -> str | None:
    """Compare an output with the output of baseline decoding, and classify the first difference.

    The difference is a tie if rounding can explain it, which means that the target can choose
    either token if every logit may change by the rounding error. Any other difference is a defect.
    The rounding error is estimated as the sum of two terms: twice the largest logit times the
    machine epsilon of the target's dtype, and twice the largest change of a logit when the last
    tokens are processed one at a time instead of together.

    ids: generated tokens of the output
    expected: generated tokens of baseline decoding

    Returns "tie" or "defect", or None if both outputs are equal.
    """
    if ids == expected:
        return None
    pairs = enumerate(zip(ids, expected, strict=False))
    index = next((i for i, (token, other) in pairs if token != other), None)
    if index is None:  # one output is a prefix of the other
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
    choice = TargetTokenChooser(logits, len(prefix) - 1, prefix, options)
    if choice.is_possible(ids[index], rounding) and choice.is_possible(expected[index], rounding):
        return "tie"
    return "defect"


class TargetTokenChooser:
    """Samples the token at one position, from the target's logits or from changed logits.

    logits: the target's logits at the position, of shape (1, 1, vocab_size)
    position: index of the position in the sequence; each position has its own sampling noise
    prefix: all token ids before the chosen token
    """

    def __init__(
        self, logits: torch.Tensor, position: int, prefix: list[int], options: SamplingOptions
    ) -> None:
        vocabulary_size = logits.shape[-1]
        device = logits.device
        self.logits = logits
        self.sampling = SamplingTensors.from_options([options], vocabulary_size, device)
        positions = torch.tensor([position], device=device)
        self.noise = make_round_noise(self.sampling, positions, 1, vocabulary_size)
        self.seen = None
        if self.sampling.kind.uses_penalty:
            # (1, 1, vocab_size)
            self.seen = lambda nodes: mark_seen_tokens([prefix], vocabulary_size, device)[None]

    def choose_token(self, shift: torch.Tensor | float = 0.0) -> int:
        """Return the token that is chosen if `shift` is added to the logits.

        shift: a number, or a tensor of shape (1, 1, vocab_size)
        """
        depth = torch.zeros(1, 1, dtype=torch.long, device=self.logits.device)
        return int(sample_tokens(self.logits + shift, depth, self.sampling, self.noise, self.seen))

    def is_possible(self, token: int, max_logit_error: float) -> bool:
        """Return whether `token` can be chosen if every logit changes by at most `max_logit_error`.

        Two changes of the logits are tried. The first raises the logit of `token` and lowers all
        other logits. The second is for the case that top-p would exclude `token`. It lowers the
        logits of all tokens that are more likely than `token`, and the logit of the token that the
        unchanged logits choose. It raises all other logits.
        """
        token_up = torch.full_like(self.logits, -max_logit_error)
        token_up[..., token] = max_logit_error
        likelier_down = torch.where(
            self.logits > self.logits[..., token, None], -max_logit_error, max_logit_error
        )
        likelier_down[..., self.choose_token()] = -max_logit_error
        likelier_down[..., token] = max_logit_error
        return token in (self.choose_token(token_up), self.choose_token(likelier_down))


@torch.no_grad()
def compute_last_logits(target: Target, ids: list[int], num_one_by_one: int) -> torch.Tensor:
    """Return the target's logits after the last token, in float32, of shape (1, 1, vocab_size).

    num_one_by_one: how many tokens at the end are processed one at a time, with one forward pass
        each; the tokens before them are processed in chunks
    """
    chunked = max(0, len(ids) - num_one_by_one)
    starts = [*range(0, chunked, LOSSLESS_CHECK_CHUNK_POSITIONS), *range(chunked, len(ids))]
    with target.allocate_cache(1, len(ids)).add_rows(1) as cache:
        for start in starts:
            end = start + 1
            if start < chunked:
                end = min(start + LOSSLESS_CHECK_CHUNK_POSITIONS, chunked)
            last = target.extend_cache([ids[start:end]], cache, ()).last_hidden_states
    return target.compute_logits(last)[:, -1:].float()
