"""Drafters for other engines: written in the layouts that vLLM, SGLang and speculators read, and DART's published one.

What an engine would read in another way than it was trained is refused. V vocabulary, D hidden size.
"""

from pathlib import Path

import torch
from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError

from infer.drafters.base import Drafter
from infer.drafters.dart import DART, default_layer_ids
from infer.formats.checkpoint import config_dict, save_drafter, write_folder
from infer.targets.target import Target

FORMATS = ("dflash", "speculators", "dart")


@torch.no_grad()
def embeddings(target: Target) -> torch.Tensor:
    """(V, D): what enters the target's first layer for every token. Some targets scale their embeddings."""
    return target.embed(torch.arange(len(target.embedding.weight), device=target.device))


def drop_copies(drafter: Drafter, target: Target) -> None:
    """Takes a DFlash drafter's own embedding and head away where they are the target's, bit for bit in the dtype of one
    of the two. Raises ValueError where they are others, or of a part of the vocabulary."""
    if isinstance(drafter, DART):
        return
    if drafter.d2t is not None:
        raise ValueError(f"its head has {len(drafter.d2t)} of {drafter.config.vocab_size} tokens (draft_vocab_size)")
    theirs = {"embed_tokens": embeddings(target), "lm_head": target.head_weight}
    for name, weight in theirs.items():
        own = getattr(drafter, name)
        if own is not None and not any(torch.equal(own.weight.to(x), weight.to(x)) for x in (own.weight, weight)):
            raise ValueError(f"its own {name} is not the target's")
        setattr(drafter, name, None)
        setattr(drafter.config, f"has_{name}", False)


def write_dflash(drafter: Drafter, target: Target | None, out: Path) -> None:
    """The public DFlash layout, without embedding and head. `target` is needed for a drafter that has copies of them.

    Raises ValueError for drafters that this layout has no words for."""
    if isinstance(drafter, DART):
        raise ValueError("format=dflash: this is a DART drafter; vLLM and SGLang have none")
    if drafter.config.dflash_config.get("sample_from_anchor"):
        raise ValueError(
            "format=dflash: its first slot drafts already (sample_from_anchor), which no engine reads there"
        )
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError("format=dflash: it has an embedding or head of its own: give target.path to compare them")
        try:
            drop_copies(drafter, target)
        except ValueError as error:
            raise ValueError(f"format=dflash stores neither embedding nor head, and {error}") from error
    save_drafter(drafter.config, drafter.state_dict(), out)


def speculators_config(drafter: Drafter, verifier: str, architectures: list[str]) -> dict:
    """config.json in speculators' layout. verifier: the target's name or path."""
    config, own = drafter.config, drafter.config.dflash_config
    part = config_dict(config)
    for key in ("architectures", "auto_map", "block_size", "dflash_config", "num_target_layers", "draft_vocab_size"):
        part.pop(key, None)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": drafter.block_size - 1,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["DFlashDraftModel"],
        "speculators_model_type": "dflash",
        "speculators_config": {
            "algorithm": "dflash",
            "proposal_methods": [proposal],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
        "transformer_layer_config": part,
        "draft_vocab_size": config.vocab_size if drafter.d2t is None else len(drafter.d2t),
        "block_size": config.block_size,
        "aux_hidden_state_layer_ids": [layer + 1 for layer in drafter.layer_ids],
        "mask_token_id": drafter.mask_token_id,
        "sample_from_anchor": drafter.first_draft_slot == 0,
        "sliding_window_non_causal": own.get("causal") is False,
        "num_target_layers": config.num_target_layers,  # theirs has no such key, and ignores it
        "dtype": str(drafter.norm.weight.dtype).removeprefix("torch."),
    }


def write_speculators(drafter: Drafter, target: Target | None, out: Path) -> None:
    """speculators' layout, with the embedding and the head that the drafter uses. Raises ValueError for drafters that
    it has no words for. `target.name` is written down: where the engine finds the target."""
    if isinstance(drafter, DART):
        raise ValueError("format=speculators: this is a DART drafter, which speculators does not have")
    if target is None:
        raise ValueError("format=speculators stores the target's embedding and head: give target.path")
    if drafter.config.dflash_config.get("causal") or (
        drafter.config.dflash_config.get("causal") is False and drafter.attention_patterns == [(False, None)]
    ):
        raise ValueError("format=speculators: layers that see all are never causal there (dflash_config.causal)")
    weights = dict(drafter.state_dict())
    kind = drafter.norm.weight.dtype
    for name, weight in (("embed_tokens", embeddings(target)), ("lm_head", target.head_weight)):
        weights.setdefault(f"{name}.weight", weight.detach().to("cpu", kind))
    if drafter.d2t is not None:
        weights["t2d"] = marked(drafter)
    architectures = target.model.config.architectures or [type(target.model).__name__]
    write_folder(speculators_config(drafter, target.name, architectures), weights, out)


def write_dart(drafter: Drafter, target: Target | None, out: Path) -> None:
    """DART's published layout. Raises ValueError for drafters that differ from the authors' architecture."""
    if not isinstance(drafter, DART):
        raise ValueError("format=dart: this is a DFlash drafter")
    config, own = drafter.config, drafter.config.dart_config
    faults = []
    if own["qk_norm"]:
        faults.append("it has norms of queries and keys")
    if not own["shifted"]:
        faults.append("its logits are not shifted")
    if not own.get("norm_twice"):
        faults.append("its last norm is applied once, theirs twice")
    if list(drafter.layer_ids) != default_layer_ids(config.num_target_layers):
        faults.append(f"it taps layers {list(drafter.layer_ids)}")
    if faults:
        raise ValueError(f"format=dart: the authors' code would run another drafter: {', '.join(faults)}")
    weights = dict(drafter.state_dict())
    rows = len(drafter.lm_head.weight)
    weights.setdefault("d2t", torch.zeros(rows, dtype=torch.long))
    part = config_dict(config)
    for key in ("auto_map", "block_size", "dart_config", "layer_types"):
        part.pop(key, None)
    part |= {"architectures": ["LlamaForCausalLMDart"], "model_type": "llama", "hidden_act": "silu"}
    part |= {"draft_length": config.block_size - 2, "draft_vocab_size": rows}
    write_folder(part, weights | {"t2d": marked(drafter)}, out)


def marked(drafter: Drafter) -> torch.Tensor:
    """t2d, (V,) bool: the tokens that the drafter's own head has rows for."""
    every = torch.ones(drafter.config.vocab_size, dtype=torch.bool)
    if drafter.d2t is None:
        return every
    return torch.zeros_like(every).index_fill_(0, drafter.d2t.cpu() + torch.arange(len(drafter.d2t)), True)


def push(folder: Path, name: str) -> str:
    """Uploads a folder to the model hub as `name`, user/name, with the token that the user is logged in with; returns
    its address. Raises ValueError where there is no token, or the hub refuses."""
    check_token()
    api = HfApi()
    try:
        address = api.create_repo(name, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=folder, commit_message="A drafter exported by blockdraft")
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        status = getattr(getattr(error, "response", None), "status_code", None)
        reason = f"the hub answered {status}" if status else type(error).__name__
        raise ValueError(f"push_to_hub={name}: {reason}; the export lies in {folder}") from error
    return str(address)


def check_token() -> None:
    """Raises ValueError unless the user is logged in at the model hub."""
    if get_token() is None:
        raise ValueError("push_to_hub needs your token for the hub: log in with `hf auth login`, or set HF_TOKEN")


WRITERS = {"dflash": write_dflash, "speculators": write_speculators, "dart": write_dart}
