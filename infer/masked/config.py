"""Options of masked diffusion models. No torch here: a wrong option is refused before it loads."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from infer.config import GRAMMARS, TextOptions, inherited_help
from infer.utils.checks import at_least, one_of

LONGEST = 8  # tokens that a round drafts at most


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
    max_num_batched_tokens: ClassVar = (
        None  # of a step: there is no limit, prompts are computed with their answers
    )

    def room(self, tokens: int) -> int:
        """Return the positions that an answer of so many tokens takes: whole blocks are written."""
        return tokens + -tokens % self.block_length

    def name_with(self, drafter: None) -> str:
        """Return what decodes, by name; there is no drafter."""
        return self.method

    def check(self) -> None:
        """Raise ValueError for a way of decoding that does not exist."""
        at_least(self, max_num_seqs=1, block_length=1, budget=1)
        one_of(self, method=("guided", "greedy", "mixed", "steps"), cache=("none", "dual"))
        one_of(self, draft_length=range(1, LONGEST + 1))


@inherited_help
@dataclass
class MaskedOptions(MaskedConfig, TextOptions):
    """What is written and how a masked model writes it: the options of MaskedConfig and
    TextOptions."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        TextOptions.check(self)
        MaskedConfig.check(self)
        check_masked_text(self)


def check_masked_text(options: TextOptions) -> None:
    """Raise ValueError for what a masked diffusion model cannot follow: it writes in any order, and
    a token is the likeliest one of its position, or drawn from the whole distribution there."""
    neutral = TextOptions()
    for name in ("top_k", "top_p", "min_p", "repetition_penalty", "logprobs", *GRAMMARS):
        value = getattr(options, name)
        if value != getattr(neutral, name):
            raise ValueError(
                f"{name}={value}: masked diffusion decoding cannot follow it, leave it out"
            )


def masked_options(text: TextOptions, masked: MaskedConfig) -> MaskedOptions:
    """Return the options of both. Raises ValueError for those of a text that a masked model cannot
    follow."""
    options = MaskedOptions(
        **{name: getattr(text, name) for name in TextOptions.__dataclass_fields__}, **asdict(masked)
    )
    options.check()
    return options
