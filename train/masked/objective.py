"""The training loss of masked diffusion: an upper bound on a text's negative log-likelihood. The
bound is estimated from one random masking of the text.

The forward process replaces tokens by the mask token. At noise level t, each token is masked with
probability t. For a text x of n tokens, the upper bound is (MDLM, Sahoo et al. 2024, eq. 10 with
alpha_t = 1 - t; LLaDA, Nie et al. 2025, eq. 3)

    -log p(x) <= E[ 1/t * (sum over masked positions i of -log p(x_i | masked text)) ]

where the expectation E is over t, uniform in (0, 1], and over the masking at noise level t.

Given that k of the n tokens are masked, t has the distribution Beta(k + 1, n - k + 1), and the mean
of 1/t is (n + 1) / k. This mean is used in place of 1/t. The expectation stays the same. The
variance of the estimate is infinite with 1/t, and small with the mean. For the same reason, LLaDA's
eq. 6 also uses the number of masked tokens instead of t.

Decoding proceeds block by block, so a text may also be divided into blocks:
-log p(x) = sum over blocks of -log p(block | tokens before the block). Each term has an upper bound
by the same formula, where the tokens before the block are given and all tokens after the block are
masked. To estimate the sum, one random block of each document is masked. The bound of this block
is multiplied by the number of blocks of the document. This estimate is unbiased.

A learned token is a token with loss: a token of a text or an answer, not of a prompt.

Shapes: B packed sequences (see `data.packing`), T tokens each.
"""

from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from infer.attention.masks import to_additive_mask


class MaskingNoise(NamedTuple):
    """The random numbers that decide which tokens of a batch of packed sequences are masked."""

    # (B, num_documents) noise level of each document, in (0, 1]: the probability that a token of
    # the masked block is masked
    levels: torch.Tensor
    # (B, num_documents) uniform in [0, 1): selects the block of the document that is masked
    block_uniforms: torch.Tensor
    # (B, num_tokens) uniform in [0, 1): a token of the masked block is masked if this number is
    # below the noise level
    token_uniforms: torch.Tensor

    def select_rows(self, rows: torch.Tensor, device: torch.device) -> "MaskingNoise":
        """Return a copy, on `device`, of the random numbers of some packed sequences. rows: the
        indices of these sequences in the batch."""
        return MaskingNoise(*(numbers[rows].to(device) for numbers in self))

    def to_device(self, device: torch.device) -> "MaskingNoise":
        """Return a copy of the random numbers on a device."""
        return MaskingNoise(*(numbers.to(device) for numbers in self))


def sample_noise(documents: torch.Tensor, generator: torch.Generator) -> MaskingNoise:
    """Sample, on the CPU, the random numbers that decide which tokens of a batch are masked.

    documents: (B, num_tokens) document number of each token, -1 for padding.

    The noise levels (masking probabilities) of a batch are evenly spread over (0, 1], as in MDLM's
    low-discrepancy sampler. Each single level is uniformly distributed. The mean of these levels
    varies less than the mean of independent levels.
    """
    batch_size, length = documents.shape
    num_documents = int(documents.max()) + 1 if documents.numel() else 0
    offsets = torch.rand(1, num_documents, generator=generator)
    spread = torch.arange(batch_size)[:, None] / batch_size
    block_positions = torch.rand(batch_size, num_documents, generator=generator)
    token_thresholds = torch.rand(batch_size, length, generator=generator)
    return MaskingNoise(1 - (offsets + spread) % 1, block_positions, token_thresholds)


def mask_block_and_later_tokens(
    batch: dict[str, torch.Tensor],
    noise: MaskingNoise,
    block_lengths: torch.Tensor,
    mask_token_id: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mask random tokens of one block of every document, and all tokens after that block.

    batch: the columns ids, positions, documents and loss of packed sequences, (B, num_tokens) each.
    noise: the random numbers that decide what is masked.
    block_lengths: (B,) number of tokens with loss per block. If it is num_tokens or more, a
        document is a single block.

    Returns the ids with mask tokens (B, num_tokens), and the weight of each token's cross-entropy
    (B, num_tokens). The weight is 0 at tokens that are not predicted. Before and inside the block,
    tokens without loss (prompts) are never masked. After the block all tokens are masked, because
    decoding does not know them yet.
    """
    ids = batch["ids"]
    documents = batch["documents"]
    learned = batch["loss"].bool()
    document_index = documents.clamp(min=0)
    # (B, num_documents)
    zeros = torch.zeros(noise.levels.shape, dtype=torch.long, device=ids.device)

    # Count the learned tokens (tokens with loss) before each token: first those in its packed
    # sequence, then those in its document.
    learned_before = learned.long().cumsum(1) - learned.long()
    document_starts = torch.arange(ids.shape[1], device=ids.device) - batch["positions"]  # (B, T)
    learned_before = learned_before - learned_before.gather(1, document_starts.clamp(min=0))

    # Select the block that is masked in each document.
    learned_counts = zeros.scatter_add(1, document_index, learned.long())
    # (B, num_documents) rounded up, because a document's last block may be short
    num_blocks = -(-learned_counts // block_lengths[:, None])
    masked_block = (noise.block_uniforms * num_blocks).long()  # (B, num_documents)
    masked_block_sizes = torch.minimum(
        learned_counts - masked_block * block_lengths[:, None], block_lengths[:, None]
    )  # (B, num_documents)

    token_block = learned_before // block_lengths[:, None]  # (B, T)
    token_masked_block = masked_block.gather(1, document_index)
    is_below_level = noise.token_uniforms < noise.levels.gather(1, document_index)
    predicted = learned & (token_block == token_masked_block) & is_below_level
    masked = predicted | ((token_block > token_masked_block) & (documents >= 0))

    predicted_counts = zeros.scatter_add(1, document_index, predicted.long())
    weights = num_blocks * (masked_block_sizes + 1) / predicted_counts  # (B, num_documents)
    token_weights = torch.where(predicted, weights.gather(1, document_index), 0.0)
    return ids.masked_fill(masked, mask_token_id), token_weights


def exclude_unpredictable_tokens(
    batch: dict[str, torch.Tensor], mask_token_id: int
) -> dict[str, torch.Tensor]:
    """Return a copy of the batch in which tokens that the model cannot predict have no loss.

    These are mask tokens that the text already contains, and the first token of each document. The
    first token cannot be predicted, because the model predicts a token from its output at the
    position before this token, as in Dream.

    batch: the columns of packed sequences.
    """
    is_predictable = (batch["ids"] != mask_token_id) & (batch["positions"] > 0)
    return batch | {"loss": batch["loss"].bool() & is_predictable}


def estimate_nll_bound(
    model: PreTrainedModel,
    batch: dict[str, torch.Tensor],
    masked_ids: torch.Tensor,
    weights: torch.Tensor,
    mask_token_id: int,
) -> torch.Tensor:
    """Estimate the upper bound on the batch's negative log-likelihood. Return a scalar with
    gradient: nats, summed over the batch.

    model: a Hugging Face causal language model. It is run with an attention mask that lets every
        token see its whole document. The output at position i - 1 predicts the token at i. The
        probability of the mask token is set to 0 (MDLM, section 3.2.3).
    batch: the columns of packed sequences, before masking.
    masked_ids, weights: (B, num_tokens), the results of `mask_block_and_later_tokens`.

    For nats per token, divide the scalar by the number of all tokens with loss, masked and
    unmasked.
    """
    documents = batch["documents"]
    same_document = documents[:, None, :, None] == documents[:, None, None, :]  # (B, 1, T, T)
    hidden = model.get_decoder()(
        input_ids=masked_ids,
        position_ids=batch["positions"],
        attention_mask=to_additive_mask(same_document, torch.float32),
        use_cache=False,
    ).last_hidden_state  # (B, T, hidden size)

    # Compute logits only for the predicted tokens.
    rows, positions = weights.nonzero(as_tuple=True)  # (predicted tokens,) each
    logits = model.get_output_embeddings()(hidden[rows, positions - 1]).float()
    is_mask_token = torch.arange(logits.shape[-1], device=logits.device) == mask_token_id
    logits = logits.masked_fill(is_mask_token, float("-inf"))
    losses = nn.functional.cross_entropy(logits, batch["ids"][rows, positions], reduction="none")
    return (losses * weights[rows, positions]).sum()
