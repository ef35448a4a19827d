"""Drafters for other engines: written in the layouts of the drafter's family.

A drafter that an engine would read in another way than it was trained is refused.
"""

from pathlib import Path

import torch
from transformers import PretrainedConfig

from infer.drafters.base import Drafter, drop_copies, rows_of, target_embeddings
from infer.drafters.config_keys import config_dict
from infer.drafters.families import check_format
from infer.formats.checkpoint import write_folder
from infer.targets.loading import load_config
from infer.targets.target import Target

LARGEST_CHOICE = 1024  # engines hold a table of selector_top_k squared for every slot


def faults(drafter: Drafter) -> dict[str, str]:
    """Return what readers of some formats (`ExportFormat.refuses`) would run in another way, in
    words by name."""
    own = drafter.own
    patterns = drafter.attention_patterns
    size = drafter.config.hidden_size
    selects = drafter.head_row is not None and drafter.head_row.name == "selector"
    choice = (drafter.conditional_head.top_k or drafter.config.vocab_size) if selects else 0
    anchor = own.get("sample_from_anchor")
    tap = own.get("last_tap")
    table = {
        "from anchor": (anchor, "its first slot drafts already (sample_from_anchor)"),
        "not from anchor": (
            not anchor,
            "its first slot does not draft (drafter.sample_from_anchor=true)",
        ),
        "causal": (
            any(causal for causal, _ in patterns),
            "it has layers that are causal inside the block",
        ),
        "full and causal": (
            (True, None) in patterns,
            "it has layers that see all and are causal inside the block (dflash_config.causal)",
        ),
        "sliding": (any(window for _, window in patterns), "it has sliding layers"),
        "window of 1": (
            any(window == 1 for _, window in patterns),
            "its window of 1 position has no word there",
        ),
        "llama3": (
            drafter.config.rope_parameters["rope_type"] == "llama3",
            "its rotary positions are scaled as Llama 3's, which llama.cpp has no word for in a drafter",
        ),
        "fusion": (
            own.get("layer_fusion"),
            "each of its layers reads its own mix of the tapped ones (layer_fusion)",
        ),
        "raw": (
            tap == "raw",
            "it taps the last layer before the target's last norm (last_tap=raw)",
        ),
        "normed": (
            tap == "normed",
            "it taps the last layer behind the target's last norm (last_tap=normed)",
        ),
        "recurrent": (
            own.get("markov_head_type") == "rnn" and not anchor,
            "its recurrent head reads the bonus token's slot there (sample_from_anchor)",
        ),
        "part": (
            drafter.d2t is not None and drafter.head_row is not None,
            "its conditional head knows a part of the vocabulary only, theirs the whole one (drafter.draft_vocab_size=0)",
        ),
        "part of the choice": (
            selects and drafter.d2t is not None,
            "its selector knows a part of the vocabulary only",
        ),
        "choice from anchor": (
            selects and anchor,
            "its selector chooses in the first slot too (sample_from_anchor)",
        ),
        "choice": (
            choice > LARGEST_CHOICE,
            f"its selector chooses among {choice} tokens, and they hold a table of all pairs (drafter.head.top_k=16)",
        ),
        "room": (
            choice * (choice + 1) > size,  # it keeps the pairs of a slot in one hidden state
            f"its selector chooses among {choice} tokens, and llama.cpp has room for "
            f"{int((size + 0.25) ** 0.5 - 0.5)} with {size} hidden entries (drafter.head.top_k)",
        ),
    }
    return {name: sentence for name, (holds, sentence) in table.items() if holds}


def check_export(drafter: Drafter, format: str) -> None:
    """Raise ValueError for a drafter that a layout has no words for, or that its readers would run
    in another way."""
    check_format(
        drafter.family, format, drafter.head_row, bool(drafter.own.get("conv_kernel_size"))
    )
    refused = drafter.family.formats[format].refuses
    if wrong := [sentence for name, sentence in faults(drafter).items() if name in refused]:
        raise ValueError(
            f"format={format}: its readers would run another drafter: {'; '.join(wrong)}"
        )


def export_drafter(drafter: Drafter, format: str, target: Target | None, out: Path) -> None:
    """Write a drafter in a layout that its family has (`infer.drafters.families.FORMATS`). `target`
    is needed where the layout stores its embedding and head, and for a drafter that has copies of
    them. Raises ValueError as `check_export` does."""
    check_export(drafter, format)
    row = drafter.family.formats[format]
    if format == "gguf":  # in a layout that llama.cpp's converter reads
        as_dspark = drafter.own.get("sample_from_anchor") or drafter.own.get("markov_rank")
        plain = "dflash" if drafter.head_row is None else "dflash2"
        return export_drafter(drafter, "dspark" if as_dspark else plain, target, out)
    weights = (
        with_ends(drafter, target, format) if row.target else without_ends(drafter, target, format)
    )
    config = config_dict(drafter.config)
    causal = drafter.own.get("causal")
    if "part" in row.refuses:  # they read the target's whole head, of whose rows its own are some
        config.pop("draft_vocab_size", None)
        weights.pop("d2t", None)
    if causal is not None and not row.target:  # in the words of every reader
        config["is_causal"] = causal
        config[drafter.family.config_key] |= {"causal_head": causal}
    write_folder(*drafter.writers[format](drafter, target, config, weights), out)


def with_ends(drafter: Drafter, target: Target | None, format: str) -> dict[str, torch.Tensor]:
    """Return the tensors with the embedding and the head that the drafter uses."""
    if target is None:
        raise ValueError(
            f"format={format} stores the target's embedding and head: give target.path"
        )
    weights = drafter.state_dict()
    for name, weight in (
        ("embed_tokens", target_embeddings(target)),
        ("lm_head", rows_of(drafter, target)),
    ):
        weights.setdefault(f"{name}.weight", weight.detach().to("cpu", drafter.dtype))
    return weights


def without_ends(drafter: Drafter, target: Target | None, format: str) -> dict[str, torch.Tensor]:
    """Return the tensors without embedding and head. Raises ValueError where the drafter's own
    differ from the target's, or there is no target to compare with."""
    if drafter.embed_tokens is not None or drafter.lm_head is not None:
        if target is None:
            raise ValueError(
                f"format={format}: it has its own embedding or head: give target.path to compare them"
            )
        try:
            drop_copies(drafter, target)
        except ValueError as error:
            raise ValueError(
                f"format={format} stores neither embedding nor head, and {error}"
            ) from error
    return drafter.state_dict()


def check_base_model(name: str, drafter: Drafter) -> str | None:
    """Raise ValueError unless the model `name`, as whose drafter the card presents this one, has
    the sizes of the drafter's target. Return a sentence where its config.json cannot be read from
    here."""
    try:
        sizes = target_sizes(drafter.config)
        found = target_sizes(load_config(name).get_text_config())
    except FileNotFoundError:
        return f"base_model={name}: its config.json could not be read from here, and was not compared with the drafter"
    wrong = [
        f"{key} {found[key]}, expected {size}"
        for key, size in sizes.items()
        if size not in (None, found[key])
    ]
    if wrong:
        raise ValueError(
            f"base_model={name} is not the target of this drafter: it has {'; '.join(wrong)}"
        )
    return None


def target_sizes(config: PretrainedConfig) -> dict[str, int | None]:
    """Return a target's sizes, from its own config or from a drafter's."""
    layers = vars(config).get("num_target_layers", config.num_hidden_layers)
    return {"hidden_size": config.hidden_size, "layers": layers, "vocab_size": config.vocab_size}
