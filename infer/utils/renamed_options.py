"""Options that have been renamed since an earlier version.

If the user gives an old name, an error message says the new name. If an earlier version saved old
names in the configuration of a run, they are replaced by the new names, so that the run can be
resumed and its checkpoints can be used.
"""

import re
from typing import Any

# Keys are old option names, values are the new names, as they are written on the command line. An
# option without a dot in its name belongs to only one command (train, features, regenerate, ngram
# or diffusion).
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


def explain_renamed_option_error(message: str) -> str | None:
    """If an error message of OmegaConf is about the old name of an option, return a sentence with
    the new name. Return None for all other messages.

    message: OmegaConf's message, which names the option as in "full_key: optim.batch"
    """
    full_key = re.search(r"full_key: ([\w.]+)", message)
    if full_key is None or full_key[1] not in RENAMED_OPTIONS:
        return None
    return f"{full_key[1]} has been renamed; use {RENAMED_OPTIONS[full_key[1]]}"


def rename_old_options(config: dict[str, Any]) -> dict[str, Any]:
    """Replace old option names by new ones in the saved configuration of a run. Return the new
    configuration.

    config: nested dictionaries, as in the run's config.json
    """
    return rename_old_options_in_section(config, "")


def rename_old_options_in_section(section: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Replace old option names by new ones in one section of a saved configuration. Return the new
    section.

    prefix: the section's name followed by a dot, such as "optim."; "" for the whole configuration
    """
    translated = {}
    for name, value in section.items():
        new_name = RENAMED_OPTIONS.get(prefix + name, prefix + name).removeprefix(prefix)
        if isinstance(value, dict):
            value = rename_old_options_in_section(value, f"{prefix}{name}.")
        translated[new_name] = value
    return translated
