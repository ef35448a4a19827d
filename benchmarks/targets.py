"""Check which models can be targets, with a tiny random one of every `AutoModelForCausalLM` class.

    python benchmarks/targets.py [--only llama,mamba] [--write docs/targets.md]

A model type works if two comparisons in float32 give equal logits. First, the logits of every node
of random draft trees are compared with those of transformers for the sequence that ends at this
node, after two prompts of different lengths, before and after a path is committed. Second, the
logits of packed documents are compared with those of transformers for each single document.
`--write` replaces the table in the page. The script takes about a minute on one core.
"""

import argparse
import re
import textwrap
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from infer.targets.loading import build_meta_model
from infer.targets.support import refuse_unsupported
from infer.targets.target import Target, pad_token_ids
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import Proposal

TINY_TARGET_VOCABULARY_SIZE = 97
MAX_TINY_PARAMETERS = 20_000_000
MAX_RELATIVE_DIFFERENCE = 2e-4
MAX_ERROR_CHARACTERS = 60
WORKS = "works"
REFUSED = "refused"
FAILS = "fails"
NOT_CHECKED = "not checked"
# The order of the outcomes in the table.
VERDICT_OUTCOMES = (WORKS, REFUSED, FAILS, NOT_CHECKED)
TABLE_INTRODUCTION = """\
The table lists the model types of transformers {version} by outcome. The script created a tiny
model of each type. "Works" means that this project and transformers computed equal logits, except
for rounding, so models of this type can be targets. "Refused" means that models of this type cannot
be targets: commands print the reason and end before they load weights. "Fails" means that the
logits differ, or that computing them raised an exception: do not use such a model as a target. "Not
checked" means that the script could not create a tiny model of this type.""".replace("\n", " ")
# Sizes of a tiny model, by all names that configurations use for them.
TINY_CONFIG_SIZES = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), TINY_TARGET_VOCABULARY_SIZE),
    **dict.fromkeys(
        (
            "hidden_size",
            "n_embd",
            "d_model",
            "embed_dim",
            "emb_dim",
            "word_embed_proj_dim",
            "width",
        ),
        32,
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size", "decoder_ffn_dim"), 48
    ),
    **dict.fromkeys(
        ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 4
    ),
    **dict.fromkeys(
        ("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4
    ),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2
    ),
    **dict.fromkeys(
        ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 16
    ),
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "expert_ffn_hidden_size", "expert_hidden_size"), 16
    ),
    **dict.fromkeys(
        (
            "n_group",
            "topk_group",
            "first_k_dense_replace",
            "num_shared_experts",
            "n_shared_experts",
        ),
        1,
    ),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_heads"), 2),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_headdim", "mamba_head_dim"), 16),
    **dict.fromkeys(
        ("mamba_n_heads", "n_mamba_heads", "mamba_num_heads", "linear_num_value_heads"), 4
    ),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "index_n_heads"), 6),
    **dict.fromkeys(("mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), 5),
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 12),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "head_dim"), 8),
    **{
        "num_key_value_heads": 2,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "mamba_d_ssm": 64,
    },
    **{
        "mamba_expand": 2,
        "laurel_rank": 4,
        "num_kv_shared_layers": 2,
        "num_mem_blocks": 1,
        "rotary_dim": 4,
    },
}
SPECIAL_TOKEN_OPTIONS = ("bos_token_id", "eos_token_id", "pad_token_id")
MOSTLY_LINEAR_LAYER_TYPES = [
    "linear_attention",
    "linear_attention",
    "full_attention",
    "linear_attention",
]
MLA_CONFIG_OPTIONS = {"num_key_value_heads": 4}
# Further options by model type.
MODEL_TYPE_OPTIONS = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "bailing_hybrid", "youtu"),
        MLA_CONFIG_OPTIONS,
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3", "axk1"), MLA_CONFIG_OPTIONS),
    **dict.fromkeys(
        ("granitemoehybrid", "kimi_linear", "bailing_hybrid"),
        {"layer_types": MOSTLY_LINEAR_LAYER_TYPES} | MLA_CONFIG_OPTIONS,
    ),
    "bamba": {"attn_layer_indices": [2]},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"]},
    "lfm3": {"layer_types": ["conv", "sliding_attention", "full_attention", "conv"]},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_head_dim": 8,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "use_mem_rope": True},
    "gemma3n_text": {"activation_sparsity_pattern": [0.0] * 4, "altup_num_inputs": 2},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"] * 2},
}


@dataclass(frozen=True)
class Verdict:
    """Result for one model type.

    outcome: one of VERDICT_OUTCOMES
    reason_text: the reason, as in the table of the page
    details_text: the error or the difference of the logits, which is only printed
    """

    model_type: str
    outcome: str
    reason_text: str
    details_text: str = ""


def build_tiny_config(model_type: str) -> PretrainedConfig:
    """Return a configuration with small sizes; of a multimodal model, with a small text config."""
    config_class = type(AutoConfig.for_model(model_type))
    sub_configs = getattr(config_class, "sub_configs", {})
    if "text_config" in sub_configs:
        text = build_tiny_config(AutoConfig.for_model(model_type).get_text_config().model_type)
        return config_class(text_config=text.to_dict())
    sizes = {
        key: value
        for key, value in TINY_CONFIG_SIZES.items()
        if hasattr(config_class, key) or key in config_class.attribute_map
    }
    sizes = {
        key: value
        for key, value in sizes.items()
        if not isinstance(getattr(config_class, key, None), property)
    }
    ends = {
        name: 0 if getattr(config_class, name, None) is not None else None
        for name in SPECIAL_TOKEN_OPTIONS
        if hasattr(config_class, name)
    }
    return config_class(**sizes | ends | MODEL_TYPE_OPTIONS.get(model_type, {}))


def build_tiny_model(config: PretrainedConfig) -> nn.Module:
    """Return a random model. Raises ValueError if it is not small."""
    meta = build_meta_model(config)
    if sum(parameter.numel() for parameter in meta.parameters()) > MAX_TINY_PARAMETERS:
        raise ValueError("the tiny model is too large")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=meta.config._attn_implementation
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.25 * torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data += 0.5
    return model.eval()


def relative_difference(our_logits: torch.Tensor, reference_logits: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest reference logit."""
    return float(
        (our_logits - reference_logits).abs().max() / reference_logits.abs().max().clamp(min=1)
    )


@torch.no_grad()
def measure_tree_difference(
    target: Target, lengths: Sequence[int] = (5, 21), rounds: int = 2, nodes: int = 12
) -> float:
    """Return the relative difference of nodes of random trees from their own sequences.

    Prompts of these lengths are prefilled in two passes; a path is committed after each round.
    """
    generator = torch.Generator().manual_seed(2)
    vocabulary = target.head_weight.shape[0]
    rows = range(len(lengths))
    capacity = max(lengths) + 6 * rounds + nodes + 1
    texts = [
        torch.randint(1, TINY_TARGET_VOCABULARY_SIZE, (length,), generator=generator).tolist()
        for length in lengths
    ]
    cache = target.allocate_cache(len(rows), capacity)
    largest_difference = 0.0
    with cache.add_rows(len(rows)) as batch_rows:
        target.extend_cache([text[: len(text) // 3 * 2] for text in texts], batch_rows, ())
        target.extend_cache([text[len(text) // 3 * 2 :] for text in texts], batch_rows, ())
    for _ in range(rounds):
        logits = torch.rand(len(rows), 5, vocabulary, generator=generator)
        logits[:, 1:, :3] += torch.tensor([30.0, 20.0, 0.0])
        logits[:, 0, 7:10] += 20  # gives the tree three long paths
        bonus = torch.randint(1, TINY_TARGET_VOCABULARY_SIZE, (len(rows),), generator=generator)
        tree = build_ddtree(Proposal(bonus, logits.log_softmax(-1), nodes))
        ancestors = tree.build_ancestor_mask()
        our_logits = target.compute_logits(target.verify(tree, ancestors, cache).last_hidden_states)
        paths_by_row = [[row.nonzero()[:, 0].tolist() for row in ancestors[b]] for b in rows]
        for b in rows:
            paths = [texts[b] + tree.tokens[b, line].tolist() for line in paths_by_row[b]]
            reference_logits = target.model(input_ids=pad_token_ids(paths, target.device)).logits
            ends = torch.tensor([len(path) for path in paths]) - 1
            largest_difference = max(
                largest_difference,
                relative_difference(
                    our_logits[b], reference_logits[torch.arange(len(paths)), ends]
                ),
            )
        committed_nodes = [max(paths_by_row[b], key=len)[: 6 - b] for b in rows]
        width = max(map(len, committed_nodes))
        path = torch.tensor([line + line[-1:] * (width - len(line)) for line in committed_nodes])
        counts = [len(line) for line in committed_nodes]
        cache.commit(path, torch.tensor(counts))
        cache.update_host_lengths(counts)
        texts = [text + tree.tokens[b, committed_nodes[b]].tolist() for b, text in enumerate(texts)]
    return largest_difference


@torch.no_grad()
def measure_packed_difference(target: Target, lengths: tuple[int, ...] = (9, 14, 3)) -> float:
    """Return the relative difference of packed documents from single ones."""
    ids = torch.randint(
        1,
        TINY_TARGET_VOCABULARY_SIZE,
        (1, sum(lengths)),
        generator=torch.Generator().manual_seed(4),
    )
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    our_logits = target.compute_logits(
        target.compute_packed_features(ids, positions, documents, (0, 2)).last_hidden_states
    )
    reference_logits = [
        target.model(input_ids=document_ids).logits for document_ids in ids.split(lengths, dim=1)
    ]
    return relative_difference(our_logits, torch.cat(reference_logits, 1))


def check_model_type(model_type: str) -> Verdict:
    """Build a tiny model of one type and check it as a target."""
    try:
        config = build_tiny_config(model_type)
    except Exception as error:
        reason_text = "the configuration class of transformers rejects the sizes of the tiny model"
        return Verdict(model_type, NOT_CHECKED, reason_text, format_error(error))
    try:
        refuse_unsupported(config)
    except ValueError as error:
        return Verdict(model_type, REFUSED, extract_refusal_reason(error))
    try:
        model = build_tiny_model(config)
    except Exception as error:
        reason_text = describe_build_error(error)
        return Verdict(model_type, NOT_CHECKED, reason_text, format_error(error))
    try:
        target = Target(model)
    except ValueError as error:
        return Verdict(model_type, REFUSED, extract_refusal_reason(error))
    try:
        largest_difference = max(measure_tree_difference(target), measure_packed_difference(target))
    except Exception as error:
        return Verdict(model_type, FAILS, f"computing the logits raises `{format_error(error)}`")
    details_text = f"the largest difference is {largest_difference:.0e} of the largest logit"
    if largest_difference < MAX_RELATIVE_DIFFERENCE:
        return Verdict(model_type, WORKS, "the logits equal those of transformers", details_text)
    return Verdict(model_type, FAILS, "the logits differ from those of transformers", details_text)


def format_error(error: Exception) -> str:
    """Return an error's first line, cut to at most 60 characters."""
    first_line = f"{type(error).__name__}: {error}".splitlines()[0]
    return textwrap.shorten(first_line, MAX_ERROR_CHARACTERS, placeholder=" ...")


def describe_build_error(error: Exception) -> str:
    """Return the reason why no tiny model was created, as in the table of the page."""
    if isinstance(error, ImportError):
        return "the model class of transformers needs a Python package that is not installed"
    if "too large" in str(error):
        return "the script does not know the names of the sizes in the configuration"
    return f"creating the tiny model in transformers raises `{format_error(error)}`"


def extract_refusal_reason(error: ValueError) -> str:
    """Return the reason in a refusal, without the model's name, config keys and consequences."""
    match = re.search(r"\) (has .*?)(?: \(|, so that|, which is|; |$)", str(error))
    return f"the model {match[1]}" if match else str(error)


def format_table(verdicts: list[Verdict]) -> str:
    """Return the table of docs/targets.md with its introduction. The table has a row for each
    outcome and reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        rows.setdefault((verdict.outcome, verdict.reason_text), []).append(verdict.model_type)
    order = sorted(rows.items(), key=lambda row: (VERDICT_OUTCOMES.index(row[0][0]), -len(row[1])))
    lines = [
        TABLE_INTRODUCTION.format(version=transformers.__version__),
        "",
        "| outcome | reason | number of model types | model types (`model_type` in config.json) |",
        "| --- | --- | ---: | --- |",
        *(
            f"| {outcome} | {reason_text} | {len(model_types)} | {', '.join(model_types)} |"
            for (outcome, reason_text), model_types in order
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="model types, separated by commas")
    parser.add_argument("--write", type=Path, help="page whose table is replaced")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    model_types = args.only.split(",") if args.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts = []
    for model_type in model_types:
        verdict = check_model_type(model_type)
        verdicts.append(verdict)
        reason_and_details = "; ".join(filter(None, [verdict.reason_text, verdict.details_text]))
        print(f"{model_type:28}{verdict.outcome:16}{reason_and_details}", flush=True)
    number_of_working_types = sum(verdict.outcome == WORKS for verdict in verdicts)
    print(f"\n{number_of_working_types} of {len(verdicts)} model types work")
    if args.write:
        page = args.write.read_text()
        marked = re.compile("(<!-- classes -->\n).*?(<!-- /classes -->)", re.DOTALL)
        args.write.write_text(
            marked.sub(lambda match: f"{match[1]}\n{format_table(verdicts)}\n\n{match[2]}", page)
        )


if __name__ == "__main__":
    main()
