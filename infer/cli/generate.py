"""The command `generate`: lets the target answer a question or continue a text."""

import sys
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any

from infer.cli.models import (
    CommandWithDrafter,
    MaskedConfig,
    load_target_and_drafter,
    resolve_decode_options,
)
from infer.config import DecodeOptions
from infer.utils.checks import TEXT_OR_FILE_METADATA_KEY, check_nested_options


@dataclass
class GenerateCommand(CommandWithDrafter):
    """Generate the output for one prompt. Print it, the number of decoding rounds and tokens/s.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2). The default is the drafter in the target's folder
    prompt: the prompt. With --prompt TEXT instead of prompt=TEXT, Hydra's quoting rules do not
        apply. @file reads the prompt from a file, and - from standard input
    chat: true makes the prompt a user message in the target's chat template. false continues the
        prompt as text. null means true if the target has a chat template that adds text to a
        message, else false
    target: see TargetConfig in infer/config.py
    drafter: see DrafterLoadConfig in infer/config.py
    decoding: see DecodeOptions in infer/config.py
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    """

    checkpoint: str = "${target.path}"
    prompt: str = field(
        default="import os\n\ndef main():\n", metadata={TEXT_OR_FILE_METADATA_KEY: True}
    )
    chat: bool | None = None
    decoding: DecodeOptions = field(default_factory=DecodeOptions)
    masked: MaskedConfig = field(default_factory=MaskedConfig)

    def check(self) -> None:
        """Raise ValueError for invalid options or an empty prompt."""
        check_nested_options(self)
        if not self.prompt:
            raise ValueError("prompt is empty: give at least one character")


def has_nontrivial_chat_template(target: Any) -> bool:
    """Return whether a target has a chat template that adds text to a message."""
    from infer.api import encode_prompt

    if getattr(target.tokenizer, "chat_template", None) is None:
        return False
    prompt_ids = encode_prompt(target, [{"role": "user", "content": "x"}])
    return target.tokenizer.decode(prompt_ids).strip() != "x"


def run(config: GenerateCommand) -> None:
    """Generate the output, print it to stdout, and print its statistics to stderr."""
    options = resolve_decode_options(config.target, config.decoding, config.masked)
    checkpoint = config.checkpoint if config.decoding.uses_drafter else None
    # Libraries may print warnings while models are loaded. These are redirected to stderr, because
    # stdout must contain only the output.
    with redirect_stdout(sys.stderr):
        from infer import Generation, generate

        target, drafter = load_target_and_drafter(config.target, checkpoint, config.drafter)
        is_chat = has_nontrivial_chat_template(target) if config.chat is None else config.chat
        prompt = [{"role": "user", "content": config.prompt}] if is_chat else config.prompt
        generation = generate(target, drafter, prompt, options)
    assert isinstance(generation, Generation)
    text = generation.text or ""
    stats = generation.stats
    method = options.get_method_name(drafter) if drafter else options.method
    print(text if is_chat else config.prompt + text)
    print(
        f"\n[{method}: {stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}, "
        f"{stats.tokens_per_second:.0f} tokens/s, ended by {generation.finish_reason}]",
        file=sys.stderr,
    )
