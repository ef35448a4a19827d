"""Speculative decoding inside the method `generate` of Hugging Face models.

Call `model.generate(..., custom_generate=speculative(target, drafter))`. Only the decoding loop is
replaced, so generation configs, logits processors and stopping criteria work as usual. A streamer
must be given to `speculative`.
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

from infer.config import EngineConfig, SamplingOptions
from infer.drafters.base import Drafter
from infer.engine.engine import Engine
from infer.engine.sequence import LogitsProcessor, Sequence
from infer.targets.target import Target

# Logits processors that can be replaced by options of the engine. Keys are classes of processors.
# Values are (attribute of the processor, option of `SamplingOptions` that gets its value). The
# engine applies the options in this order.
SAMPLING_OPTIONS_BY_LOGITS_PROCESSOR: dict[type, tuple[str, str]] = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# Logits processors that store the prompts of the whole batch, so they cannot be called with one row
LOGITS_PROCESSORS_STORING_BATCH_PROMPTS = (
    EncoderRepetitionPenaltyLogitsProcessor,
    EncoderNoRepeatNGramLogitsProcessor,
)
# Arguments that `generate` prepares for its own decoding loops. They are not needed here.
IGNORED_GENERATE_ARGUMENTS = {
    "past_key_values",
    "use_cache",
    "cache_position",
    "position_ids",
    "logits_to_keep",
    "token_type_ids",
}
# Options of a generation config for additional outputs, which this loop does not return
UNSUPPORTED_OUTPUT_OPTIONS = (
    "output_scores",
    "output_logits",
    "output_attentions",
    "output_hidden_states",
)
MAX_SEED = 2**62
StoppingCriteria = abc.Callable[..., Any]


def _refuse_another_model(model: Any, target: Target) -> None:
    """Raise ValueError if `generate` is called on another model than `target`."""
    if model is not target.model:
        raise ValueError(
            "custom_generate was created for another model: pass "
            "custom_generate=speculative(Target(model), drafter) with this model"
        )


def speculative(
    target: Target,
    drafter: Drafter | None,
    method: str = "ddtree",
    budget: int | str = 64,
    streamer: Any = None,
    ngrams: str | None = None,
) -> abc.Callable:
    """Return a speculative decoding loop for `target.model.generate(..., custom_generate=...)`.

    drafter: None if the method needs no drafter
    method, budget, ngrams: see EngineConfig
    streamer: a streamer of transformers that receives the tokens. `generate` of transformers 5.23
        does not pass its streamer to custom loops, so it must be given here

    Greedy output is the same as with the loop of transformers. Sampled output has the same
    distribution. The seeds of sampling come from torch's random generator, so `torch.manual_seed`
    makes the output reproducible.

    The loop raises ValueError for arguments of `generate` that it does not support: beam search,
    prompts as embeddings, and scores, attentions or hidden states as output.
    """
    engine_options = EngineConfig(method, budget, ngrams)
    engine_options.check()

    @torch.inference_mode()
    def generate(
        model: Any,
        input_ids: torch.Tensor,  # (batch, tokens)
        logits_processor: abc.Sequence[LogitsProcessor] = (),
        stopping_criteria: abc.Sequence[StoppingCriteria] = (),
        generation_config: Any = None,
        **model_arguments: Any,  # may contain "attention_mask" of shape (batch, tokens)
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        _refuse_another_model(model, target)
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
        # The engine enforces max_new_tokens, so MaxLengthCriteria is not needed.
        criteria = [item for item in stopping_criteria if not isinstance(item, MaxLengthCriteria)]
        sequences = _submit_prompts(
            engine, input_ids, prompts, logits_processor, criteria, generation_config
        )
        outputs = _decode(engine, sequences, input_ids, criteria, streamer)
        if streamer is not None:
            streamer.end()
        output_ids = _concatenate_prompts_and_outputs(input_ids, outputs, generation_config)
        if generation_config.return_dict_in_generate:
            return GenerateDecoderOnlyOutput(sequences=output_ids)  # ty: ignore[invalid-argument-type]
        return output_ids

    return generate


def _remove_padding(
    input_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> list[list[int]]:
    """Return the token ids of each prompt without padding.

    input_ids: padded token ids, of shape (batch, tokens)
    attention_mask: 0 at padding, of the same shape; None means that there is no padding
    """
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
    """Submit the prompts of a batch to the engine, and return a sequence for each.

    input_ids: token ids with padding on the left, of shape (batch, tokens)
    prompts: token ids of each prompt without padding
    processors: the logits processors of `generate`
    criteria: the stopping criteria of `generate`, without the one for the maximum length
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
        sampling_options, remaining = _replace_processors_by_options(
            row_processors, padding.shape[1]
        )
        temperature = sampling_options.pop("temperature", 1.0)
        options = SamplingOptions(
            max_new_tokens=max_new_tokens,
            seed=seed,
            # The engine ignores end tokens. EosTokenCriteria, one of the stopping criteria of
            # `generate`, ends the sequence at an end token.
            ignore_eos=True,
            temperature=temperature if do_sample else 0.0,
            **sampling_options,
        )
        padded_processors = [
            _prepend_padding_for_processor(processor, padding, len(prompt), end_tokens)
            for processor in remaining
        ]
        sequences.append(engine.submit(prompt, options, padded_processors))
    return sequences


def _adapt_processor_to_row(
    processor: LogitsProcessor, row: int, batch_size: int
) -> LogitsProcessor:
    """Return a logits processor that can be called with a single batch row.

    processor: a logits processor that expects all rows of the batch
    row: index of the batch row

    Raises ValueError for a processor that stores the prompts of a batch with several rows.
    """
    if isinstance(processor, LOGITS_PROCESSORS_STORING_BATCH_PROMPTS) and batch_size > 1:
        raise ValueError(
            "encoder_repetition_penalty and encoder_no_repeat_ngram_size work with a single "
            f"prompt only, and the batch has {batch_size}: call generate once for each prompt"
        )
    if isinstance(processor, PrefixConstrainedLogitsProcessor):
        constrained: Any = copy(processor)
        allowed_tokens = processor._prefix_allowed_tokens_fn
        constrained._prefix_allowed_tokens_fn = lambda _, ids: allowed_tokens(row, ids)
        return constrained
    if isinstance(processor, RepetitionPenaltyLogitsProcessor):
        penalty: Any = copy(processor)
        if penalty.prompt_ignore_length is not None:
            # `lengths` has one entry for all batch rows, or one for each batch row.
            lengths = torch.as_tensor(penalty.prompt_ignore_length).flatten()
            penalty.prompt_ignore_length = int(lengths[row % len(lengths)])
        return penalty
    return processor


def _prepend_padding_for_processor(
    processor: LogitsProcessor,
    padding: torch.Tensor,
    prompt_length: int,
    end_tokens: abc.Sequence[torch.Tensor],
) -> LogitsProcessor:
    """Return a logits processor that puts padding in front of the token ids and then calls
    `processor`.

    The engine calls logits processors with the token ids of one batch row without padding. A
    processor that counts positions also needs the padding. After an end token, the scores are
    returned unchanged, because tokens after it are not part of the output.

    padding: the padding in front of the prompt, of shape (1, number of padding tokens)
    prompt_length: number of prompt tokens without padding
    end_tokens: tensors that contain the ids of end tokens
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
    """Run the engine until every sequence has ended, by a stopping criterion or at its maximum
    length.

    input_ids: padding and prompt of each sequence, of shape (batch, tokens)

    Returns the generated tokens of each sequence.
    """
    # Keys are sequences. Values are the numbers of generated tokens for which the stopping criteria
    # were already checked.
    lengths = dict.fromkeys(sequences, 0)
    prompts = dict(zip(sequences, input_ids, strict=True))
    while engine.has_unfinished_sequences:
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
    """Return whether a stopping criterion of `generate` ends a sequence.

    ids: the token ids of the sequence, of shape (1, tokens)
    """
    return bool(torch.as_tensor(criterion(ids, None)).all())


def _replace_processors_by_options(
    processors: abc.Sequence[LogitsProcessor], padding_length: int
) -> tuple[dict[str, Any], abc.Sequence[LogitsProcessor]]:
    """Replace logits processors by options of `SamplingOptions` that have the same effect.

    processors: the logits processors for one batch row
    padding_length: number of padding tokens in front of the row's prompt

    Returns (options, processors). If all processors can be replaced, `options` has their values and
    `processors` is empty. Otherwise none is replaced: `options` is empty, and the engine must call
    all processors for each tree node.

    The engine applies a repetition penalty to the whole prompt without padding. A processor for a
    repetition penalty is therefore replaced only if it applies the penalty to all prompt tokens
    except for the padding.
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
    """Raise ValueError for arguments of `generate` that this decoding loop does not support.

    config: the generation config
    arguments: the other arguments of `generate`, which it passes on to the model
    """
    unsupported = []
    if config.return_dict_in_generate:
        unsupported += [name for name in UNSUPPORTED_OUTPUT_OPTIONS if vars(config).get(name)]
    unsupported += sorted(
        name
        for name, value in arguments.items()
        if value is not None and name not in IGNORED_GENERATE_ARGUMENTS
    )
    if config.num_beams not in (None, 1):
        raise ValueError(
            f"num_beams={config.num_beams}: speculative decoding does not support beam search; "
            "use num_beams=1"
        )
    if unsupported:
        raise ValueError(
            f"generate was called with {', '.join(unsupported)}, which speculative decoding does "
            f"not support: remove {', '.join(unsupported)}"
        )
    if attention_mask is None:
        return
    if attention_mask.dim() != 2:
        raise ValueError(
            f"attention_mask has {attention_mask.dim()} dimensions: give a mask with 2 "
            "dimensions, (batch, tokens)"
        )
    if (attention_mask.diff(dim=1) < 0).any():
        raise ValueError(
            "attention_mask has padding on the right of a prompt: pad prompts on the left "
            "(tokenizer.padding_side = 'left')"
        )


def _concatenate_prompts_and_outputs(
    input_ids: torch.Tensor, outputs: list[list[int]], config: Any
) -> torch.Tensor:
    """Return prompts and outputs as one tensor of shape (batch, prompt tokens + output tokens).

    Outputs that are shorter than the longest one are padded at the end.

    input_ids: the prompts, of shape (batch, prompt tokens)
    outputs: generated token ids of each sequence
    config: the generation config, which has the padding token
    """
    longest = max(map(len, outputs))
    pad_token = vars(config).get("_pad_token_tensor")
    pad_token_id = 0 if pad_token is None else int(pad_token)
    new_ids = torch.full((len(outputs), longest), pad_token_id, dtype=torch.long)
    for row, output in enumerate(outputs):
        new_ids[row, : len(output)] = torch.tensor(output)
    return torch.cat([input_ids, new_ids.to(input_ids.device)], 1)
