"""The objective of masked diffusion: an upper bound on a text's negative log-likelihood, estimated
from one random masking of it.

The forward process replaces tokens by the mask token: at noise level t, each token is masked with
probability t. For a text x of n tokens (MDLM, Sahoo et al. 2024, eq. 10 with alpha_t = 1 - t;
LLaDA, Nie et al. 2025, eq. 3)

    -log p(x) <= E over t ~ U(0, 1] and the masking of
                 [ 1/t * sum over masked i of -log p(x_i | x masked) ]

Given that k of the n tokens are masked, t has the distribution Beta(k + 1, n - k + 1), and the mean
of 1/t is (n + 1) / k. This mean is used in place of 1/t. The expectation stays the same, and the
variance becomes small; with 1/t it is infinite. LLaDA's eq. 6 measures likelihoods by the number of
masked tokens for the same reason.

Because decoding proceeds block by block, a text may also be divided into blocks. Each block is
bounded by the same formula, given all tokens before it, with all tokens after it masked:
-log p(x) = sum over blocks of -log p(block | tokens before). One random block of a document, times
the document's number of blocks, is an unbiased estimate of that sum.

Shapes: B packed sequences, T tokens each, N documents in each, V vocabulary. Packed sequences are
those of `data.packing`.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from infer.attention.masks import to_additive_mask


class MaskingNoise(NamedTuple):
    """The random numbers of one masking."""

    levels: torch.Tensor  # (B, N) noise level t of every document, in (0, 1]
    block_positions: torch.Tensor  # (B, N) uniform in [0, 1): selects the document's masked block
    # (B, T) uniform in [0, 1): a token of that block is masked if its number is below t
    token_thresholds: torch.Tensor

    def select_rows(self, rows: torch.Tensor, device: torch.device) -> "MaskingNoise":
        """Return the random numbers of some packed sequences on a device."""
        return MaskingNoise(*(numbers[rows].to(device) for numbers in self))

    def to_device(self, device: torch.device) -> "MaskingNoise":
        """Return the random numbers on a device."""
        return MaskingNoise(*(numbers.to(device) for numbers in self))


def sample_noise(documents: torch.Tensor, generator: torch.Generator) -> MaskingNoise:
    """Sample the random numbers for a batch with document numbers (B, T), on the CPU.

    The noise levels of a batch are evenly spread over (0, 1] (MDLM's low-discrepancy sampler): each
    is uniform, and their mean varies less than that of independent ones.
    """
    batch_size, length = documents.shape
    num_documents = int(documents.max()) + 1 if documents.numel() else 0
    offsets = torch.rand(1, num_documents, generator=generator)
    spread = torch.arange(batch_size)[:, None] / batch_size
    block_positions = torch.rand(batch_size, num_documents, generator=generator)
    token_thresholds = torch.rand(batch_size, length, generator=generator)
    return MaskingNoise(1 - (offsets + spread) % 1, block_positions, token_thresholds)


def mask_tokens(
    batch: dict[str, torch.Tensor],
    noise: MaskingNoise,
    block_lengths: torch.Tensor,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask tokens of one block of every document, and all tokens after that block.

    batch: the columns ids, positions, documents and loss of packed sequences, (B, T) each.
    block_lengths: (B,) number of learned tokens in a block. At T or more, a document is one block.

    Returns the ids with mask tokens (B, T), and the weight of each token's cross-entropy (B, T), 0
    at tokens without loss. Tokens without loss (prompts) are never masked before and inside the
    block. After it they are, because decoding does not know them yet.
    """
    ids = batch["ids"]
    documents = batch["documents"]
    learned = batch["loss"].bool()
    document_index = documents.clamp(min=0)
    zeros = torch.zeros(noise.levels.shape, dtype=torch.long, device=ids.device)  # (B, N)

    # for each token, the number of learned tokens before it: in the sequence, then in its document
    learned_before = learned.long().cumsum(1) - learned.long()
    document_starts = torch.arange(ids.shape[1], device=ids.device) - batch["positions"]  # (B, T)
    learned_before = learned_before - learned_before.gather(1, document_starts.clamp(min=0))

    # the block that is masked in each document
    learned_counts = zeros.scatter_add(1, document_index, learned.long())
    num_blocks = -(-learned_counts // block_lengths[:, None])  # (B, N) the last block may be short
    masked_block = (noise.block_positions * num_blocks).long()  # (B, N)
    masked_block_sizes = torch.minimum(
        learned_counts - masked_block * block_lengths[:, None], block_lengths[:, None]
    )  # (B, N)

    token_block = learned_before // block_lengths[:, None]  # (B, T)
    token_masked_block = masked_block.gather(1, document_index)
    is_below_level = noise.token_thresholds < noise.levels.gather(1, document_index)
    predicted = learned & (token_block == token_masked_block) & is_below_level
    masked = predicted | ((token_block > token_masked_block) & (documents >= 0))

    predicted_counts = zeros.scatter_add(1, document_index, predicted.long())
    weights = num_blocks * (masked_block_sizes + 1) / predicted_counts  # (B, N)
    token_weights = torch.where(predicted, weights.gather(1, document_index), 0.0)
    return ids.masked_fill(masked, mask_token_id), token_weights


def remove_unpredictable_loss(
    batch: dict[str, torch.Tensor], mask_token_id: int
) -> dict[str, torch.Tensor]:
    """Return the batch without loss at tokens that the model cannot predict: mask tokens that occur
    in a text, and the first token of each document, which is given. (Dream, too, predicts a token
    from the output before it.)"""
    is_predictable = (batch["ids"] != mask_token_id) & (batch["positions"] > 0)
    return batch | {"loss": batch["loss"].bool() & is_predictable}


def estimate_bound(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    masked_ids: torch.Tensor,
    weights: torch.Tensor,
    mask_token_id: int,
) -> torch.Tensor:
    """Estimate the bound in nats, summed over the batch, () with gradient.

    model: a Hugging Face causal language model. It is run with every token seeing its whole
        document; its output at position i - 1 predicts the token at i. The mask token is never
        predicted (MDLM section 3.2.3, zero masking probabilities).
    masked_ids, weights: (B, T), from `mask_tokens`.

    For nats per token, divide by the number of learned tokens, masked or not.
    """
    documents = batch["documents"]
    same_document = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
    hidden = model.get_decoder()(
        input_ids=masked_ids,
        position_ids=batch["positions"],
        attention_mask=to_additive_mask(same_document, torch.float32),
        use_cache=False,
    ).last_hidden_state  # (B, T, D)

    # logits are needed only at the M predicted tokens
    rows, positions = weights.nonzero(as_tuple=True)  # (M,)
    logits = model.get_output_embeddings()(hidden[rows, positions - 1]).float()  # (M, V)
    is_mask_token = torch.arange(logits.shape[-1], device=logits.device) == mask_token_id
    logits = logits.masked_fill(is_mask_token, float("-inf"))
    losses = nn.functional.cross_entropy(logits, batch["ids"][rows, positions], reduction="none")
    return (losses * weights[rows, positions]).sum()
