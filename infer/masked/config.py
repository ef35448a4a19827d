"""Options of decoding with masked diffusion models. This module does not import torch, so that
invalid options are refused before torch is loaded."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from infer.config import GRAMMAR_OPTIONS, SamplingOptions, append_inherited_help
from infer.utils.checks import require_at_least, require_one_of

MAX_MASKED_DRAFT_LENGTH = 8


@dataclass(kw_only=True)
class MaskedConfig:
    """How a masked diffusion model decodes. block_length and cache change the output; the other
    options change only the speed.

    method: how the model's own predictions are used as drafts. 'guided' drafts the likeliest sets
        of tokens, and takes into account what was accepted earlier in the sequence; 'greedy' drafts
        a chain of tokens in order of confidence; 'mixed' is greedy, but two drafted tokens may also
        come in the opposite order; 'steps' does not draft, so each forward pass yields one token.
        See docs/methods.md
    max_num_seqs: maximum number of sequences decoded in one batch; other sequences wait in a queue
    block_length: tokens per block; a block is finished before the next block begins. The model
        computes whole blocks, and the output is cut where it ends
    cache: how the KV cache is used. 'none' means that there is no cache, so every forward pass
        computes the whole sequence; 'dual' means that keys and values outside the current block are
        reused from the forward pass that began the block
    draft_length: tokens drafted per round, 1 to 8
    budget: maximum number of partly masked copies of the sequence that are computed per round,
        including the sequence without drafted tokens; used with method 'guided' only
    """

    method: str = "guided"
    max_num_seqs: int = 16
    block_length: int = 8
    cache: str = "none"
    draft_length: int = 4
    budget: int = 8
    # None means that a step may compute any number of positions. Prompts are not prefilled but
    # computed together with their outputs.
    max_num_batched_tokens: ClassVar = None

    def count_output_positions(self, tokens: int) -> int:
        """Return `tokens`, the length of an output, rounded up to whole blocks. The model computes
        this many positions for the output."""
        return tokens + -tokens % self.block_length

    def describe_method(self, drafter: None) -> str:
        """Return the name that reports use for this way of decoding. `drafter` is None, since the
        model drafts for itself."""
        return self.method

    def check(self) -> None:
        """Raise ValueError if an option has an invalid value."""
        require_at_least(self, max_num_seqs=1, block_length=1, budget=1)
        require_one_of(self, method=("guided", "greedy", "mixed", "steps"), cache=("none", "dual"))
        require_one_of(self, draft_length=range(1, MAX_MASKED_DRAFT_LENGTH + 1))


@append_inherited_help
@dataclass
class MaskedOptions(MaskedConfig, SamplingOptions):
    """All options of decoding with a masked diffusion model: the options of MaskedConfig and those
    of SamplingOptions."""

    def check(self) -> None:
        """Raise ValueError if an option has an invalid value, or a value that masked diffusion
        decoding does not support."""
        SamplingOptions.check(self)
        MaskedConfig.check(self)
        check_masked_text_options(self)


def check_masked_text_options(options: SamplingOptions) -> None:
    """Raise ValueError if an option in `options` is not supported by masked diffusion decoding.

    Masked diffusion decoding fills positions in any order, so grammars and penalties are not
    supported. Each token is the likeliest token of its position, or a sample from the whole
    distribution, so that filters such as top_k are not supported either.
    """
    defaults = SamplingOptions()
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "logprobs", *GRAMMAR_OPTIONS):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name}={value}: masked diffusion decoding does not support it; leave {name} out"
            )


def merge_masked_options(text: SamplingOptions, masked: MaskedConfig) -> MaskedOptions:
    """Return the options of `text` and `masked` as one dataclass, after checking them. Raises
    ValueError for an option that masked diffusion decoding does not support."""
    text_options = {name: getattr(text, name) for name in SamplingOptions.__dataclass_fields__}
    options = MaskedOptions(**text_options, **asdict(masked))
    options.check()
    return options
