"""Options of masked diffusion models. No torch here: a wrong option is refused before it loads."""

from dataclasses import asdict, dataclass
from typing import ClassVar

from infer.config import GRAMMARS, TextOptions, inherited_help
from infer.utils.checks import at_least, one_of

LONGEST = 8  # tokens that a round drafts at most


@dataclass(kw_only=True)
class MaskedConfig:
    """How a masked diffusion model writes. block_length and cache decide what is written, the
    others only how fast.

    method: what a pass computes beside the text, whose own drafts these are. guided: the likeliest
        states, by what the text has shown of itself so far too; greedy: a chain by confidence;
        mixed: where two drafts may swap; steps: nothing, one token a pass: docs/methods.md
    rows: texts decoded side by side at most; others wait
    block_length: tokens of a block, which is finished before the next one begins; an answer is
        whole blocks, then cut
    cache: of keys and values. none: every pass computes the whole row; dual: keys and values
        outside the block are those of the pass that began it
    draft_length: tokens drafted each round, 1 to 8
    nodes: of method guided: states verified each round, the current text among them
    """

    method: str = "guided"
    rows: int = 16
    block_length: int = 8
    cache: str = "none"
    draft_length: int = 4
    nodes: int = 8
    positions: ClassVar = (
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
        at_least(self, rows=1, block_length=1, nodes=1)
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
