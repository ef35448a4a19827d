"""Options whose names differ from those in earlier versions.

An old name on the command line or in a configuration file is refused with a message that gives the
new name. Old names in the configuration that an earlier version saved with a run are translated, so
that the run can be resumed and its checkpoints can be used.
"""

import re
from typing import Any

# Key: an option's old name. Value: its new name. Both are full names, as on the command line. A
# name without a section belongs to only one of the commands train, features, regenerate, ngram and
# diffusion.
RENAMED_OPTIONS = {
    "anchors": "anchors_per_sequence",
    "document_anchors": "anchors_per_document",
    "recompute": "gradient_checkpointing",
    "train": "trainable",
    "ngrams": "count_ngrams",
    "save_minutes": "save_interval_minutes",
    "stall_minutes": "stall_timeout_minutes",
    "store": "store_dtype",
    "at_once": "max_concurrent_requests",
    "capacity": "max_length",
    "threshold": "min_count",
    "start": "init",
    "batch": "batch_size",
    "target.sizes": "target.model_config",
    "drafter.last_tap": "drafter.last_layer_output",
    "drafter.convolutions": "drafter.conv_kernel_size",
    "drafter.vocabulary": "drafter.draft_vocab_size",
    "drafter.window": "drafter.sliding_window",
    "drafter.head.hidden": "drafter.head.hidden_size",
    "drafter.head.confidence": "drafter.head.confidence_head",
    "decoding.continuity": "decoding.ngrams",
    "decoding.rows": "decoding.max_num_seqs",
    "decoding.positions": "decoding.max_num_batched_tokens",
    "decoding.prefix_memory": "decoding.prefix_cache_mib",
    "masked.rows": "masked.max_num_seqs",
    "masked.nodes": "masked.budget",
    "evaluation.outside": "evaluation.external_prompts",
    "evaluation.prompt_tokens": "evaluation.max_prompt_tokens",
    "evaluation.sampled": "evaluation.sampling_temperature",
    "evaluation.minutes": "evaluation.max_minutes",
    "evaluation.continuity": "evaluation.ngrams",
    "data.parts": "data.datasets",
    "data.limit": "data.max_examples",
    "data.max_invalid": "data.max_invalid_fraction",
    "suite.limit": "suite.max_questions",
    "server.max_texts": "server.max_requests",
    "server.max_body": "server.max_body_bytes",
    "server.memory": "server.memory_limit_mib",
    "server.open": "server.allow_unauthenticated",
    "questions.tokens": "questions.length_range",
    "objective.unary": "objective.marginal_weight",
    "objective.weights": "objective.position_weights",
    "optim.batch": "optim.batch_size",
    "optim.micro": "optim.micro_batch_size",
    "optim.warmup": "optim.warmup_ratio",
    "optim.clip": "optim.max_grad_norm",
    "optim.minutes": "optim.max_minutes",
}


def new_name_in(message: str) -> str | None:
    """Return a sentence with an option's new name if one of OmegaConf's error messages is about the
    option's old name; None if the message is about any other option. The message names the option
    as in "full_key: optim.batch"."""
    full_key = re.search(r"full_key: ([\w.]+)", message)
    if full_key is None or full_key[1] not in RENAMED_OPTIONS:
        return None
    return f"{full_key[1]} has been renamed; use {RENAMED_OPTIONS[full_key[1]]}"


def translate_saved_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the saved configuration of a run with old option names replaced by new ones. The
    configuration consists of nested dictionaries, as in the run's config.json."""
    return translate_section(config, "")


def translate_section(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Return one section of a saved configuration with old option names replaced by new ones.

    prefix: the section's full name followed by a dot; an empty text for the whole configuration
    """
    translated = {}
    for name, value in section.items():
        new_name = RENAMED_OPTIONS.get(prefix + name, prefix + name).removeprefix(prefix)
        if isinstance(value, dict):
            value = translate_section(value, f"{prefix}{name}.")
        translated[new_name] = value
    return translated
