"""Check that other projects' code and ours compute the same with one drafter folder.

    python benchmarks/others_drafters.py --authors model.py --jetspec draft_head.py \
        --nemo draft_qwen3.py
    python benchmarks/others_drafters.py --deepspec DeepSpec --specforge SpecForge \
        --treeflash tree_flash.py
    python benchmarks/others_drafters.py --angelslim AngelSlim --angelspec AngelSpec
    <an environment with speculators>/bin/python benchmarks/others_drafters.py --speculators

Arguments are files of the projects that define the drafter's class: the DFlash authors'
`dflash/model.py`, JetSpec's `models/draft_head.py`, NeMo Automodel's `dflash/draft_qwen3.py`,
TreeFlash's `tree_flash.py`; of the others they are the projects' folders. Each class creates a
drafter with random weights, saves it with its own code, and drafts a block after random features,
and with a conditional head after random tokens. Our code loads that folder and drafts the same.
Printed is the largest difference of log-probabilities, or why we refuse the folder.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer import load_drafter
from infer.drafters.heads.draft import teacher_forced_log_probs
from infer.targets.target import Target

RANDOM_VOCABULARY_SIZE = 97
RANDOM_MASK_TOKEN_ID = 96
RANDOM_BLOCK_SIZE = 6
RANDOM_TARGET_LAYER_IDS = [1, 4]
RANDOM_TARGET_LAYERS = 6
RANDOM_CONTEXT_TOKENS = 40
RANDOM_MODEL_SIZES = {
    "vocab_size": RANDOM_VOCABULARY_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
SLIDING_WINDOW_OPTIONS = {
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 9,
    "use_sliding_window": True,
}
# The context is shorter than the window, so that the window has no effect.
MIXED_ATTENTION_OPTIONS = SLIDING_WINDOW_OPTIONS | {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,
}
MARKOV_HEAD_OPTIONS = {
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 5,
}
DOMINO_OPTIONS = {"projector_type": "domino", "emb_dim": 5, "gru_hidden_dim": 12}
SELECTOR_OPTIONS = {"selector_rank": 5, "selector_top_k": 7}
XPRESS_OPTIONS = {"xpress_rank": 5, "xpress_mlp_ratio": 3}
# By project: (name, options of config.json at the top level, options of the drafter) of each case.
PROJECT_CASES = {
    "authors": [
        ("full", {}, {}),
        ("is_causal", {"is_causal": True}, {}),
        ("sliding", SLIDING_WINDOW_OPTIONS, {}),
        ("sliding, not causal", SLIDING_WINDOW_OPTIONS | {"is_causal": False}, {}),
    ],
    "jetspec": [
        ("bidirectional", {}, {"causal_head": False}),
        ("causal_head", {}, {"causal_head": True}),
    ],
    "nemo": [
        ("full", {"is_causal": False}, {}),
        ("sliding", SLIDING_WINDOW_OPTIONS | {"is_causal": False}, {}),
        ("JetSpec recipe", {"is_causal": False}, {"causal": True}),
    ],
    "deepspec": [
        (kind, MARKOV_HEAD_OPTIONS | {"markov_head_type": kind}, {})
        for kind in ("vanilla", "gated", "rnn")
    ]
    + [("DFlash", {"markov_rank": 0, "enable_confidence_head": False}, {})],
    "specforge": [
        *(
            (f"DSpark {kind}", {}, MARKOV_HEAD_OPTIONS | {"markov_head_type": kind})
            for kind in ("vanilla", "gated", "rnn")
        ),
        ("Domino", {}, DOMINO_OPTIONS | {"pure_draft_prefix_len": 1, "shift_label": True}),
        (
            "Domino, unshifted",
            {},
            DOMINO_OPTIONS | {"pure_draft_prefix_len": 0, "shift_label": False},
        ),
    ],
    "treeflash": [("swiglu", {}, {})],
    "angelslim": [("DFlash", {}, {}), ("DFlare", {}, {})],
    "angelspec": [
        ("DFlash", {"model_arch": "dflash"}, {}),
        ("DFlare", {"model_arch": "dflare"}, {}),
    ],
    "speculators": [
        ("dflash, full", {}, {}),
        ("dflash, mixed", MIXED_ATTENTION_OPTIONS, {}),
        *(
            (f"dspark {kind}", {}, MARKOV_HEAD_OPTIONS | {"markov_head_type": kind})
            for kind in ("vanilla", "gated", "rnn")
        ),
        (
            "dspark, anchor only",
            {},
            MARKOV_HEAD_OPTIONS | {"markov_head_type": "gated", "sample_from_anchor": False},
        ),
        ("dflash2", {}, SELECTOR_OPTIONS),
        ("dflash2, mixed", MIXED_ATTENTION_OPTIONS, SELECTOR_OPTIONS),
        ("dflash2, from anchor", {}, SELECTOR_OPTIONS | {"sample_from_anchor": True}),
        ("xpress", {}, XPRESS_OPTIONS),
        ("xpress, from anchor", {}, XPRESS_OPTIONS | {"sample_from_anchor": True}),
    ],
}


@dataclass
class BlockInputs:
    """Inputs of a forward pass over one block."""

    target: Target
    features: torch.Tensor  # (1, T, F) context features
    ids: torch.Tensor  # (1, K) the bonus token and mask tokens
    tokens: torch.Tensor  # (1, K + 1) the bonus token and the tokens after it

    @property
    def block_embeddings(self) -> torch.Tensor:
        """Embeddings of `ids`, (1, K, D)."""
        return self.target.embed(self.ids)

    def previous_tokens(self, from_anchor: bool) -> torch.Tensor:
        """Return the token before each slot of the block, (1, K).

        from_anchor: whether the bonus token's slot drafts a token
        """
        if from_anchor:
            return self.tokens[:, :-1]
        return torch.cat([self.tokens[:, :1], self.tokens[:, : RANDOM_BLOCK_SIZE - 1]], 1)


def load_class(file: str, name: str) -> type:
    """Return a class of a file outside this project."""
    spec = spec_from_file_location("others", file)
    module = module_from_spec(spec)
    sys.modules["others"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_module_without_packages(path: str, name: str) -> ModuleType:
    """Import a module of a project's folder without its packages' __init__ files.

    These import optional dependencies of the project.
    """
    package_names = name.split(".")
    for i in range(1, len(package_names)):
        package = ModuleType(".".join(package_names[:i]))
        package.__path__ = [str(Path(path, *package_names[:i]))]
        sys.modules.setdefault(package.__name__, package)
    return import_module(name)


def randomise_weights(model: torch.nn.Module) -> None:
    """Draw random weights with a standard deviation of 0.2; one-dimensional ones around 1."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = mean + 0.2 * torch.randn(parameter.shape, generator=generator)


def build_qwen3_config(config_options: dict, drafter_options: dict | None) -> Qwen3Config:
    """Return the config of a drafter in the public layout.

    drafter_options: further keys of its `dflash_config`; None: no `dflash_config`
    """
    config = Qwen3Config(
        **RANDOM_MODEL_SIZES
        | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}
        | config_options
    )
    config._attn_implementation = "sdpa"
    if drafter_options is not None:
        config.block_size = RANDOM_BLOCK_SIZE
        config.num_target_layers = RANDOM_TARGET_LAYERS
        config.dflash_config = {
            "mask_token_id": RANDOM_MASK_TOKEN_ID,
            "target_layer_ids": RANDOM_TARGET_LAYER_IDS,
        } | drafter_options
    return config


BLOCK_POSITIONS = torch.arange(RANDOM_CONTEXT_TOKENS + RANDOM_BLOCK_SIZE)[None]


def run_public_class(
    file: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Save a random drafter of the public DFlash class; return its logits of a block, (K, V)."""
    if project == "angelslim":
        source = "angelslim.compressor.speculative.train.models.draft.qwen_"
        model_class = vars(load_module_without_packages(file, source + case.lower()))[
            f"Qwen{case}DraftModel"
        ]
    else:
        model_class = load_class(
            file, "Qwen3DFlashDraftModel" if project == "nemo" else "DFlashDraftModel"
        )
    model = model_class(build_qwen3_config(config_options, drafter_options)).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    states = model(
        position_ids=BLOCK_POSITIONS,
        noise_embedding=block_inputs.block_embeddings,
        target_hidden=block_inputs.features,
    )[0]
    return block_inputs.target.compute_logits(states)


def run_angelspec(
    path: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Do as `run_public_class` with AngelSpec's classes. Its converter writes one name for both."""
    load_module_without_packages(path, "angelspec.models.draft.dflash")
    module = load_module_without_packages(path, f"angelspec.models.draft.{case.lower()}")
    sizes = {
        key: value for key, value in RANDOM_MODEL_SIZES.items() if key != "rope_parameters"
    } | {"rope_theta": 5e4}
    taps = {
        "target_layer_ids": RANDOM_TARGET_LAYER_IDS,
        "num_target_layers": len(RANDOM_TARGET_LAYER_IDS),
        "target_num_hidden_layers": RANDOM_TARGET_LAYERS,
    }
    config = module.DFlashConfig(
        **sizes,
        **taps,
        **config_options,
        num_hidden_layers=2,
        target_hidden_size=32,
        mask_token_id=RANDOM_MASK_TOKEN_ID,
    )
    model = vars(module)[f"{case}DraftModel"](config).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    file = Path(folder, "config.json")
    # A user of AngelSpec has to add these keys.
    user_keys = {"architectures": ["DFlashDraftModel"], "block_size": RANDOM_BLOCK_SIZE}
    file.write_text(json.dumps(json.loads(file.read_text()) | user_keys))
    context = model.extract_context_feature(
        list(block_inputs.features.chunk(len(RANDOM_TARGET_LAYER_IDS), -1))
    )
    return block_inputs.target.compute_logits(
        model(
            block_inputs.ids,
            context,
            BLOCK_POSITIONS[:, RANDOM_CONTEXT_TOKENS:],
            BLOCK_POSITIONS[:, :RANDOM_CONTEXT_TOKENS],
        )[0]
    )


def run_treeflash(
    file: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Do as `run_public_class` with TreeFlash's class."""
    config = build_qwen3_config(config_options, drafter_options)
    config.treeflash_config = {"ar_approximation": "swiglu", "candidate_tokens": 16}
    model = load_class(file, "TreeFlashDraftModel")(config).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    previous_tokens = block_inputs.target.embed(block_inputs.previous_tokens(from_anchor=False))
    states = model(
        BLOCK_POSITIONS,
        previous_tokens,
        block_inputs.block_embeddings,
        target_hidden=block_inputs.features,
    )
    return block_inputs.target.compute_logits(states[0])


def run_deepspec(
    path: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Do as `run_public_class` with DeepSpec's class, which has its own embedding and head."""
    sys.path.insert(0, path)
    config = build_qwen3_config(config_options, None)
    config.mask_token_id = RANDOM_MASK_TOKEN_ID
    config.target_layer_ids = RANDOM_TARGET_LAYER_IDS
    config.num_anchors = 8
    config.block_size = RANDOM_BLOCK_SIZE
    config.num_target_layers = RANDOM_TARGET_LAYERS
    model = import_module("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel(config).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    inputs = {
        "noise_embedding": model.embed_tokens(block_inputs.ids),
        "target_hidden_states": block_inputs.features,
    }
    states = model._forward_backbone(position_ids=BLOCK_POSITIONS, **inputs)
    logits = model.compute_logits(states)
    if model.markov_head is None:
        return logits[0]
    inputs = {"token_ids": block_inputs.previous_tokens(True)[None], "hidden_states": states[None]}
    return model.markov_head.apply_block_logits(logits[None], **inputs)[0, 0]


def run_specforge(
    path: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Do as `run_public_class` with SpecForge's classes."""
    sys.path.insert(0, path)
    name = "Domino" if drafter_options.get("projector_type") == "domino" else "DSpark"
    model_class = getattr(
        import_module(f"specforge.modeling.draft.{name.lower()}"), f"{name}DraftModel"
    )
    model = model_class(build_qwen3_config(config_options, drafter_options)).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    states = model(
        position_ids=BLOCK_POSITIONS,
        noise_embedding=block_inputs.block_embeddings,
        target_hidden=block_inputs.features,
    )
    # Domino's network reads the tokens from the bonus token on, whatever its slot drafts.
    if name == "Domino":
        tokens = block_inputs.previous_tokens(True)
        previous_tokens = {"prev_token_embeddings": block_inputs.target.embed(tokens)[None]}
    else:
        previous_tokens = {"prev_token_ids": block_inputs.previous_tokens(True)[None]}
    return model.apply_logits_head(
        block_inputs.target.compute_logits(states)[None],
        hidden_states=states[None],
        **previous_tokens,
    )[0, 0]


def build_speculators_config(kind: str, tokens: int):
    """Return the common config of speculators' drafters, for greedy drafts of `tokens` tokens."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="x/y", architectures=["Qwen3ForCausalLM"]),
    )


def run_speculators(
    path: str,
    case: str,
    project: str,
    config_options: dict,
    drafter_options: dict,
    folder: str,
    block_inputs: BlockInputs,
) -> torch.Tensor:
    """Do as `run_public_class` with speculators' classes, layer by layer under their own mask."""
    from speculators.model import SpeculatorModel

    kinds = {"markov_rank": "dspark", "selector_rank": "dflash2", "xpress_rank": "xpress"}
    kind = next((kinds[key] for key in drafter_options if key in kinds), "dflash")
    names = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress"}
    config_of = getattr(
        import_module(f"speculators.models.{kind}"), f"{names[kind]}SpeculatorConfig"
    )
    layer_config = build_qwen3_config(config_options, None)
    layer_config._attn_implementation = "eager"
    config = config_of(
        transformer_layer_config=layer_config,
        draft_vocab_size=RANDOM_VOCABULARY_SIZE,
        block_size=RANDOM_BLOCK_SIZE,
        aux_hidden_state_layer_ids=[layer + 1 for layer in RANDOM_TARGET_LAYER_IDS],
        mask_token_id=RANDOM_MASK_TOKEN_ID,
        speculators_config=build_speculators_config(kind, RANDOM_BLOCK_SIZE - 1),
        **drafter_options,
    )
    model = SpeculatorModel.registry[kind](config=config).eval()
    randomise_weights(model)
    model.save_pretrained(folder)
    documents = torch.zeros(1, RANDOM_CONTEXT_TOKENS + 1, dtype=torch.long)
    anchors = torch.tensor([RANDOM_CONTEXT_TOKENS])
    features = block_inputs.features
    states = block_inputs.block_embeddings
    context = model.hidden_norm(
        model.fc(torch.cat([features, features[:, :1]], 1))
    )  # the anchor's own feature is masked
    positions = torch.cat(
        [
            torch.arange(RANDOM_CONTEXT_TOKENS + 1),
            RANDOM_CONTEXT_TOKENS + torch.arange(RANDOM_BLOCK_SIZE),
        ]
    )[None]
    rotary = model.rotary_emb(states, positions)
    for i, layer in enumerate(model.layers):
        window = model.sliding_window if i in model.sliding_window_indices else None
        mask = model._create_attention_mask(
            documents,
            RANDOM_CONTEXT_TOKENS + 1,
            anchors,
            states.device,
            window,
            model.sliding_window_non_causal,
        )
        states = layer(
            hidden_states=states,
            target_hidden=context,
            attention_mask=mask,
            position_embeddings=rotary,
        )
    states = model.norm(states)
    logits = block_inputs.target.compute_logits(states)
    previous_tokens = block_inputs.previous_tokens(config.sample_from_anchor)
    if kind == "dflash2":
        ids, scores = model.candidate_selector.select(logits, states, previous_tokens)
        return torch.full_like(logits, -torch.inf).scatter(2, ids, scores)[0]
    if kind == "dspark":  # a recurrent head starts at the bonus token's slot
        return (
            logits
            + model.markov_head.block_bias(prev_token_ids=previous_tokens, hidden_states=states)
        )[0]
    if kind == "xpress":
        return (logits + model.refiner_head.block_bias(previous_tokens, states))[0]
    return logits[0]


PROJECT_FORWARDS = {
    "authors": run_public_class,
    "jetspec": run_public_class,
    "nemo": run_public_class,
    "angelslim": run_public_class,
    "angelspec": run_angelspec,
    "deepspec": run_deepspec,
    "specforge": run_specforge,
    "treeflash": run_treeflash,
    "speculators": run_speculators,
}


def bind_case(project: str, source: str, case: tuple[str, dict, dict], folder: str):
    """Return a function of `BlockInputs` that saves a case's drafter and returns its logits."""
    name, config_options, drafter_options = case
    return partial(
        PROJECT_FORWARDS[project],
        source,
        name,
        project,
        config_options,
        dict(drafter_options),
        folder,
    )


@torch.no_grad()
def compare_folder(compute_logits, folder: str) -> str:
    """Return the largest difference of log-probabilities, or why we refuse the folder."""
    torch.manual_seed(0)
    config = Qwen3Config(
        **RANDOM_MODEL_SIZES | {"num_hidden_layers": RANDOM_TARGET_LAYERS, "initializer_range": 0.2}
    )
    target = Target(Qwen3ForCausalLM(config))
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(
        1, RANDOM_CONTEXT_TOKENS, len(RANDOM_TARGET_LAYER_IDS) * 32, generator=generator
    )
    tokens = torch.cat(
        [torch.tensor([[7]]), torch.randint(90, (1, RANDOM_BLOCK_SIZE), generator=generator)], 1
    )
    ids = torch.tensor([[7] + [RANDOM_MASK_TOKEN_ID] * (RANDOM_BLOCK_SIZE - 1)])
    logits = compute_logits(BlockInputs(target, features, ids, tokens))
    try:
        drafter = load_drafter(folder)
    except ValueError as error:
        return f"refused: {str(error).removeprefix(folder + ': ')}"
    reference_log_probs = logits[drafter.first_draft_slot :].log_softmax(-1)
    state = drafter.allocate_state(1, RANDOM_CONTEXT_TOKENS + RANDOM_BLOCK_SIZE)
    with state.add(1) as row:
        drafter.update_context(
            target,
            features,
            torch.zeros(1, RANDOM_CONTEXT_TOKENS, dtype=torch.long),
            [RANDOM_CONTEXT_TOKENS],
            row,
        )
    block = drafter.draft_block(target, tokens[:, 0], state)
    our_log_probs = block.marginals[0]
    if drafter.head_spec is not None:
        our_log_probs = teacher_forced_log_probs(
            drafter, target, block, tokens[:, : len(reference_log_probs)]
        )[0]
    if not torch.equal(our_log_probs.isinf(), reference_log_probs.isinf()):
        return "other candidates"
    return f"{(our_log_probs - reference_log_probs).nan_to_num(0).abs().max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("authors", "jetspec", "nemo", "treeflash"):
        parser.add_argument(f"--{name}", help="file that defines the class")
    for name in ("deepspec", "specforge", "angelslim", "angelspec"):
        parser.add_argument(f"--{name}", help="folder of the project")
    parser.add_argument("--speculators", action="store_true")
    args = parser.parse_args()
    for project, cases in PROJECT_CASES.items():
        if not getattr(args, project):
            continue
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                result = compare_folder(
                    bind_case(project, getattr(args, project), case, folder), folder
                )
                architectures = json.loads((Path(folder) / "config.json").read_text())[
                    "architectures"
                ]
                print(f"{project:<12} {case[0]:<20} {architectures[0]:<24} {result}")


if __name__ == "__main__":
    main()
