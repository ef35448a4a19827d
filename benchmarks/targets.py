"""Which models can be targets: one tiny random model of every class that `AutoModelForCausalLM`
knows, checked.

    python benchmarks/targets.py [--only llama,mamba] [--write docs/targets.md]

A model is right if in float32 every node of random trees behind two prompts of unlike lengths,
before and after a path was committed, has the logits of its own sequence by transformers itself,
and packed documents have those of single ones. `--write` puts the lists between the marks of the
page. About ten minutes on a core.
"""

import argparse
import re
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

from infer.targets.loading import without_memory
from infer.targets.support import refuse_unsupported
from infer.targets.target import Target, pad_ids
from infer.trees.ddtree import ddtree
from infer.trees.tree import Proposal

V = 97
LARGEST = 20_000_000
TOLERANCE = 2e-4
OUTCOMES = ("right", "refused", "wrong", "no tiny model")
# sizes of a tiny model by any of the names that configurations have for them
TINY = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), V),
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
ENDS = ("bos_token_id", "eos_token_id", "pad_token_id")
LINEAR = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
MLA = {"num_key_value_heads": 4}
# what the names above do not decide
OWN = {
    **dict.fromkeys(
        ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_linear", "bailing_hybrid", "youtu"),
        MLA,
    ),
    **dict.fromkeys(("longcat_flash", "minicpm3", "axk1"), MLA),
    **dict.fromkeys(
        ("granitemoehybrid", "kimi_linear", "bailing_hybrid"), {"layer_types": LINEAR} | MLA
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
    """What came out for one model type."""

    kind: str
    outcome: str  # one of OUTCOMES
    why: str = ""


def tiny_config(kind: str) -> PretrainedConfig:
    """Return a configuration of this model type with small sizes: in its text part, where it has
    parts."""
    known = type(AutoConfig.for_model(kind))
    parts = getattr(known, "sub_configs", {})
    if "text_config" in parts:
        text = tiny_config(AutoConfig.for_model(kind).get_text_config().model_type)
        return known(text_config=text.to_dict())
    sizes = {
        key: value
        for key, value in TINY.items()
        if hasattr(known, key) or key in known.attribute_map
    }
    sizes = {
        key: value
        for key, value in sizes.items()
        if not isinstance(getattr(known, key, None), property)
    }
    ends = {
        name: 0 if getattr(known, name, None) is not None else None
        for name in ENDS
        if hasattr(known, name)
    }
    return known(**sizes | ends | OWN.get(kind, {}))


def tiny_model(config: PretrainedConfig) -> nn.Module:
    """Return a random model. Raises ValueError where the sizes did not become small."""
    meta = without_memory(config)
    if sum(parameter.numel() for parameter in meta.parameters()) > LARGEST:
        raise ValueError("its sizes have other names")
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=meta.config._attn_implementation
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.25 * torch.randn(parameter.shape, generator=generator)
        if parameter.ndim == 1:
            parameter.data += 0.5
    return model.eval()


def differs(ours: torch.Tensor, own: torch.Tensor) -> float:
    """Return the largest difference of logits, relative to the largest of them."""
    return float((ours - own).abs().max() / own.abs().max().clamp(min=1))


@torch.no_grad()
def tree_difference(
    target: Target, lengths: Sequence[int] = (5, 21), rounds: int = 2, nodes: int = 12
) -> float:
    """Return how far nodes of random trees differ from their own sequences, over rounds with
    commits between, behind prompts that enter in two passes."""
    generator = torch.Generator().manual_seed(2)
    vocabulary = target.head_weight.shape[0]
    rows = range(len(lengths))
    room = max(lengths) + 6 * rounds + nodes + 1
    texts = [torch.randint(1, V, (length,), generator=generator).tolist() for length in lengths]
    cache = target.cache(len(rows), room)
    worst = 0.0
    with cache.add(len(rows)) as part:
        target.extend([text[: len(text) // 3 * 2] for text in texts], part, ())
        target.extend([text[len(text) // 3 * 2 :] for text in texts], part, ())
    for _ in range(rounds):
        logits = torch.rand(len(rows), 5, vocabulary, generator=generator)
        logits[:, 1:, :3] += torch.tensor([30.0, 20.0, 0.0])
        logits[:, 0, 7:10] += 20  # three long paths, one after the other
        bonus = torch.randint(1, V, (len(rows),), generator=generator)
        tree = ddtree(Proposal(bonus, logits.log_softmax(-1), nodes))
        ancestors = tree.ancestors()
        ours = target.head(target.verify(tree, ancestors, cache).last)
        lines = [[row.nonzero()[:, 0].tolist() for row in ancestors[b]] for b in rows]
        for b in rows:
            paths = [texts[b] + tree.tokens[b, line].tolist() for line in lines[b]]
            own = target.model(input_ids=pad_ids(paths, target.device)).logits
            ends = torch.tensor([len(path) for path in paths]) - 1
            worst = max(worst, differs(ours[b], own[torch.arange(len(paths)), ends]))
        kept = [max(lines[b], key=len)[: 6 - b] for b in rows]
        width = max(map(len, kept))
        path = torch.tensor([line + line[-1:] * (width - len(line)) for line in kept])
        counts = [len(line) for line in kept]
        cache.commit(path, torch.tensor(counts))
        cache.note_lengths(counts)
        texts = [text + tree.tokens[b, kept[b]].tolist() for b, text in enumerate(texts)]
    return worst


@torch.no_grad()
def packed_difference(target: Target, lengths: tuple[int, ...] = (9, 14, 3)) -> float:
    """Return how far packed documents differ from single ones."""
    ids = torch.randint(1, V, (1, sum(lengths)), generator=torch.Generator().manual_seed(4))
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    ours = target.head(target.packed_features(ids, positions, documents, (0, 2)).last)
    own = [target.model(input_ids=part).logits for part in ids.split(lengths, dim=1)]
    return differs(ours, torch.cat(own, 1))


def judge(kind: str) -> Verdict:
    """Check one model type."""
    try:
        config = tiny_config(kind)
    except Exception as error:
        return Verdict(kind, "no tiny model", first_line(error))
    try:
        refuse_unsupported(config)
    except ValueError as error:
        return Verdict(kind, "refused", reason(error))
    try:
        model = tiny_model(config)
    except Exception as error:
        return Verdict(kind, "no tiny model", first_line(error))
    try:
        target = Target(model)
    except ValueError as error:
        return Verdict(kind, "refused", reason(error))
    try:
        worst = max(tree_difference(target), packed_difference(target))
    except Exception as error:
        return Verdict(kind, "wrong", first_line(error))
    return Verdict(
        kind,
        "right" if worst < TOLERANCE else "wrong",
        f"logits differ by {worst:.0e} of the largest",
    )


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:60]


def reason(error: ValueError) -> str:
    """Return what a refusal names: what stands between the model's name and the colon."""
    found = re.search(r"\) (?:has|is) (.*?)(?:: |$)", str(error))
    return (found[1] if found else str(error)).split(" (")[0]


def listing(verdicts: list[Verdict]) -> str:
    """Return the table of docs/targets.md: a row for each outcome and reason."""
    rows: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        why = "" if verdict.outcome == "right" else verdict.why
        rows.setdefault((verdict.outcome, why), []).append(verdict.kind)
    order = sorted(rows.items(), key=lambda row: (OUTCOMES.index(row[0][0]), -len(row[1])))
    lines = [
        f"transformers {transformers.__version__}, `python benchmarks/targets.py --write docs/targets.md`:\n",
        "| outcome | why | number | model types |\n| --- | --- | ---: | --- |",
        *(
            f"| {outcome} | {why} | {len(kinds)} | {', '.join(kinds)} |"
            for (outcome, why), kinds in order
        ),
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="model types, with commas between")
    parser.add_argument("--write", type=Path, help="the page to put the lists into")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.set_verbosity_error()
    kinds = args.only.split(",") if args.only else sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    verdicts = []
    for kind in kinds:
        verdicts.append(judge(kind))
        print(f"{kind:28}{verdicts[-1].outcome:16}{verdicts[-1].why}", flush=True)
    print(f"\n{sum(v.outcome == 'right' for v in verdicts)} of {len(verdicts)} right")
    if args.write:
        page = args.write.read_text()
        marked = re.compile("(<!-- classes -->\n).*?(<!-- /classes -->)", re.DOTALL)
        args.write.write_text(
            marked.sub(lambda found: f"{found[1]}{listing(verdicts)}\n{found[2]}", page)
        )


if __name__ == "__main__":
    main()
