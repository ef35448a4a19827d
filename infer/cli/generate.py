"""`generate`: one prompt answered or continued."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field

from infer.cli.models import MaskedConfig, OfDrafter, load, text_options
from infer.config import DecodeOptions
from infer.utils.checks import FREE_TEXT, check_parts


@dataclass
class GenerateCommand(OfDrafter):
    """Generate the output for one prompt, and print rounds and tokens/s.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2); default: the drafter in the target's folder
    prompt: the prompt (--prompt TEXT takes it without Hydra's quoting rules); @file: read it from a
        file; -: read it from standard input
    chat: use the target's chat template; false: continue the prompt as text; null: use it if the
        target has one that adds more than the messages
    target: see TargetConfig in infer/config.py
    drafter: see LoadedConfig in infer/config.py
    decoding: see DecodeOptions in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    """

    checkpoint: str = "${target.path}"
    prompt: str = field(default="import os\n\ndef main():\n", metadata={FREE_TEXT: True})
    chat: bool | None = None
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    masked: MaskedConfig = field(default_factory=MaskedConfig)

    def check(self) -> None:
        """Raise ValueError for what cannot be decoded."""
        check_parts(self)
        if not self.prompt:
            raise ValueError("prompt: at least one character")


def has_chat_template(target) -> bool:
    """Return whether the target has a chat template that writes more than the messages."""
    from infer.api import encode

    if getattr(target.tokenizer, "chat_template", None) is None:
        return False
    return (
        target.tokenizer.decode(encode(target, [{"role": "user", "content": "x"}])).strip() != "x"
    )


def run(config: GenerateCommand) -> None:
    options = text_options(config.target, config.decoding, config.masked)
    checkpoint = config.checkpoint if config.decoding.drafts else None
    # the answer has stdout for itself: saving an int8 cache imports DeepSpeed, which prints a
    # warning
    with redirect_stdout(sys.stderr):
        from infer import generate

        target, drafter = load(config.target, checkpoint, config.drafter)
        chat = has_chat_template(target) if config.chat is None else config.chat
        prompt = [{"role": "user", "content": config.prompt}] if chat else config.prompt
        answer = generate(target, drafter, prompt, options)
    stats = answer.stats
    name = options.name_with(drafter) if drafter else options.method
    print(answer.text if chat else config.prompt + answer.text)
    print(
        f"\n[{name}: {stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}, "
        f"{stats.tokens_per_second:.0f} tokens/s, ended by {answer.finish_reason}]",
        file=sys.stderr,
    )
