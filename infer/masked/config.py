"""Options of masked diffusion models. It imports no torch, so that invalid options are refused
before torch is loaded."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from infer.config import GRAMMAR_OPTIONS, TextOptions, append_inherited_help
from infer.utils.checks import require_at_least, require_one_of

MAX_MASKED_DRAFT_LENGTH = 8  # tokens per round


@dataclass(kw_only=True)
class MaskedConfig:
    """How a masked diffusion model decodes. block_length and cache change the output, the other
    options only the speed.

    method: how drafts are made from the model's own predictions. guided: the most likely states,
        also by what was accepted earlier in the sequence; greedy: a chain in order of confidence;
        mixed: greedy, where two drafts may change places; steps: no drafts, one token per forward
        pass. See docs/methods.md
    max_num_seqs: sequences decoded in one batch; others wait in a queue
    block_length: tokens of a block; a block is finished before the next one begins, and an output
        is a number of whole blocks, cut at its end
    cache: KV cache. none: every forward pass computes the whole sequence; dual: keys and values
        outside the block are reused from the pass that began the block
    draft_length: tokens drafted per round, 1 to 8
    budget: method guided only: states verified per round, including the current one
    """

    method: str = "guided"
    max_num_seqs: int = 16
    block_length: int = 8
    cache: str = "none"
    draft_length: int = 4
    budget: int = 8
    # Positions per step: there is no limit, since prompts are computed together with their outputs.
    max_num_batched_tokens: ClassVar = None

    def output_positions(self, tokens: int) -> int:
        """Return the positions of an output of `tokens` tokens, rounded up to whole blocks."""
        return tokens + -tokens % self.block_length

    def describe_method(self, drafter: None) -> str:
        """Return the name of this way of decoding; there is no drafter."""
        return self.method

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        require_at_least(self, max_num_seqs=1, block_length=1, budget=1)
        require_one_of(self, method=("guided", "greedy", "mixed", "steps"), cache=("none", "dual"))
        require_one_of(self, draft_length=range(1, MAX_MASKED_DRAFT_LENGTH + 1))


@append_inherited_help
@dataclass
class MaskedOptions(MaskedConfig, TextOptions):
    """All options of decoding with a masked model: those of MaskedConfig and of TextOptions."""

    def check(self) -> None:
        """Raise ValueError for invalid or unsupported options."""
        TextOptions.check(self)
        MaskedConfig.check(self)
        check_masked_text_options(self)


def check_masked_text_options(options: TextOptions) -> None:
    """Raise ValueError for options that masked diffusion decoding does not support.

    It fills positions in any order, and each token is the likeliest one of its position, or sampled
    from the whole distribution there.
    """
    defaults = TextOptions()
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "logprobs", *GRAMMAR_OPTIONS):
        value = getattr(options, name)
        if value != getattr(defaults, name):
            raise ValueError(
                f"{name}={value}: masked diffusion decoding does not support it, leave it out"
            )


def merge_masked_options(text: TextOptions, masked: MaskedConfig) -> MaskedOptions:
    """Return the options of both together. Raises ValueError for options that masked diffusion
    decoding does not support."""
    text_options = {name: getattr(text, name) for name in TextOptions.__dataclass_fields__}
    options = MaskedOptions(**text_options, **asdict(masked))
    options.check()
    return options
