"""Whether other projects' code and ours read one folder in the same way, on random weights.

    python benchmarks/others_drafters.py --authors model.py --jetspec draft_head.py --nemo draft_qwen3.py
    <an environment with speculators>/bin/python benchmarks/others_drafters.py --speculators

The files are those of the projects that define the drafter's class: the DFlash authors' `dflash/model.py`, JetSpec's
`models/draft_head.py`, NeMo Automodel's `dflash/draft_qwen3.py`. Each class makes a drafter, saves it as it does, and
drafts a block behind random features; we load that folder and draft the same. Printed is the largest difference of
log-probabilities, or why we refuse the folder.
"""

import argparse
import json
import sys
import tempfile
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from infer import load_drafter
from infer.targets.target import Target

VOCABULARY, MASK, BLOCK, TAPS, LAYERS, CONTEXT = 97, 96, 6, [1, 4], 6, 40
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e4},
}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}
MIXED = WINDOW | {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64}  # beyond it, by design
CASES = {  # by project: name and what its config.json says beside the sizes
    "authors": [
        ("full", {}, {}),
        ("is_causal", {"is_causal": True}, {}),
        ("sliding", WINDOW, {}),
        ("sliding, not causal", WINDOW | {"is_causal": False}, {}),
    ],
    "jetspec": [("bidirectional", {}, {"causal_head": False}), ("causal_head", {}, {"causal_head": True})],
    "nemo": [
        ("full", {"is_causal": False}, {}),
        ("sliding", WINDOW | {"is_causal": False}, {}),
        ("JetSpec recipe", {"is_causal": False}, {"causal": True}),
    ],
    "speculators": [("full", {}, {}), ("mixed", MIXED, {})],
}


def load_class(file: str, name: str) -> type:
    """Return a class of a file outside this project."""
    spec = spec_from_file_location("others", file)
    module = module_from_spec(spec)
    sys.modules["others"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def randomise(model: torch.nn.Module) -> None:
    """Draw weights that say something: matrices of deviation 0.2, norms around one."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = mean + 0.2 * torch.randn(parameter.shape, generator=generator)


def public(kind: type, more: dict, own: dict, folder: str, blocks: torch.Tensor, features: torch.Tensor):
    """Save a drafter of a class in the public layout; return its states of a block, (BLOCK, D)."""
    config = Qwen3Config(**SIZES | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2} | more)
    config.block_size, config.num_target_layers = BLOCK, LAYERS
    config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": TAPS} | own
    config._attn_implementation = "sdpa"
    model = kind(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    positions = torch.arange(CONTEXT + BLOCK)[None]
    return model(position_ids=positions, noise_embedding=blocks, target_hidden=features)[0]


def speculators(more: dict, folder: str, blocks: torch.Tensor, features: torch.Tensor):
    """The same for speculators' class, whose layers are run one by one under its own mask."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    inner = Qwen3Config(**SIZES | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2} | more)
    inner._attn_implementation = "eager"
    config = DFlashSpeculatorConfig(
        transformer_layer_config=inner,
        draft_vocab_size=VOCABULARY,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in TAPS],
        mask_token_id=MASK,
        speculators_config=SpeculatorsConfig(
            algorithm="dflash",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=BLOCK - 1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path="x/y", architectures=["Qwen3ForCausalLM"]),
        ),
    )
    model = DFlashDraftModel(config=config).eval()
    randomise(model)
    model.save_pretrained(folder)
    documents, anchors = torch.zeros(1, CONTEXT + 1, dtype=torch.long), torch.tensor([CONTEXT])
    context = model.hidden_norm(model.fc(torch.cat([features, features[:, :1]], 1)))  # the anchor's own is not seen
    positions = torch.cat([torch.arange(CONTEXT + 1), CONTEXT + torch.arange(BLOCK)])[None]
    rotary = model.rotary_emb(blocks, positions)
    states = blocks
    for i, layer in enumerate(model.layers):
        window = model.sliding_window if i in model.sliding_window_indices else None
        mask = model._create_attention_mask(documents, CONTEXT + 1, anchors, blocks.device, window, False)
        states = layer(hidden_states=states, target_hidden=context, attention_mask=mask, position_embeddings=rotary)
    return model.norm(states)[0]


@torch.no_grad()
def compare(states_of, folder: str) -> str:
    """Return the largest difference of log-probabilities, or the reason of a refusal."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS, "initializer_range": 0.2})
    target = Target(Qwen3ForCausalLM(config))
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, CONTEXT, len(TAPS) * 32, generator=generator)
    ids = torch.tensor([[7] + [MASK] * (BLOCK - 1)])
    states = states_of(target.embed(ids), features)
    theirs = target.head(states[1:]).log_softmax(-1)
    try:
        drafter = load_drafter(folder)
    except ValueError as error:
        return f"refused: {str(error).removeprefix(folder + ': ')}"
    state = drafter.state(1, CONTEXT + BLOCK)
    with state.add(1) as row:
        drafter.update_context(target, features, torch.zeros(1, CONTEXT, dtype=torch.long), [CONTEXT], row)
    ours = drafter.draft(target, torch.tensor([7]), state)[0]
    return f"{(ours - theirs).abs().max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("authors", "jetspec", "nemo"):
        parser.add_argument(f"--{name}", help="the file of the class")
    parser.add_argument("--speculators", action="store_true")
    args = parser.parse_args()
    names = {"authors": "DFlashDraftModel", "jetspec": "DFlashDraftModel", "nemo": "Qwen3DFlashDraftModel"}
    for project, cases in CASES.items():
        if not getattr(args, project):
            continue
        for case, more, own in cases:
            with tempfile.TemporaryDirectory() as folder:
                if project == "speculators":
                    found = compare(lambda *given, f=folder, m=more: speculators(m, f, *given), folder)
                else:
                    kind = load_class(getattr(args, project), names[project])
                    found = compare(lambda *given, k=kind, f=folder, m=more, o=own: public(k, m, o, f, *given), folder)
                named = json.loads((Path(folder) / "config.json").read_text())["architectures"]
                print(f"{project:<12} {case:<20} {named[0]:<24} {found}")


if __name__ == "__main__":
    main()
