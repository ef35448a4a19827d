"""Masked diffusion's objective: an upper bound on a text's negative log-likelihood, from one random
masking of it.

The forward process covers tokens ("absorbs" them into the mask token): at noise level t each token
is covered with probability t. For a text x of n tokens (MDLM, Sahoo et al. 2024, eq. 10 with
alpha_t = 1 - t; LLaDA, Nie et al. 2025, eq. 3)

    -log p(x) <= E over t ~ U(0, 1] and the covering of [ 1/t * sum over covered i of -log p(x_i | x
    covered) ]

Given that k of the n tokens are covered, t is distributed as Beta(k + 1, n - k + 1), and the mean
of 1/t is (n + 1) / k. That takes the place of 1/t here: the expectation stays, and the variance,
which with 1/t is infinite (the integral of 1/t), is small. LLaDA's eq. 6 measures likelihoods by
numbers of covered tokens for the same reason.

Decoding goes block by block, so a text may also be split into blocks of any length, each bounded by
the same formula given everything before it, with everything after it covered: -log p(x) = sum over
blocks of -log p(block | before). One random block of a document, times the number of its blocks, is
an unbiased estimate of that sum.

B rows, T tokens of a row, N documents of a row, V vocabulary. Rows are those of `data.packing`.
"""

from typing import NamedTuple

import torch
from torch import nn

from infer.attention.masks import additive


class Dice(NamedTuple):
    """The randomness of one masking."""

    levels: torch.Tensor  # (B, N) noise level t of every document, from above 0 to 1
    blocks: torch.Tensor  # (B, N) uniform in [0, 1): which block of the document is noised
    coins: (
        torch.Tensor
    )  # (B, T) uniform in [0, 1): a token of that block is covered if its coin is below t


def throw(documents: torch.Tensor, generator: torch.Generator) -> Dice:
    """Draw the noise of rows of documents (B, T), on the CPU. The levels of a batch are evenly
    spread over (0, 1] (MDLM's low-discrepancy sampler): each is uniform, and together they vary
    less than independent ones."""
    rows, length = documents.shape
    slots = int(documents.max()) + 1 if documents.numel() else 0
    offsets = torch.rand(1, slots, generator=generator)
    spread = torch.arange(rows)[:, None] / rows
    blocks = torch.rand(rows, slots, generator=generator)
    return Dice(1 - (offsets + spread) % 1, blocks, torch.rand(rows, length, generator=generator))


def noise(
    rows: dict[str, torch.Tensor], dice: Dice, block_length: torch.Tensor, mask_token_id: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cover, in every document, one block of the tokens that may be learnt, as the dice say, and
    all that follows it. Return the ids with mask tokens (B, T), and what a covered token's
    cross-entropy counts (B, T), 0 without loss.

    rows: packed `ids`, `positions`, `documents` and `loss`, each (B, T). block_length: (B,) tokens
        to
    learn in a block of each row; a row's length or more noises its documents whole. Tokens that may
    not be learnt (prompts) stay clear before and within the block; they are covered after it, for
    decoding does not know them there yet.
    """
    ids = rows["ids"]
    documents = rows["documents"]
    learn = rows["loss"].bool()
    slot = documents.clamp(min=0)
    empty = torch.zeros(dice.levels.shape, dtype=torch.long, device=ids.device)  # (B, N)
    # tokens to learn before this one in its row, then in its document
    before = learn.long().cumsum(1) - learn.long()
    # (B, T) where the document begins
    first = torch.arange(ids.shape[1], device=ids.device) - rows["positions"]
    before = before - before.gather(1, first.clamp(min=0))
    counts = empty.scatter_add(1, slot, learn.long())
    blocks = -(-counts // block_length[:, None])  # (B, N) rounded up: the last block may be short
    chosen = (dice.blocks * blocks).long()  # (B, N)
    inside = torch.minimum(
        counts - chosen * block_length[:, None], block_length[:, None]
    )  # (B, N) its tokens
    # (B, T)
    block = before // block_length[:, None]
    theirs = chosen.gather(1, slot)
    hit = learn & (block == theirs) & (dice.coins < dice.levels.gather(1, slot))
    covered = hit | ((block > theirs) & (documents >= 0))
    weight = blocks * (inside + 1) / empty.scatter_add(1, slot, hit.long())  # (B, N)
    return ids.masked_fill(covered, mask_token_id), torch.where(hit, weight.gather(1, slot), 0.0)


def learnable(rows: dict[str, torch.Tensor], mask_id: int) -> dict[str, torch.Tensor]:
    """Return the rows without loss where the model has no prediction: on mask tokens that a text
    quotes, and on a document's first token, which is given (in Dream, too, the output before a
    token predicts it)."""
    return rows | {"loss": rows["loss"].bool() & (rows["ids"] != mask_id) & (rows["positions"] > 0)}


def bound(
    model: nn.Module,
    rows: dict[str, torch.Tensor],
    covered: torch.Tensor,
    weights: torch.Tensor,
    mask_id: int,
) -> torch.Tensor:
    """Estimate the bound in nats, summed over the rows, from the ids and weights (B, T) of `noise`:
    () with gradient; divide by the tokens that may be learnt, covered or not, for nats a token. The
    model never predicts the mask token (MDLM section 3.2.3: zero masking probabilities).

    model: a Hugging Face causal language model, run with every token seeing its document; its
        output at
    position i - 1 predicts the token at i.
    """
    documents = rows["documents"]
    seen = additive(
        documents[:, None, :, None] == documents[:, None, None, :], torch.float32
    )  # (B, 1, T, T)
    inputs = {"input_ids": covered, "position_ids": rows["positions"], "attention_mask": seen}
    hidden = model.get_decoder()(**inputs, use_cache=False).last_hidden_state  # (B, T, D)
    row, place = weights.nonzero(
        as_tuple=True
    )  # (M,) covered tokens with loss: only they need logits
    logits = model.get_output_embeddings()(hidden[row, place - 1]).float()  # (M, V)
    forbidden = torch.arange(logits.shape[-1], device=logits.device) == mask_id
    logits = logits.masked_fill(forbidden, float("-inf"))
    losses = nn.functional.cross_entropy(logits, rows["ids"][row, place], reduction="none")
    return (losses * weights[row, place]).sum()
