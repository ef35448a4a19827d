"""What transformers' own `generate` offers, measured beside our methods on the same prompts.

A way of decoding is a row of `OTHERS`; rows that draft nothing are plain decoders, which every evaluation measures:
speedups are over the fastest of those and ours. Rows that draft are for comparisons, one text at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from infer.config import TextOptions
from infer.drafters.families import LOOKUP
from infer.engine.loops import loop_period
from infer.trees.methods import TreeMethod

if TYPE_CHECKING:
    import torch

    from infer.drafters.base import Drafter
    from infer.engine.sequence import Sequence as Text
    from infer.targets.target import Target


@dataclass(frozen=True)
class OtherDecoder:
    """One way of decoding with transformers' `generate`."""

    row: TreeMethod  # how tables show it
    arguments: "Callable[[Target, Drafter], dict[str, object] | None]"  # of `generate`; None: not with this drafter


def _row(name: str, label: str, drafts: bool) -> TreeMethod:
    return TreeMethod(name, label, "", "#e69f00", drafts, most_nodes=lambda block_size: 0)


def prompt_lookup(target: "Target", drafter: "Drafter") -> dict[str, object] | None:
    """Return the arguments of prompt lookup with blocks as long as those of our own lookup drafter."""
    return {"prompt_lookup_num_tokens": drafter.block_size - 1} if drafter.family is LOOKUP else None


def assisted(target: "Target", drafter: "Drafter") -> dict[str, object] | None:
    """Return the arguments of assisted generation with our drafter as transformers' own class, where that has words for
    the drafter, and the installed transformers has that class."""
    import transformers

    formats = drafter.family.formats
    if "transformers" not in formats or not hasattr(transformers, "MuseGlimmerAssistantModel"):
        return None
    from infer.formats.export import export_drafter

    with TemporaryDirectory() as folder:
        try:
            export_drafter(drafter, "transformers", target, Path(folder))
        except ValueError:  # a head, or a vocabulary of its own
            return None
        model = transformers.AutoModel.from_pretrained(folder, dtype=target.dtype)
    return {"assistant_model": model.to(target.device).eval(), "speculation_type": "dflash"}


_ROWS = (
    OtherDecoder(_row("generate", "transformers", drafts=False), lambda target, drafter: {}),
    OtherDecoder(_row("generate+lookup", "transformers, prompt lookup", drafts=True), prompt_lookup),
    OtherDecoder(_row("generate+assistant", "transformers, assisted", drafts=True), assisted),
)
OTHERS = {other.row.name: other for other in _ROWS}


def decode_by_generate(
    target: "Target",
    row: TreeMethod,
    arguments: dict[str, object],
    prompts: Sequence[list[int]],
    options: Sequence[TextOptions],
) -> "list[Text]":
    """Continue prompts side by side with transformers' `generate`, as long as the engine would. Sampled texts are
    others than the engine's: they are drawn with other noise, from the seed of the first text."""
    import torch
    from transformers import GenerationConfig, StoppingCriteriaList

    from infer.engine.sequence import Sequence as Text
    from infer.engine.sequence import text_end

    width, first = max(map(len, prompts)), options[0]
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts], device=target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    mask = (torch.arange(width, device=target.device) >= width - lengths[:, None]).long()  # (B, T)
    sampled = {"temperature": first.temperature, "top_k": first.top_k, "top_p": first.top_p}
    ends = [] if first.ignore_eos else sorted(target.end_ids)
    config = GenerationConfig(
        max_new_tokens=first.max_new_tokens,
        do_sample=first.temperature > 0,
        # none: a token that cannot come, as None would be filled in from the model's own configuration
        eos_token_id=ends or [target.head_weight.shape[0]],
        pad_token_id=0,
        repetition_penalty=1.0,
        **(sampled if first.temperature else {}),
    )
    passes = []  # one entry a pass of the target
    devices = [target.device] if target.device.type == "cuda" else []
    hook = target.body.register_forward_hook(lambda *_: passes.append(None))
    try:
        with torch.random.fork_rng(devices), torch.no_grad():
            torch.manual_seed(first.seed)
            stops = StoppingCriteriaList([stop_in_loops(width, first.loop_period)] if first.loop_period else [])
            out = target.model.generate(
                ids, attention_mask=mask, generation_config=config, stopping_criteria=stops, **arguments
            )
    finally:
        hook.remove()
    texts = []
    for prompt, ids, own in zip(prompts, out[:, width:].tolist(), options, strict=True):
        text = Text(prompt, own)
        length, text.finish = text_end(ids, 0, own, target) or (len(ids), "length")
        text.ids = ids[:length]
        text.commits = [1] * length
        text.stats.tokens = length
        text.stats.rounds = len(passes) - 1 if row.drafts else length - 1  # the first pass is the prompt's
        text.stats.histogram = [length - 1]
        texts.append(text)
    return texts


def stop_in_loops(start: int, longest: int) -> "Callable[..., torch.Tensor]":
    """Return a stopping criterion of transformers that ends texts, which begin at position `start`, in loops."""
    import torch

    def stop(ids: "torch.Tensor", scores: object, **unused: object) -> "torch.Tensor":
        rows = ids[:, start:].tolist()  # (B, T)
        looped = [bool(row and loop_period(row, len(row), longest)) for row in rows]
        return torch.tensor(looped, device=ids.device)

    return stop
