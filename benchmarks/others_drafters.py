"""Whether other projects' code and ours read one folder in the same way, on random weights.

    python benchmarks/others_drafters.py --authors model.py --jetspec draft_head.py --nemo
    draft_qwen3.py python benchmarks/others_drafters.py --deepspec DeepSpec --specforge SpecForge
    --treeflash tree_flash.py python benchmarks/others_drafters.py --angelslim AngelSlim --angelspec
    AngelSpec <an environment with speculators>/bin/python benchmarks/others_drafters.py
    --speculators

The files are those of the projects that define the drafter's class: the DFlash authors'
`dflash/model.py`, JetSpec's `models/draft_head.py`, NeMo Automodel's `dflash/draft_qwen3.py`,
TreeFlash's `tree_flash.py`; the others are folders. Each class makes a drafter, saves it as it
does, and drafts a block behind random features, with a conditional head behind random tokens; we
load that folder and draft the same. Printed is the largest difference of log-probabilities, or why
we refuse the folder.
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
from infer.drafters.heads.draft import behind
from infer.targets.target import Target

VOCABULARY = 97
MASK = 96
BLOCK = 6
TAPS = [1, 4]
LAYERS = 6
CONTEXT = 40
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
MIXED = WINDOW | {
    "layer_types": ["full_attention", "sliding_attention"],
    "sliding_window": 64,
}  # beyond it, by design
MARKOV = {"enable_confidence_head": True, "confidence_head_with_markov": True, "markov_rank": 5}
DOMINO = {"projector_type": "domino", "emb_dim": 5, "gru_hidden_dim": 12}
SELECTOR = {"selector_rank": 5, "selector_top_k": 7}
REFINER = {"xpress_rank": 5, "xpress_mlp_ratio": 3}
CASES = {  # by project: name and what its config.json says beside the sizes, at the top and in its own part
    "authors": [
        ("full", {}, {}),
        ("is_causal", {"is_causal": True}, {}),
        ("sliding", WINDOW, {}),
        ("sliding, not causal", WINDOW | {"is_causal": False}, {}),
    ],
    "jetspec": [
        ("bidirectional", {}, {"causal_head": False}),
        ("causal_head", {}, {"causal_head": True}),
    ],
    "nemo": [
        ("full", {"is_causal": False}, {}),
        ("sliding", WINDOW | {"is_causal": False}, {}),
        ("JetSpec recipe", {"is_causal": False}, {"causal": True}),
    ],
    "deepspec": [
        (kind, MARKOV | {"markov_head_type": kind}, {}) for kind in ("vanilla", "gated", "rnn")
    ]
    + [("DFlash", {"markov_rank": 0, "enable_confidence_head": False}, {})],
    "specforge": [
        *(
            (f"DSpark {kind}", {}, MARKOV | {"markov_head_type": kind})
            for kind in ("vanilla", "gated", "rnn")
        ),
        ("Domino", {}, DOMINO | {"pure_draft_prefix_len": 1, "shift_label": True}),
        ("Domino, unshifted", {}, DOMINO | {"pure_draft_prefix_len": 0, "shift_label": False}),
    ],
    "treeflash": [("swiglu", {}, {})],
    "angelslim": [("DFlash", {}, {}), ("DFlare", {}, {})],
    "angelspec": [
        ("DFlash", {"model_arch": "dflash"}, {}),
        ("DFlare", {"model_arch": "dflare"}, {}),
    ],
    "speculators": [
        ("dflash, full", {}, {}),
        ("dflash, mixed", MIXED, {}),
        *(
            (f"dspark {kind}", {}, MARKOV | {"markov_head_type": kind})
            for kind in ("vanilla", "gated", "rnn")
        ),
        (
            "dspark, anchor only",
            {},
            MARKOV | {"markov_head_type": "gated", "sample_from_anchor": False},
        ),
        ("dflash2", {}, SELECTOR),
        ("dflash2, mixed", MIXED, SELECTOR),
        ("dflash2, from anchor", {}, SELECTOR | {"sample_from_anchor": True}),
        ("xpress", {}, REFINER),
        ("xpress, from anchor", {}, REFINER | {"sample_from_anchor": True}),
    ],
}


@dataclass
class Given:
    """What is drafted behind."""

    target: Target
    features: torch.Tensor  # (1, CONTEXT, F)
    ids: torch.Tensor  # (1, BLOCK) the bonus token and masks
    path: torch.Tensor  # (1, BLOCK + 1) the bonus token, and what follows it

    @property
    def blocks(self) -> torch.Tensor:
        return self.target.embed(self.ids)

    def before(self, from_anchor: bool) -> torch.Tensor:
        """Return the token before each slot of the block, (1, BLOCK); the bonus token's slot may
        draft nothing."""
        return (
            self.path[:, :-1]
            if from_anchor
            else torch.cat([self.path[:, :1], self.path[:, : BLOCK - 1]], 1)
        )


def load_class(file: str, name: str) -> type:
    """Return a class of a file outside this project."""
    spec = spec_from_file_location("others", file)
    module = module_from_spec(spec)
    sys.modules["others"] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def load_bare(path: str, name: str) -> ModuleType:
    """Return a module of a project's folder, without running the packages around it, which ask for
    much."""
    parts = name.split(".")
    for i in range(1, len(parts)):
        package = ModuleType(".".join(parts[:i]))
        package.__path__ = [str(Path(path, *parts[:i]))]
        sys.modules.setdefault(package.__name__, package)
    return import_module(name)


def randomise(model: torch.nn.Module) -> None:
    """Draw weights that say something: matrices of deviation 0.2, norms around one."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        mean = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = mean + 0.2 * torch.randn(parameter.shape, generator=generator)


def qwen3(more: dict, own: dict | None) -> Qwen3Config:
    """Return the config of a public drafter; `own`: its `dflash_config` beside what all have."""
    config = Qwen3Config(
        **SIZES | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2} | more
    )
    config._attn_implementation = "sdpa"
    if own is not None:
        config.block_size = BLOCK
        config.num_target_layers = LAYERS
        config.dflash_config = {"mask_token_id": MASK, "target_layer_ids": TAPS} | own
    return config


POSITIONS = torch.arange(CONTEXT + BLOCK)[None]


def public(
    file: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """Save a drafter of a class in the public layout; return its logits of a block, (BLOCK, V)."""
    if project == "angelslim":
        place = "angelslim.compressor.speculative.train.models.draft.qwen_"
        kind = vars(load_bare(file, place + case.lower()))[f"Qwen{case}DraftModel"]
    else:
        kind = load_class(
            file, "Qwen3DFlashDraftModel" if project == "nemo" else "DFlashDraftModel"
        )
    model = kind(qwen3(more, own)).eval()
    randomise(model)
    model.save_pretrained(folder)
    states = model(
        position_ids=POSITIONS, noise_embedding=given.blocks, target_hidden=given.features
    )[0]
    return given.target.head(states)


def angelspec(
    path: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """The same for the classes of AngelSpec, a fork of TorchSpec; its converter writes the one name
    for both."""
    load_bare(path, "angelspec.models.draft.dflash")
    module = load_bare(path, f"angelspec.models.draft.{case.lower()}")
    sizes = {key: value for key, value in SIZES.items() if key != "rope_parameters"} | {
        "rope_theta": 5e4
    }
    taps = {
        "target_layer_ids": TAPS,
        "num_target_layers": len(TAPS),
        "target_num_hidden_layers": LAYERS,
    }
    config = module.DFlashConfig(
        **sizes, **taps, **more, num_hidden_layers=2, target_hidden_size=32, mask_token_id=MASK
    )
    model = vars(module)[f"{case}DraftModel"](config).eval()
    randomise(model)
    model.save_pretrained(folder)
    file = Path(folder, "config.json")
    named = {
        "architectures": ["DFlashDraftModel"],
        "block_size": BLOCK,
    }  # which its user has to add
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    context = model.extract_context_feature(list(given.features.chunk(len(TAPS), -1)))
    return given.target.head(
        model(given.ids, context, POSITIONS[:, CONTEXT:], POSITIONS[:, :CONTEXT])[0]
    )


def treeflash(
    file: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """The same for TreeFlash's class."""
    config = qwen3(more, own)
    config.treeflash_config = {"ar_approximation": "swiglu", "candidate_tokens": 16}
    model = load_class(file, "TreeFlashDraftModel")(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    before = given.target.embed(given.before(from_anchor=False))
    states = model(POSITIONS, before, given.blocks, target_hidden=given.features)
    return given.target.head(states[0])


def deepspec(
    path: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """The same for DeepSpec's class, which has an embedding and a head of its own."""
    sys.path.insert(0, path)
    config = qwen3(more, None)
    config.mask_token_id = MASK
    config.target_layer_ids = TAPS
    config.num_anchors = 8
    config.block_size = BLOCK
    config.num_target_layers = LAYERS
    model = import_module("deepspec.modeling.dspark.qwen3.modeling").Qwen3DSparkModel(config).eval()
    randomise(model)
    model.save_pretrained(folder)
    inputs = {
        "noise_embedding": model.embed_tokens(given.ids),
        "target_hidden_states": given.features,
    }
    states = model._forward_backbone(position_ids=POSITIONS, **inputs)
    logits = model.compute_logits(states)
    if model.markov_head is None:
        return logits[0]
    inputs = {"token_ids": given.before(True)[None], "hidden_states": states[None]}
    return model.markov_head.apply_block_logits(logits[None], **inputs)[0, 0]


def specforge(
    path: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """The same for SpecForge's classes."""
    sys.path.insert(0, path)
    name = "Domino" if own.get("projector_type") == "domino" else "DSpark"
    kind = getattr(import_module(f"specforge.modeling.draft.{name.lower()}"), f"{name}DraftModel")
    model = kind(qwen3(more, own)).eval()
    randomise(model)
    model.save_pretrained(folder)
    states = model(
        position_ids=POSITIONS, noise_embedding=given.blocks, target_hidden=given.features
    )
    if (
        name == "Domino"
    ):  # what its network reads are the tokens from the bonus token on, whatever its slot drafts
        tokens = given.before(True)
        before = {"prev_token_embeddings": given.target.embed(tokens)[None]}
    else:
        before = {"prev_token_ids": given.before(True)[None]}
    return model.apply_logits_head(
        given.target.head(states)[None], hidden_states=states[None], **before
    )[0, 0]


def speculators_config(kind: str, tokens: int):
    """Return the part that all of speculators' configs have, for greedy drafts of so many
    tokens."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    return SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=tokens)],
        default_proposal_method="greedy",
        verifier=VerifierConfig(name_or_path="x/y", architectures=["Qwen3ForCausalLM"]),
    )


def speculators(
    path: str, case: str, project: str, more: dict, own: dict, folder: str, given: Given
) -> torch.Tensor:
    """The same for speculators' classes, whose layers are run one by one under their own mask."""
    from speculators.model import SpeculatorModel

    kinds = {"markov_rank": "dspark", "selector_rank": "dflash2", "xpress_rank": "xpress"}
    kind = next((kinds[key] for key in own if key in kinds), "dflash")
    names = {"dflash": "DFlash", "dspark": "DSpark", "dflash2": "DFlash2", "xpress": "XPress"}
    config_of = getattr(
        import_module(f"speculators.models.{kind}"), f"{names[kind]}SpeculatorConfig"
    )
    inner = qwen3(more, None)
    inner._attn_implementation = "eager"
    config = config_of(
        transformer_layer_config=inner,
        draft_vocab_size=VOCABULARY,
        block_size=BLOCK,
        aux_hidden_state_layer_ids=[layer + 1 for layer in TAPS],
        mask_token_id=MASK,
        speculators_config=speculators_config(kind, BLOCK - 1),
        **own,
    )
    model = SpeculatorModel.registry[kind](config=config).eval()
    randomise(model)
    model.save_pretrained(folder)
    documents = torch.zeros(1, CONTEXT + 1, dtype=torch.long)
    anchors = torch.tensor([CONTEXT])
    features = given.features
    states = given.blocks
    context = model.hidden_norm(
        model.fc(torch.cat([features, features[:, :1]], 1))
    )  # the anchor's own is not seen
    positions = torch.cat([torch.arange(CONTEXT + 1), CONTEXT + torch.arange(BLOCK)])[None]
    rotary = model.rotary_emb(states, positions)
    for i, layer in enumerate(model.layers):
        window = model.sliding_window if i in model.sliding_window_indices else None
        mask = model._create_attention_mask(
            documents, CONTEXT + 1, anchors, states.device, window, model.sliding_window_non_causal
        )
        states = layer(
            hidden_states=states,
            target_hidden=context,
            attention_mask=mask,
            position_embeddings=rotary,
        )
    states = model.norm(states)
    logits = given.target.head(states)
    before = given.before(config.sample_from_anchor)
    if kind == "dflash2":
        ids, scores = model.candidate_selector.select(logits, states, before)
        return torch.full_like(logits, -torch.inf).scatter(2, ids, scores)[0]
    if kind == "dspark":  # a recurrent head begins at the bonus token's slot, whatever that drafts
        return (logits + model.markov_head.block_bias(prev_token_ids=before, hidden_states=states))[
            0
        ]
    if kind == "xpress":
        return (logits + model.refiner_head.block_bias(before, states))[0]
    return logits[0]


PROJECTS = {
    "authors": public,
    "jetspec": public,
    "nemo": public,
    "angelslim": public,
    "angelspec": angelspec,
    "deepspec": deepspec,
    "specforge": specforge,
    "treeflash": treeflash,
    "speculators": speculators,
}


def logits_of(project: str, place: str, case: tuple[str, dict, dict], folder: str):
    """Return the function of what is given that makes a case's drafter, saves it, and returns its
    logits."""
    name, more, own = case
    return partial(PROJECTS[project], place, name, project, more, dict(own), folder)


@torch.no_grad()
def compare(logits_of, folder: str) -> str:
    """Return the largest difference of log-probabilities, or the reason of a refusal."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES | {"num_hidden_layers": LAYERS, "initializer_range": 0.2})
    target = Target(Qwen3ForCausalLM(config))
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(1, CONTEXT, len(TAPS) * 32, generator=generator)
    path = torch.cat([torch.tensor([[7]]), torch.randint(90, (1, BLOCK), generator=generator)], 1)
    ids = torch.tensor([[7] + [MASK] * (BLOCK - 1)])
    theirs = logits_of(Given(target, features, ids, path))
    try:
        drafter = load_drafter(folder)
    except ValueError as error:
        return f"refused: {str(error).removeprefix(folder + ': ')}"
    theirs = theirs[drafter.first_draft_slot :].log_softmax(-1)
    state = drafter.state(1, CONTEXT + BLOCK)
    with state.add(1) as row:
        drafter.update_context(
            target, features, torch.zeros(1, CONTEXT, dtype=torch.long), [CONTEXT], row
        )
    block = drafter.draft_block(target, path[:, 0], state)
    ours = block.marginals[0]
    if drafter.head_row is not None:
        ours = behind(drafter, target, block, path[:, : len(theirs)])[0]
    if not torch.equal(ours.isinf(), theirs.isinf()):
        return "other candidates"
    return f"{(ours - theirs).nan_to_num(0).abs().max():.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name in ("authors", "jetspec", "nemo", "treeflash"):
        parser.add_argument(f"--{name}", help="the file of the class")
    for name in ("deepspec", "specforge", "angelslim", "angelspec"):
        parser.add_argument(f"--{name}", help="the project's folder")
    parser.add_argument("--speculators", action="store_true")
    args = parser.parse_args()
    for project, cases in CASES.items():
        if not getattr(args, project):
            continue
        for case in cases:
            with tempfile.TemporaryDirectory() as folder:
                found = compare(logits_of(project, getattr(args, project), case, folder), folder)
                named = json.loads((Path(folder) / "config.json").read_text())["architectures"]
                print(f"{project:<12} {case[0]:<20} {named[0]:<24} {found}")


if __name__ == "__main__":
    main()
