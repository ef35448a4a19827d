"""For Hugging Face users: `model.generate(..., custom_generate=speculative(target, drafter))`.

Generation configs, logits processors, stopping criteria and streamers work as in `generate`. Only
the decoding loop is replaced.
"""

from collections import abc
from copy import copy
from dataclasses import replace
from typing import Any

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
from infer.engine.sequence import LogitsProcessor, Sequence
from infer.targets.target import Target

# Processors that `infer.engine.sampling.adjust_logits` applies itself, in this order, to all rows
# and nodes at once: (their attribute, option of `TextOptions`).
SAMPLING_OPTIONS_BY_LOGITS_PROCESSOR: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# Processors that store the prompts of the whole batch.
LOGITS_PROCESSORS_STORING_BATCH_PROMPTS = (
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)
# Arguments that `generate` prepares for its own loops. They are not needed here.
IGNORED_GENERATE_ARGUMENTS = {
    "past_key_values",
    "use_cache",
    "cache_position",
    "position_ids",
    "logits_to_keep",
    "token_type_ids",
}
UNSUPPORTED_OUTPUTS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
MAX_SEED = 2**62
StoppingCriteria = abc.Callable[..., Any]


def speculative(
    target: Target,
    drafter: Drafter | None,
    method: str = "ddtree",
    budget: int | str = 64,
    streamer: Any = None,
    continuity: str | None = None,
) -> abc.Callable:
    """Return a decoding loop for `target.model.generate(..., custom_generate=...)`.

    method, budget, continuity: see EngineConfig
    streamer: given here and not to `generate`, which does not pass it on to custom loops
        (transformers 5.23)

    Greedy output is the same as without the loop. Sampled output has the same distribution; its
    seeds come from torch's generator, so that `torch.manual_seed` reproduces it with every method.
    Raises ValueError for what the loop does not support: beam search, scores and hidden states as
    output, prompts as embeddings.
    """
    engine_options = EngineConfig(method, budget, continuity)
    engine_options.check()

    @torch.inference_mode()
    def generate(
        model: Any,
        input_ids: torch.Tensor,  # (B, T)
        logits_processor: abc.Sequence[LogitsProcessor] = (),
        stopping_criteria: abc.Sequence[StoppingCriteria] = (),
        generation_config: Any = None,
        **model_arguments: Any,  # with the attention mask (B, T)
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        if model is not target.model:
            raise ValueError(
                "custom_generate belongs to another model: call speculative(Target(model), drafter)"
            )
        attention_mask = model_arguments.pop("attention_mask", None)
        _refuse_unsupported(generation_config, attention_mask, model_arguments)
        prompts = _remove_padding(input_ids, attention_mask)
        max_new_tokens = generation_config.max_length - input_ids.shape[1]
        if streamer is not None:
            streamer.put(input_ids.cpu())
        capacity = max(map(len, prompts)) + max_new_tokens
        engine = Engine(
            target, drafter, replace(engine_options, max_num_seqs=len(prompts)), capacity
        )
        # The engine limits the number of tokens itself.
        criteria = [item for item in stopping_criteria if not isinstance(item, MaxLengthCriteria)]
        sequences = _submit_prompts(
            engine, input_ids, prompts, logits_processor, criteria, generation_config
        )
        outputs = _decode(engine, sequences, input_ids, criteria, streamer)
        if streamer is not None:
            streamer.end()
        output_ids = _join_outputs(input_ids, outputs, generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=output_ids)  # ty: ignore[invalid-argument-type]
        return output_ids

    return generate


def _remove_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[list[int]]:
    """Return the token ids of every row without padding."""
    if attention_mask is None:
        return input_ids.tolist()
    prompts = []
    for row_ids, row_mask in zip(input_ids, attention_mask, strict=True):
        prompts.append(row_ids[row_mask.bool()].tolist())
    return prompts


def _submit_prompts(
    engine: Engine,
    input_ids: torch.Tensor,
    prompts: list[list[int]],
    processors: abc.Sequence[LogitsProcessor],
    criteria: list[StoppingCriteria],
    generation_config: Any,
) -> list[Sequence]:
    """Submit the rows of a batch to the engine.

    input_ids: (B, T), prompts with padding on the left
    prompts: token ids of every row without padding
    """
    max_new_tokens = generation_config.max_length - input_ids.shape[1]
    do_sample = generation_config.do_sample
    end_tokens = []
    for criterion in criteria:
        if isinstance(criterion, EosTokenCriteria):
            end_tokens.append(criterion.eos_token_id.to(input_ids.device))
    sequences = []
    for row, (row_ids, prompt) in enumerate(zip(input_ids, prompts, strict=True)):
        seed = int(torch.randint(MAX_SEED, ())) if do_sample else 0
        padding = row_ids[: len(row_ids) - len(prompt)][None]
        row_processors = [
            _adapt_processor_to_row(processor, row, len(prompts)) for processor in processors
        ]
        sampling_options, remaining = _extract_options(row_processors, padding.shape[1])
        temperature = sampling_options.pop("temperature", 1.0)
        options = TextOptions(
            max_new_tokens=max_new_tokens,
            seed=seed,
            ignore_eos=True,  # end tokens are among the stopping criteria
            temperature=temperature if do_sample else 0.0,
            **sampling_options,
        )
        padded_processors = [
            _pad_processor_input(processor, padding, len(prompt), end_tokens)
            for processor in remaining
        ]
        sequences.append(engine.submit(prompt, options, padded_processors))
    return sequences


def _adapt_processor_to_row(
    processor: LogitsProcessor, row: int, batch_size: int
) -> LogitsProcessor:
    """Return a processor for one row of a batch, decoded without the other rows.

    Raises ValueError for processors that store the prompts of the batch, if there are several.
    """
    if isinstance(processor, LOGITS_PROCESSORS_STORING_BATCH_PROMPTS) and batch_size > 1:
        raise ValueError(
            "encoder_repetition_penalty and encoder_no_repeat_ngram_size: give one prompt at a time"
        )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        constrained: Any = copy(processor)
        allowed_tokens = processor._prefix_allowed_tokens_fn
        constrained._prefix_allowed_tokens_fn = lambda _, ids: allowed_tokens(row, ids)
        return constrained
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        penalty: Any = copy(processor)
        if penalty.prompt_ignore_length is not None:
            # One length for all rows, or one for each.
            lengths = torch.as_tensor(penalty.prompt_ignore_length).flatten()
            penalty.prompt_ignore_length = int(lengths[row % len(lengths)])
        return penalty
    return processor


def _pad_processor_input(
    processor: LogitsProcessor,
    padding: torch.Tensor,
    prompt_length: int,
    end_tokens: abc.Sequence[torch.Tensor],
) -> LogitsProcessor:
    """Return a processor that gets the row's ids with the padding in front.

    Processors that count positions expect it. After an end token, the scores are not changed,
    because tokens there are cut off.
    """

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        new_ids = ids[:, prompt_length:]
        if any(torch.isin(new_ids, tokens).any() for tokens in end_tokens):
            return scores
        return processor(torch.cat([padding, ids], 1), scores)

    return process


def _decode(
    engine: Engine,
    sequences: list[Sequence],
    input_ids: torch.Tensor,
    criteria: abc.Sequence[StoppingCriteria],
    streamer: Any,
) -> list[list[int]]:
    """Decode until every sequence has ended by itself or by a criterion.

    Returns the new tokens of each sequence.
    """
    # Tokens that the criteria and the streamer have seen.
    lengths = dict.fromkeys(sequences, 0)
    prompts = dict(zip(sequences, input_ids, strict=True))
    while engine.busy:
        for sequence in engine.step():
            previous_length = lengths[sequence]
            while lengths[sequence] < len(sequence.ids) and not sequence.cancelled:
                lengths[sequence] += 1
                if criteria:
                    new_ids = torch.tensor(
                        sequence.ids[: lengths[sequence]], device=input_ids.device
                    )
                    ids = torch.cat([prompts[sequence], new_ids])[None]
                    sequence.cancelled = any(_is_met(criterion, ids) for criterion in criteria)
            if streamer is not None and lengths[sequence] > previous_length:
                streamer.put(torch.tensor(sequence.ids[previous_length : lengths[sequence]]))
    return [sequence.ids[: lengths[sequence]] for sequence in sequences]


def _is_met(criterion: StoppingCriteria, ids: torch.Tensor) -> bool:
    """Return whether a stopping criterion ends a sequence, ids (1, T)."""
    return bool(torch.as_tensor(criterion(ids, None)).all())


def _extract_options(
    processors: abc.Sequence[LogitsProcessor], padding_length: int
) -> tuple[dict[str, Any], abc.Sequence[LogitsProcessor]]:
    """Return text options with the same effect as the processors of one row, and no processors.

    If there are no such options, return no options and all processors. They are then called for
    one node after the other, each with its true prefix. The engine's repetition penalty covers the
    whole prompt and nothing before it, so a penalty with another start than the end of the row's
    padding stays a processor.
    """
    order = list(SAMPLING_OPTIONS_BY_LOGITS_PROCESSOR)
    positions = []
    for processor in processors:
        processor_type = type(processor)
        if processor_type not in SAMPLING_OPTIONS_BY_LOGITS_PROCESSOR:
            return {}, processors
        positions.append(order.index(processor_type))
    if positions != sorted(set(positions)):
        return {}, processors

    options = {}
    for processor in processors:
        if isinstance(processor, RepetitionPenaltyLogitsProcessor):
            ignored_length = processor.prompt_ignore_length or 0
            if ignored_length != padding_length:
                return {}, processors
        attribute, option = SAMPLING_OPTIONS_BY_LOGITS_PROCESSOR[type(processor)]
        options[option] = vars(processor)[attribute]
    return options, ()


def _refuse_unsupported(
    config: Any, attention_mask: torch.Tensor | None, arguments: dict[str, object]
) -> None:
    """Raise ValueError for arguments that the loop does not support."""
    unsupported = []
    if config.return_dict_in_generate:
        unsupported += [name for name in UNSUPPORTED_OUTPUTS if vars(config).get(name)]
    unsupported += sorted(
        name
        for name, value in arguments.items()
        if value is not None and name not in IGNORED_GENERATE_ARGUMENTS
    )
    if config.num_beams not in (None, 1):
        raise ValueError(
            f"num_beams={config.num_beams}: speculative decoding has no beam search, use "
            "num_beams=1"
        )
    if unsupported:
        raise ValueError(
            f"{', '.join(unsupported)}: not supported with speculative decoding, leave it out"
        )
    if attention_mask is None:
        return
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} dimensions: give (batch, tokens)"
        )
    if (attention_mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask: pad the prompts on the left (tokenizer.padding_side = 'left')"
        )


def _join_outputs(input_ids: torch.Tensor, outputs: list[list[int]], config: Any) -> torch.Tensor:
    """Return prompts and outputs, (B, T + longest output), with padding after shorter outputs."""
    longest = max(map(len, outputs))
    pad_token = vars(config).get("_pad_token_tensor")
    pad_token_id = 0 if pad_token is None else int(pad_token)
    new_ids = torch.full((len(outputs), longest), pad_token_id, dtype=torch.long)
    for row, output in enumerate(outputs):
        new_ids[row, : len(output)] = torch.tensor(output)
    return torch.cat([input_ids, new_ids.to(input_ids.device)], 1)
