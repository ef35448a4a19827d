"""For Hugging Face users: `model.generate(..., custom_generate=speculative(target, drafter))`.

Everything around the decoding loop stays theirs: generation configs, logits processors, stopping
criteria, streamers.
"""

from collections import abc
from copy import copy
from dataclasses import replace

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    MinPLogitsWarper,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from infer.config import EngineConfig, TextOptions
from infer.drafters.base import Drafter
from infer.engine.engine import Engine
from infer.engine.sequence import Processor, Sequence
from infer.targets.target import Target

# `infer.engine.sampling.adjust` does the same, in this order, for all rows and nodes at once:
# attribute, our option.
KNOWN = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# These know every prompt of the batch.
OF_PROMPTS = (EncoderRepetitionPenaltyLogitsProcessor, EncoderNoRepeatNGramLogitsProcessor)
BY_ROW = (
    RepetitionPenaltyLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
)  # these, something of every row
# Prepared by `generate` for its own loops; not used here.
UNUSED = {
    "past_key_values",
    "use_cache",
    "cache_position",
    "position_ids",
    "logits_to_keep",
    "token_type_ids",
}


def speculative(
    target: Target,
    drafter: Drafter | None,
    method: str = "ddtree",
    budget: int | str = 64,
    streamer=None,
    continuity: str | None = None,
) -> abc.Callable:
    """Return a decoding loop for `target.model.generate(..., custom_generate=...)`: same output,
    sooner.

    Greedy output is what `generate` writes without it. Sampled output has the same distribution;
    its seeds come from torch's generator, so that `torch.manual_seed` repeats it, whatever the
    method. A streamer is given here and not to `generate`, which (transformers 5.23) does not hand
    it on to loops that are not its own. Raises ValueError for what this loop does not do: beams,
    scores and hidden states as output, prompts as embeddings.
    """
    how = EngineConfig(method, budget, continuity)
    how.check()

    @torch.inference_mode()
    def generate(
        model,
        input_ids: torch.Tensor,  # (B, T)
        logits_processor=(),
        stopping_criteria=(),
        generation_config=None,
        **others,  # the model's own arguments, and an attention mask (B, T)
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        if model is not target.model:
            raise ValueError(
                "custom_generate was made for another model: call speculative(Target(model), drafter)"
            )
        attention_mask = others.pop("attention_mask", None)
        _refuse(generation_config, attention_mask, others)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        prompts = [row[keep.bool()].tolist() for row, keep in zip(input_ids, mask, strict=True)]
        most = generation_config.max_length - input_ids.shape[1]
        if streamer is not None:
            streamer.put(input_ids.cpu())
        engine = Engine(
            target, drafter, replace(how, max_num_seqs=len(prompts)), max(map(len, prompts)) + most
        )
        criteria = [
            criterion
            for criterion in stopping_criteria
            if not isinstance(criterion, MaxLengthCriteria)
        ]
        ends = [
            each.eos_token_id.to(input_ids.device)
            for each in criteria
            if isinstance(each, EosTokenCriteria)
        ]
        texts = []
        for row, (ids, prompt) in enumerate(zip(input_ids, prompts, strict=True)):
            seed = int(torch.randint(2**62, ())) if generation_config.do_sample else 0
            padding = ids[: len(ids) - len(prompt)][None]
            own = [_of_row(processor, row, len(prompts)) for processor in logits_processor]
            settings, processors = _settings(own, padding.shape[1])
            settings["temperature"] = (
                settings.get("temperature", 1.0) if generation_config.do_sample else 0.0
            )
            options = TextOptions(max_new_tokens=most, seed=seed, ignore_eos=True, **settings)
            calls = [_padded(processor, padding, len(prompt), ends) for processor in processors]
            texts.append(engine.submit(prompt, options, calls))
        kept = _run(engine, texts, input_ids, criteria, streamer)
        if streamer is not None:
            streamer.end()
        sequences = _joined(input_ids, kept, generation_config)
        return (
            GenerateDecoderOnlyOutput(sequences)
            if generation_config.return_dict_in_generate
            else sequences
        )

    return generate


def _of_row(processor: Processor, row: int, rows: int) -> Processor:
    """Return a processor for this row of a batch alone. Raises ValueError for those that know the
    batch's prompts."""
    if isinstance(processor, OF_PROMPTS) and rows > 1:
        raise ValueError(
            "encoder_repetition_penalty and encoder_no_repeat_ngram_size: give one prompt at a time"
        )
    if not isinstance(processor, BY_ROW):
        return processor
    own = copy(processor)
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        own._prefix_allowed_tokens_fn = lambda _, ids: processor._prefix_allowed_tokens_fn(row, ids)
    elif processor.prompt_ignore_length is not None:
        ignored = torch.as_tensor(
            processor.prompt_ignore_length
        ).flatten()  # one for all, or one a row
        own.prompt_ignore_length = int(ignored[row % len(ignored)])
    return own


def _padded(
    processor: Processor, padding: torch.Tensor, prompt: int, ends: abc.Sequence[torch.Tensor]
) -> Processor:
    """Return a processor that sees the padding in front, which those that count positions expect.
    Behind an end token, which stands after the first `prompt` tokens, it changes nothing: what is
    written there is cut off."""

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if any(torch.isin(ids[:, prompt:], each).any() for each in ends):
            return scores
        return processor(torch.cat([padding, ids], 1), scores)

    return process


def _run(
    engine: Engine,
    texts: list[Sequence],
    prompts: torch.Tensor,
    criteria: abc.Sequence[abc.Callable],
    streamer,
) -> list:
    """Decode until every text has ended by itself or by a criterion; return the kept new tokens of
    each."""
    lengths = dict.fromkeys(texts, 0)  # tokens that the criteria and the streamer have seen
    rows = dict(zip(texts, prompts, strict=True))
    while engine.busy:
        for text in engine.step():
            first = lengths[text]
            while lengths[text] < len(text.ids) and not text.cancelled:
                lengths[text] += 1
                if criteria:
                    new = torch.tensor(text.ids[: lengths[text]], device=prompts.device)
                    ids = torch.cat([rows[text], new])[None]
                    text.cancelled = any(
                        bool(torch.as_tensor(ends(ids, None)).all()) for ends in criteria
                    )
            if streamer is not None and lengths[text] > first:
                streamer.put(torch.tensor(text.ids[first : lengths[text]]))
    return [text.ids[: lengths[text]] for text in texts]


def _settings(
    processors: abc.Sequence[Processor], padding: int
) -> tuple[dict[str, float], abc.Sequence[Processor]]:
    """Return text options with the same effect as one row's processors, if there are any; else the
    processors, which then see every node's true prefix, one after the other. Our penalty is for the
    whole prompt and nothing before it: one that begins elsewhere than behind the row's `padding`
    tokens stays a processor."""
    kinds = [type(processor) for processor in processors]
    order = list(KNOWN)
    places = [order.index(kind) if kind in KNOWN else -1 for kind in kinds]
    penalties = [each for each in processors if isinstance(each, RepetitionPenaltyLogitsProcessor)]
    elsewhere = any((each.prompt_ignore_length or 0) != padding for each in penalties)
    if -1 in places or places != sorted(set(places)) or elsewhere:
        return {}, processors
    named = [(KNOWN[kind], processor) for kind, processor in zip(kinds, processors, strict=True)]
    return {option: vars(processor)[attribute] for (attribute, option), processor in named}, ()


def _refuse(config, attention_mask: torch.Tensor | None, others: dict[str, object]) -> None:
    """Raise ValueError for what this loop does not do."""
    outputs = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")
    asked = [name for name in outputs if config.return_dict_in_generate and vars(config).get(name)]
    unknown = sorted(
        name for name, value in others.items() if value is not None and name not in UNUSED
    )
    if config.num_beams not in (None, 1):
        raise ValueError(
            f"num_beams={config.num_beams}: speculative decoding follows one text, use num_beams=1"
        )
    if asked or unknown:
        raise ValueError(
            f"{', '.join(asked + unknown)}: not with speculative decoding; leave it out"
        )
    if attention_mask is not None and attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} dimensions: give (batch, tokens)"
        )
    if attention_mask is not None and (attention_mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask: pad the prompts on the left (tokenizer.padding_side = 'left')"
        )


def _joined(input_ids: torch.Tensor, kept: list[list[int]], config) -> torch.Tensor:
    """Return prompts and answers (B, T + longest), padding after shorter answers."""
    longest = max(map(len, kept))
    pad = vars(config).get("_pad_token_tensor")
    new = torch.full((len(kept), longest), 0 if pad is None else int(pad), dtype=torch.long)
    for row, ids in enumerate(kept):
        new[row, : len(ids)] = torch.tensor(ids)
    return torch.cat([input_ids, new.to(input_ids.device)], 1)
