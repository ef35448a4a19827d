"""Families of targets, tiny and random: trees, texts, features and refusals, against transformers'
own code."""

import gc
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from copy import deepcopy
from functools import cache

import pytest
import torch
from torch.profiler import profile
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig

from benchmarks.targets import measure_tree_difference
from infer.api import decode_prompts
from infer.config import DecodeOptions, DrafterConfig
from infer.drafters.build import create_drafter
from infer.targets.checks import check_model_size, find_safetensors_files
from infer.targets.kernel_decoder import KernelDecoder
from infer.targets.layer_weights import load_layers_embedding_and_head
from infer.targets.layers import UnsupportedLayer, build_kernel_decoder
from infer.targets.loading import (
    build_meta_model,
    load_config,
    load_model,
    load_target,
    read_weight_shapes,
)
from infer.targets.support import LogitScale, refuse_unsupported
from infer.targets.target import Target, compare_with_transformers
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import DraftTree, Proposal, make_root_trees

V = 97
SLIDING_WINDOW_SIZE = 3
TINY_MODEL_SIZES = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
}
MIXED_LAYER_TYPES = ["sliding_attention", "full_attention"] * 2
MOE_OPTIONS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
GEMMA_OPTIONS = {
    "query_pre_attn_scalar": 8,
    "sliding_window": SLIDING_WINDOW_SIZE,
    "layer_types": MIXED_LAYER_TYPES,
    "final_logit_softcapping": 3.0,
}
LINEAR_LAYER_TYPES = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
DELTA_RULE_OPTIONS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
DELTA_RULE_OPTIONS |= {"layer_types": LINEAR_LAYER_TYPES}
MLA_OPTIONS = {
    "kv_lora_rank": 12,
    "q_lora_rank": None,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
}
KIMI_OPTIONS = MLA_OPTIONS | {
    "layer_types": LINEAR_LAYER_TYPES,
    "linear_num_heads": 2,
    "linear_head_dim": 8,
    "num_experts": 4,
}
KIMI_OPTIONS |= {
    "num_key_value_heads": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 16,
    "num_shared_experts": 1,
}
LING_OPTIONS = KIMI_OPTIONS | {
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
MAMBA_OPTIONS = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": 6,
    "mamba_n_groups": 2,
    "mamba_expand": 2,
}
GRANITE_OPTIONS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
    "mamba_n_groups": 1,
}
NEMOTRON_OPTIONS = {
    "layers_block_type": ["linear_attention", "moe", "full_attention", "linear_attention", "mlp"]
}
NEMOTRON_OPTIONS |= {
    "mamba_num_heads": 4,
    "mamba_head_dim": 8,
    "ssm_state_size": 6,
    "n_groups": 2,
    "n_routed_experts": 4,
}
NEMOTRON_OPTIONS |= {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "moe_shared_expert_intermediate_size": 16,
}
ZAMBA_OPTIONS = {
    "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    "n_mamba_heads": 4,
}
ZAMBA_OPTIONS |= {
    "mamba_d_state": 6,
    "mamba_headdim": 16,
    "mamba_ngroups": 2,
    "use_mem_rope": True,
    "num_mem_blocks": 2,
}
DEEPSEEK_OPTIONS = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
}
DEEPSEEK_OPTIONS |= {
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 2,
    "n_group": 1,
    "topk_group": 1,
}
GEMMA_3N_OPTIONS = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": V,
}
GEMMA_3N_OPTIONS |= {
    "altup_num_inputs": 2,
    "laurel_rank": 4,
    "activation_sparsity_pattern": [0.0] * 4,
}
GEMMA_4_OPTIONS = {
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": V,
}
GEMMA_4_OPTIONS |= {"global_head_dim": 16}
LLAMA_4_OPTIONS = {
    "attention_chunk_size": SLIDING_WINDOW_SIZE,
    "no_rope_layer_interval": 2,
    "floor_scale": 400,
    "moe_layers": [1],
}
LLAMA_4_OPTIONS |= {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48}
MIMO_OPTIONS = {"n_routed_experts": 4}
LFM_3_OPTIONS = {
    "layer_types": ["conv", "sliding_attention", "full_attention", "conv"],
    "sliding_window": SLIDING_WINDOW_SIZE,
}
LFM_MOE_OPTIONS = {
    "layer_types": ["conv", "conv", "full_attention", "conv"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
}
LFM_MOE_OPTIONS |= {"moe_intermediate_size": 16, "num_dense_layers": 1}
TARGET_FAMILIES = {
    "qwen3": ("qwen3", {}),
    "qwen3 with a window": (
        "qwen3",
        {"use_sliding_window": True, "sliding_window": SLIDING_WINDOW_SIZE, "max_window_layers": 2},
    ),
    "qwen3 moe": ("qwen3_moe", MOE_OPTIONS | {"num_experts": 4}),
    "llama 3": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
    ),
    "mistral": ("mistral", {"sliding_window": SLIDING_WINDOW_SIZE}),
    "mixtral": (
        "mixtral",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW_SIZE},
    ),
    "gemma": ("gemma", {}),
    "gemma 2": ("gemma2", GEMMA_OPTIONS | {"attn_logit_softcapping": 2.0}),
    "gemma 3": ("gemma3_text", GEMMA_OPTIONS),
    "gpt-oss": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": SLIDING_WINDOW_SIZE},
    ),
    "qwen2": ("qwen2", {}),
    "qwen2 moe": (
        "qwen2_moe",
        MOE_OPTIONS | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "phi-3": ("phi3", {"sliding_window": SLIDING_WINDOW_SIZE}),
    "cohere 2": (
        "cohere2",
        {
            "sliding_window": SLIDING_WINDOW_SIZE,
            "layer_types": MIXED_LAYER_TYPES,
            "logit_scale": 0.25,
        },
    ),
    "granite": (
        "granite",
        {"logits_scaling": 4.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5},
    ),
    "olmo 3": ("olmo3", {"sliding_window": SLIDING_WINDOW_SIZE, "layer_types": MIXED_LAYER_TYPES}),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
    "qwen 3.5": ("qwen3_5_text", DELTA_RULE_OPTIONS),
    "qwen 3.5 moe": (
        "qwen3_5_moe_text",
        DELTA_RULE_OPTIONS
        | MOE_OPTIONS
        | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "qwen 3 next": (
        "qwen3_next",
        DELTA_RULE_OPTIONS
        | MOE_OPTIONS
        | {"num_experts": 4, "shared_expert_intermediate_size": 16},
    ),
    "olmo hybrid": ("olmo_hybrid", DELTA_RULE_OPTIONS | {"linear_key_head_dim": 6}),
    "kimi linear": ("kimi_linear", KIMI_OPTIONS),
    "nemotron h": ("nemotron_h", NEMOTRON_OPTIONS),
    "falcon h1": ("falcon_h1", MAMBA_OPTIONS | {"mamba_d_ssm": 64, "lm_head_multiplier": 0.5}),
    "bamba": ("bamba", MAMBA_OPTIONS | {"attn_layer_indices": [2]}),
    "granite 4": (
        "granitemoehybrid",
        MAMBA_OPTIONS | GRANITE_OPTIONS | {"layer_types": LINEAR_LAYER_TYPES},
    ),
    "zamba 2": ("zamba2", ZAMBA_OPTIONS),
    "lfm 2": ("lfm2", {"layer_types": ["conv", "conv", "full_attention", "conv"]}),
    "lfm 2 moe": ("lfm2_moe", LFM_MOE_OPTIONS),
    "lfm 3": ("lfm3", LFM_3_OPTIONS),
    "ling 3": ("bailing_hybrid", LING_OPTIONS),
    "deepseek 2": ("deepseek_v2", MLA_OPTIONS | DEEPSEEK_OPTIONS),
    "deepseek 3": ("deepseek_v3", MLA_OPTIONS | DEEPSEEK_OPTIONS | {"q_lora_rank": 8}),
    "glm 4 lite": ("glm4_moe_lite", MLA_OPTIONS | DEEPSEEK_OPTIONS | {"q_lora_rank": 8}),
    "gemma 3n": ("gemma3n_text", GEMMA_OPTIONS | GEMMA_3N_OPTIONS),
    "gemma 4": ("gemma4_text", GEMMA_OPTIONS | GEMMA_4_OPTIONS),
    "mimo": ("mimo_v2_flash", MOE_OPTIONS | MIMO_OPTIONS),
    "llama 4": ("llama4_text", LLAMA_4_OPTIONS),
}
TARGET_FAMILIES["llama 3"][1]["rope_parameters"] |= {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def family_config(name: str) -> PretrainedConfig:
    kind, options = TARGET_FAMILIES[name]
    config_class = type(AutoConfig.for_model(kind))
    return config_class(
        **{key: value for key, value in TINY_MODEL_SIZES.items() if hasattr(config_class, key)}
        | options
    )


@pytest.fixture(scope="session")
def tiny(random_target):
    """name -> a random target of that family. Read only."""
    return cache(lambda name: random_target(family_config(name)))


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(1, V, (length,), generator=generator).tolist() for length in lengths]


@pytest.fixture(params=TARGET_FAMILIES)
def target(tiny, request) -> Target:
    return tiny(request.param)


# their own code is slow on random weights; their greedy trees are tested as everybody's, below
SLOW_FAMILIES = {"gemma 3n", "falcon h1", "zamba 2", "bamba", "granite 4"}


# whose last norm, or embedding in the files, has a name of its own
FAMILIES_WITH_OTHER_PARAMETER_NAMES = {
    "nemotron h",
    "falcon h1",
    "bamba",
    "zamba 2",
    "lfm 2",
    "lfm 2 moe",
    "lfm 3",
    "ling 3",
}


@pytest.mark.parametrize("name", TARGET_FAMILIES)
def test_a_saved_model_is_not_refused_when_it_is_loaded(tiny, name, tmp_path):
    """No family has tensors that loading takes for missing or unexpected ones, experts one by one
    among them."""
    model = tiny(name).model
    model.save_pretrained(tmp_path)
    path = str(tmp_path)
    config = load_config(str(tmp_path))
    shapes = read_weight_shapes(path, tmp_path)
    empty = build_meta_model(config, dtype=torch.float32)
    check_model_size(path, empty, shapes)
    loaded = load_model(path, torch.device("cpu"), config, {"dtype": torch.float32})
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in model.state_dict().items())
    layers = range(config.get_text_config().num_hidden_layers)
    with (
        nullcontext()
        if name not in FAMILIES_WITH_OTHER_PARAMETER_NAMES
        else pytest.raises(ValueError, match="(norm|tensor).*; .*set features=null")
    ):
        files = find_safetensors_files(path, tmp_path)
        load_layers_embedding_and_head(
            path, files, empty, layers, torch.float32, torch.device("cpu")
        )


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.robustness if name in SLOW_FAMILIES else ())
        for name in TARGET_FAMILIES
    ],
)
def test_every_node_has_the_logits_of_its_own_sequence(tiny, name):
    assert measure_tree_difference(tiny(name)) < (
        4e-4 if name == "qwen 3 next" else 1e-4
    )  # see the last test


def test_greedy_trees_write_what_generate_writes(scripted_drafter, hugging_face, target):
    texts = prompts(5, 16)
    expected = [hugging_face(target, text, 9) for text in texts]
    full_sequences = [[*text, *more] for text, more in zip(texts, expected, strict=True)]
    drafter = create_drafter(
        DrafterConfig(layers=1, block_size=4, target_layer_ids=[1], mask_token_id=96), target
    )
    drafter.init_weights(torch.Generator().manual_seed(0))
    for guess in (drafter, scripted_drafter(full_sequences, 5, V)):
        options = DecodeOptions(
            method="ddtree", budget=7, max_new_tokens=9, max_num_seqs=2, ignore_eos=True
        )
        generations = decode_prompts(target, guess, texts, options)
        assert [text.ids for text in generations] == expected
    assert (
        sum(text.stats.tau for text in generations) > 3
    )  # of the scripted drafter: whole paths were committed


def test_embeddings_are_what_enters_the_first_layer(target):
    seen = []
    ids = torch.tensor(prompts(5))
    hook = target.decoder.layers[0].register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]),
        with_kwargs=True,
    )
    with torch.no_grad():
        target.model(ids)
        hook.remove()
        first = seen[0] if seen[0].ndim == 3 else seen[0][0]  # of several streams (Gemma 3n)
        assert torch.allclose(first, target.embed(ids), atol=1e-6)


def test_packed_documents_give_what_single_ones_give(target):
    """Longer than the window, and another one before: a window that counted places in the row would
    reach into it."""
    lengths = (9, 14, 3)
    ids = torch.tensor([sum(prompts(*lengths), [])])
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    documents = torch.cat([torch.full((length,), i) for i, length in enumerate(lengths)])[None]
    features = target.compute_packed_features(ids, positions, documents, (0, 2))
    begin = 0
    for length in lengths:
        document = slice(begin, begin + length)
        out = target.model(ids[:, document], output_hidden_states=True)
        states = [states if states.ndim == 3 else states[0] for states in out.hidden_states]
        expected = torch.cat([states[1], states[3]], -1)
        assert torch.allclose(
            features.layer_features[:, document],
            expected,
            atol=1e-5 * max(10, expected.abs().max().item()),
        )
        assert torch.allclose(
            target.compute_logits(features.last_hidden_states[:, document]), out.logits, atol=1e-4
        )
        begin += length


def test_windows_of_fixed_shapes_see_the_same(tiny):
    """A pass for a CUDA graph looks at more places and has more rows than are used: windows count
    positions."""
    target = tiny("gemma 3")
    tree = build_ddtree(Proposal(torch.tensor([1, 2, 3]), torch.randn(3, 4, V).log_softmax(-1), 6))
    cache = target.allocate_cache(4, 40)
    with torch.no_grad(), cache.add_rows(3) as new_rows:
        target.extend_cache(prompts(9, 17, 4), new_rows, ())
    outputs = [target.verify(tree, tree.build_ancestor_mask(), cache).last_hidden_states]
    four = DraftTree(
        *(torch.cat([column, column[:1]]) for column in (tree.tokens, tree.parents, tree.depths)),
        None,
        4,
    )
    with cache.fix_batch_size(4):
        assert cache.make_view(7).visible_end == 40 and cache.get_device_lengths(4).tolist() == [
            9,
            17,
            4,
            0,
        ]
        outputs.append(
            target.verify(four, four.build_ancestor_mask(), cache).last_hidden_states[:3]
        )
    assert torch.allclose(*outputs, atol=1e-5)


@pytest.mark.parametrize("family", ["dflash", "dart"])
@pytest.mark.parametrize(("name", "dflash", "dart"), [
    ("qwen3", True, True),
    ("qwen3 with a window", True, True),
    ("llama 3", False, True),
    ("mistral", False, True),
    ("gemma", False, False),
    ("gemma 3", False, False),
    ("gpt-oss", False, False),
    ("granite", False, False),
    ("qwen2", False, False),
    ("phi-3", False, False),
])  # fmt: skip
def test_drafters_start_as_layers_that_work_like_theirs(tiny, name, family, dflash, dart):
    """Gemma's and Granite's layers have the shapes of Llama's, and do something else."""
    target = tiny(name)
    warm = {"dflash": dflash, "dart": dart}[family]
    options = DrafterConfig(family=family, layers=1, target_layer_ids=[1], mask_token_id=96)
    if family == "dart":
        options.target_layer_ids = [0, 1, 2]
    drafter = create_drafter(options, target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    assert drafter.warm_start(target) == warm
    same = [torch.equal(before[name], tensor) for name, tensor in drafter.state_dict().items()]
    assert all(same) != warm


def test_the_drafter_takes_the_rotary_base_of_layers_that_see_everything(tiny):
    options = DrafterConfig(layers=1, target_layer_ids=[1], mask_token_id=96)
    rope = create_drafter(options, tiny("gemma 3")).config.rope_parameters
    assert rope == {"rope_type": "default", "rope_theta": 1e6}  # the other layers' is 10,000
    assert create_drafter(options, tiny("llama 3")).config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 5e5,
    }


def test_a_warm_drafters_keys_are_the_targets_own_where_rotary_positions_are_scaled(
    tiny, random_target
):
    config = deepcopy(tiny("qwen3").config)
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    config.rope_parameters = yarn | {"partial_rotary_factor": 1.0}
    config.max_position_embeddings = 256
    target = random_target(config)
    drafter = create_drafter(
        DrafterConfig(layers=1, target_layer_ids=[1], mask_token_id=96), target
    )
    assert drafter.config.rope_parameters == yarn
    drafter.initialize(target, torch.Generator().manual_seed(0), warm_start=True)
    ids = prompts(40)
    state = drafter.allocate_state(1, 50)
    memory = target.allocate_cache(1, 50)
    with memory.add_rows(1) as row, state.add(1) as drafter_row, torch.no_grad():
        context = target.extend_cache(ids, row, drafter.layer_ids).layer_features
        drafter.update_context(target, context, torch.tensor(ids), [40], drafter_row)
    # keys of its layer, and of layer 2
    drafter_keys = state.cache.buffer[0, :40]
    target_keys = memory.buffer[4, :40]
    assert (drafter_keys - target_keys).abs().max() < 1e-4 * target_keys.abs().max()


@pytest.mark.needs("dart")  # whose head is its own
def test_drafts_go_through_the_targets_own_scale(tiny):
    """A state that both heads see gives one distribution: soft-capped."""
    target = tiny("gemma 2")
    drafter = create_drafter(
        DrafterConfig(family="dart", layers=1, target_layer_ids=[0, 1, 2]), target
    )
    drafter.initialize(target, torch.Generator().manual_seed(0), warm_start=False)
    assert torch.equal(drafter.lm_head.weight, target.head_weight)
    states = 5 * torch.randn(3, 32)
    with torch.no_grad():
        logits = target.compute_logits(states)
    assert logits.abs().max() <= 3 < (states @ target.head_weight.T).abs().max()
    state = drafter.allocate_state(1, 20)
    with state.add(1) as drafter_row:
        drafter.update_context(
            target, torch.randn(1, 4, 96), torch.tensor([[1, 2, 3, 4]]), [4], drafter_row
        )
    drafter.lm_head.weight.data *= 100
    marginals = drafter.draft_block(target, torch.tensor([5]), state).marginals
    assert (marginals.amax(-1) - marginals.amin(-1)).max() <= 6 + 1e-4


@pytest.mark.parametrize(
    "scale", [LogitScale(cap=2.0), LogitScale(divisor=4.0), LogitScale(0.5, 3.0)]
)
def test_the_derivative_of_a_logit_scale_is_that_of_autograd(scale):
    products = torch.randn(50, dtype=torch.float64).mul(3).requires_grad_()
    logits = scale(products)
    logits.sum().backward()
    derivative = scale.derivative(logits.detach())
    assert torch.allclose(
        products.grad, torch.as_tensor(derivative, dtype=torch.float64).expand(50), rtol=1e-9
    )


def stored(target: Target, folder, repo) -> str:
    """A family's target on disk, with the embedded tokenizer."""
    target.model.save_pretrained(folder)
    for file in (repo / "data" / "embedded").glob("tokenizer*.json"):
        shutil.copy(file, folder)
    return str(folder)


@pytest.mark.parametrize("name", ["gemma 2", "gemma 3", "gpt-oss"])
def test_loading_chooses_attention_that_is_right(tiny, name, tmp_path, repo):
    tiny_target = tiny(name)
    target = load_target(stored(tiny_target, tmp_path, repo), dtype="float32", device="cpu")
    assert target.config._attn_implementation == ("sdpa" if name == "gemma 3" else "eager")
    ids = torch.tensor(prompts(12))
    with torch.no_grad():
        assert torch.allclose(target.model(ids).logits, tiny_target.model(ids).logits, atol=1e-5)
    partial_target = load_target(str(tmp_path), dtype="float32", device="cpu", only_layers=[2])
    assert torch.equal(partial_target.embed(ids), tiny_target.embed(ids))
    states = torch.randn(3, 32)
    assert torch.equal(partial_target.compute_logits(states), tiny_target.compute_logits(states))
    assert torch.equal(partial_target.decoder.norm(states), tiny_target.decoder.norm(states))
    with pytest.raises(ValueError, match="does not support the masks of draft trees"):
        model = AutoModelForCausalLM.from_pretrained(
            str(tmp_path), attn_implementation="flex_attention"
        )
        Target(model)


@pytest.mark.parametrize(("kind", "options", "says"), [
    ("mamba", {}, "recurrent layers"),
    ("mamba2", {}, "recurrent layers"),
    ("jamba", {}, "recurrent layers"),
    ("recurrent_gemma", {}, "recurrent layers"),
    ("bart", {}, "an encoder"),
    ("t5", {}, "an encoder"),
    ("gpt2", {}, "in place of rotary positions"),
    ("bloom", {}, "in place of rotary positions"),
    ("mpt", {}, "in place of rotary positions"),
    ("falcon", {"alibi": True}, "in place of rotary positions"),
    ("deepseek_v4", {}, "layers of unsupported types"),
    ("gemma3_text", {"use_bidirectional_attention": True}, "attend to later positions"),
    ("qwen3", {"masked_diffusion": {"shifted": True}}, "no left-to-right order"),
])  # fmt: skip
def test_what_trees_would_get_wrong_is_refused_from_the_config(kind, options, says):
    config = AutoConfig.for_model(kind, **options)
    with pytest.raises(ValueError, match=f"{says}.*cannot be verified") as error:
        refuse_unsupported(config)
    assert "\n" not in str(error.value)


def test_refusals_come_before_weights(tmp_path, repo):
    """A folder without weights: a target that can be loaded would miss them."""
    from transformers import PhiConfig, Qwen3Config

    for config, says in (
        (AutoConfig.for_model("jamba"), "recurrent layers"),
        (PhiConfig(num_hidden_layers=1), "no language model head, or a head with a bias"),
        (Qwen3Config(num_hidden_layers=1), "no file named model.safetensors"),
    ):
        config.save_pretrained(tmp_path)
        for file in (repo / "data" / "embedded").glob("tokenizer*.json"):
            shutil.copy(file, tmp_path)
        with pytest.raises((ValueError, OSError), match=says):
            load_target(str(tmp_path))


def test_text_in_a_multimodal_wrapper_is_a_target(tiny):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    vision |= {"image_size": 28, "patch_size": 14}
    text = family_config("gemma 3")
    text.final_logit_softcapping = None  # the wrapper has none, as no Gemma 3 has
    config = Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4, image_token_index=95
    )
    model = Gemma3ForConditionalGeneration._from_config(config, attn_implementation="sdpa")
    model.model.language_model.load_state_dict(tiny("gemma 3").decoder.state_dict())
    assert measure_tree_difference(Target(model), rounds=1) < 1e-4


def test_angles_that_change_with_the_length_stay_where_they_do_not():
    """Phi-3's long variants turn all angles at once when a text passes the original length."""
    from transformers import Phi3Config, Phi3ForCausalLM

    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "long_factor": [2.0] * 4,
        "short_factor": [1.0] * 4,
    }
    sizes = {key: value for key, value in TINY_MODEL_SIZES.items() if key != "head_dim"}
    target = Target(
        Phi3ForCausalLM(
            Phi3Config(**sizes, rope_parameters=rope, original_max_position_embeddings=32)
        )
    )
    target.allocate_cache(1, 32)
    with pytest.raises(
        ValueError, match="33 positions are needed, but .* change beyond 32 positions"
    ):
        target.allocate_cache(1, 33)


def test_queries_scaled_by_their_place_stay_where_they_are_not(tiny):
    """Llama 4's, in layers without rotary positions: places in a tree or a packed row are not
    positions."""
    target = tiny("llama 4")
    ids = torch.zeros(1, 400, dtype=torch.long)
    target.allocate_cache(1, 399)
    with pytest.raises(ValueError, match="scales change beyond 399 positions"):
        target.allocate_cache(1, 400)
    with pytest.raises(ValueError, match="set a smaller data.length"):
        target.compute_packed_features(ids, ids, ids, ())


FAMILIES_WITH_MIXED_CACHES = {"qwen 3.5", "qwen 3.5 moe", "qwen 3 next", "olmo hybrid"}
FAMILIES_WITH_MIXED_CACHES |= {
    "kimi linear",
    "nemotron h",
    "falcon h1",
    "bamba",
    "granite 4",
    "zamba 2",
    "lfm 2",
    "lfm 2 moe",
}
FAMILIES_WITH_MIXED_CACHES |= {
    "lfm 3",
    "ling 3",
    "deepseek 2",
    "deepseek 3",
    "glm 4 lite",
    "gemma 4",
    "mimo",
}
FAMILIES_TESTED_AT_LENGTH = sorted(
    FAMILIES_WITH_MIXED_CACHES | {"gemma 3n", "llama 4"}
)  # states, shared or compressed keys and values, several heads
# soft-capped scores, sinks, one norm a layer, norms of what is added
FAMILIES_OUR_DECODER_REFUSES = {"gemma 2", "gpt-oss", "cohere 2", "olmo 3", "gemma 3n", "llama 4"}


@pytest.mark.filterwarnings("ignore:.*through transformers")
@pytest.mark.parametrize("name", TARGET_FAMILIES)
def test_our_decoder_is_used_where_it_computes_the_same(tiny, name):
    """Every other test of this file decodes through it; other arithmetic is noticed, and a line
    says so."""
    assert tiny(name).cache_shapes.has_only_uniform_attention == (
        name not in FAMILIES_WITH_MIXED_CACHES
    )
    assert isinstance(tiny(name).run_decoder, KernelDecoder) == (
        name not in FAMILIES_OUR_DECODER_REFUSES | {*FAMILIES_WITH_MIXED_CACHES}
    )
    if not tiny(name).kernel_decoder:
        return
    ids = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(1))
    rows = ids, torch.arange(24).expand(2, -1), torch.zeros_like(ids), (0, 1, 2, 3, 4)
    actual = tiny(name).compute_packed_features(*rows).layer_features
    expected = tiny(name).compute_packed_features(*rows, use_transformers=True).layer_features
    assert (actual - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.filterwarnings("error:.*through transformers")
def test_rounding_of_the_stream_is_no_other_arithmetic():
    """The embedded target's last layers add next to nothing, in 16 bits less than the stream's
    rounding."""
    assert isinstance(load_target("embedded", dtype="bfloat16").run_decoder, KernelDecoder)


def test_a_layer_that_computes_something_else_is_noticed(random_target):
    target = random_target(family_config("qwen3"))
    mlp = target.decoder.layers[2].mlp
    mlp.act_fn = torch.nn.GELU()
    kernel_decoder = build_kernel_decoder(
        target.decoder, ["full_attention"] * 4, 4, 2, target.embed, target.kernels
    )
    mlp.act_fn = torch.nn.SiLU()
    with pytest.raises(UnsupportedLayer, match="the outputs of our decoder differ"):
        compare_with_transformers(target, kernel_decoder)


@pytest.mark.filterwarnings("ignore:.*through transformers")
@pytest.mark.parametrize("name", ["qwen3", "gemma 2"])  # through our own decoder, and through hooks
def test_threads_share_a_target(random_target, name):
    """Each has the features of its own text, though within a pass all others have turns."""
    target = random_target(family_config(name))

    def features(text: list[int]) -> torch.Tensor:
        rows = (
            torch.tensor([text]),
            torch.arange(len(text))[None],
            torch.zeros(1, len(text), dtype=torch.long),
        )
        return target.compute_packed_features(*rows, (1, 3)).layer_features

    texts = prompts(5, 9, 14, 6, 11, 8)
    alone = [features(text) for text in texts]
    target.__dict__.pop("kernel_decoder")  # made anew, by six threads at once
    target.decoder.layers[2].register_forward_pre_hook(lambda *_: time.sleep(0.01))
    with ThreadPoolExecutor(6) as pool:
        assert all(map(torch.equal, pool.map(features, texts), alone))


def test_no_hooks_stay_behind(random_target):
    model = random_target(family_config("qwen3")).model
    for _ in range(3):
        Target(model).extend_cache(
            [[1, 2, 3]], Target(model).allocate_cache(1, 8).add_rows(1).__enter__(), (1,)
        )
    gc.collect()
    assert not [hook for layer in model.get_decoder().layers for hook in layer._forward_hooks]


def test_a_plain_pass_is_short(random_target):
    """What costs time on a small target is how many operators there are, views and those inside
    others included: of a layer, and beside the layers."""
    counts = []
    for layers in (2, 6):
        target = random_target(
            type(family_config("qwen3"))(**TINY_MODEL_SIZES | {"num_hidden_layers": layers})
        )
        cache = target.allocate_cache(1, 40)
        tree = make_root_trees(torch.tensor([5]))
        with torch.inference_mode(), cache.add_rows(1) as rows:
            target.extend_cache(prompts(9), rows, ())
        with torch.inference_mode(), profile() as seen:
            target.verify(tree, tree.build_ancestor_mask(), cache)
        counts.append(sum(event.name.startswith("aten::") for event in seen.events()))
    of_layer = (counts[1] - counts[0]) / 4
    assert (
        of_layer <= 120 and counts[0] - 2 * of_layer <= 95
    )  # with rms_norm and masks: 208 and 158


def test_our_decoder_leaves_weights_as_they_are_saved(random_target, tmp_path):
    """Products are joined and modules become views of them."""
    target = random_target(family_config("qwen3"))
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    assert target.kernel_decoder is not None
    target.model.save_pretrained(tmp_path)
    after = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.robustness
@pytest.mark.parametrize("name", FAMILIES_TESTED_AT_LENGTH)
def test_large_trees_behind_long_prompts(tiny, name):
    """Three random trees of 40 nodes a row behind prompts of unlike lengths, one of them longer
    than two pieces of a recurrence. Qwen3-Next's random weights differ by 2.2e-4 in float32, and by
    5e-14 where both compute in float64."""
    worst = measure_tree_difference(tiny(name), (149, 5, 67), rounds=3, nodes=40)
    print(f"\n{name:20} {worst:.1e}", end="  ")
    assert worst < (4e-4 if name == "qwen 3 next" else 1e-4)
