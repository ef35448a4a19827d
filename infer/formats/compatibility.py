"""Which engine would load a drafter's folder, and what is at fault where it would not: config.json and the headers of
the weight files are read, never a tensor.

What vLLM, SGLang and speculators ask for is taken from their sources of autumn 2026 (docs/formats.md). A drafter of
another architecture than ours (biases, attention sinks, quantised weights) is at fault for all, though some have it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from infer.drafters.config_keys import ConfigReading, Keys
from infer.drafters.dflash.layouts import DFLASH2, DSPARK, SPECFORGE
from infer.drafters.heads.table import head_of
from infer.formats.folders import Folder, open_folder
from infer.formats.layouts import find_problems, read, shapes, tensor_problems

ENDS = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}


@dataclass(frozen=True)
class Verdict:
    """An engine's verdict on a folder."""

    engine: str
    problems: list[str]  # none: it would load it

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.engine}: would load it"
        return "\n".join([f"{self.engine}: would not, or would read it wrongly", *(f"  - {p}" for p in self.problems)])


def check_folder(path: str | Path, target_layers: int | None = None) -> list[Verdict]:
    """Return the engines' verdicts on a folder or hub id. Raises FileNotFoundError where there is no folder at all."""
    folder = open_folder(path)
    reading = read(folder, target_layers)
    blocks = ("dflash", DFLASH2)
    return [
        Verdict("vLLM (method dflash)", engine_problems(folder, reading, (*blocks, DSPARK, SPECFORGE), vllm)),
        Verdict("SGLang (DFLASH)", engine_problems(folder, reading, (*blocks, DSPARK, SPECFORGE), sglang)),
        Verdict("speculators, and vLLM through it", engine_problems(folder, reading, ("speculators",), speculators)),
        Verdict("the DFlash authors' code", engine_problems(folder, reading, blocks, authors)),
        Verdict("transformers (speculation_type=dflash)", engine_problems(folder, reading, ("transformers",), native)),
        Verdict("blockdraft", find_problems(folder, reading)),
    ]


def engine_problems(
    folder: Folder, reading: ConfigReading, layouts: tuple[str, ...], own_problems: Callable
) -> list[str]:
    """Return what is at fault for an engine that reads some layouts; `own_problems` adds what only that engine asks
    for."""
    problems = [*folder.problems]
    if reading.layout in layouts:
        problems += reading.problems
        own_problems(Keys(folder.config, problems), folder, reading)
    elif reading.layout == "none":
        problems += reading.problems
    else:
        named = folder.config.get("architectures")
        problems.append(
            f"config.json: the layout is {reading.layout}'s (architectures {named}), expected that of {layouts[0]}"
        )
    return problems


def vllm(keys: Keys, folder: Folder, reading: ConfigReading) -> None:
    """vLLM's qwen3_dflash: every tensor must be known; embedding, head and d2t may be there."""
    check_architectures(keys, reading)
    part = keys.part("dflash_config")
    if reading.layout != DSPARK and part.raw.get("mask_token_id") is None:
        keys.note("dflash_config.mask_token_id", "is missing, which vLLM looks for there")
    if reading.layout == SPECFORGE and head_of(reading.own) != head_of(keys.raw):
        keys.note("markov_rank", "is missing beside dflash_config, where vLLM looks for it; it has no Domino")
    if keys.raw.get("model_type") != "qwen3":
        keys.note("model_type", f"is {keys.raw.get('model_type')!r}, expected 'qwen3'")
    check_window(keys, reading, "vLLM")
    check_anchor(keys, reading, "vLLM")
    check_causal(keys, reading, "vLLM", keys.raw.get("is_causal"), part.raw.get("causal"))
    check_last_tap(keys, reading, "vLLM")
    if "d2t" in folder.tensors and "draft_vocab_size" not in reading.options and not reading.problems:
        keys.problems.append("d2t is stored, and draft_vocab_size says that the vocabulary is whole")
    check_tensors(keys, folder, reading, stored_ends(folder, reading), {"t2d", "d2t"})


def sglang(keys: Keys, folder: Folder, reading: ConfigReading) -> None:
    """SGLang's models/dflash and dspark: what they do not know they ignore, so that embedding, head and d2t would go
    unused; DSpark's drafters carry copies of the target's."""
    check_architectures(keys, reading)
    part = keys.part("dflash_config")
    if keys.raw.get("block_size") is None and part.raw.get("block_size") is None:
        keys.note("block_size", "is missing")
    if keys.raw.get("num_target_layers") is None and part.raw.get("num_target_layers") is None:
        keys.note("num_target_layers", "is missing: SGLang would take the drafter's own number of layers for it")
    if part.raw.get("use_swa"):
        part.note("use_swa", "is unknown to SGLang, which goes by layer_types alone")
    else:
        check_causal(keys, reading, "SGLang")
    if "last_tap" in reading.own and reading.options.get("num_target_layers") is not None:
        keys.note("target_layer_ids", "has the target's last layer: SGLang taps before the layer behind, and has none")
    check_window(keys, reading, "SGLang")
    check_anchor(keys, reading, "SGLang")
    if reading.layout != DSPARK:
        check_ends(folder, "SGLang", keys.problems)
    check_tensors(keys, folder, reading, set(), ENDS)


def speculators(keys: Keys, folder: Folder, reading: ConfigReading) -> None:
    """speculators' DFlashSpeculatorConfig, and what vLLM makes of it."""
    part = keys.part("speculators_config")
    if not part.raw:
        keys.note("speculators_config", "is missing")
    else:
        check_speculators_config(part, keys.raw["speculators_model_type"])
    check_window(keys.part("transformer_layer_config"), reading, "vLLM")
    check_anchor(keys, reading, "vLLM")
    check_causal(keys, reading, "vLLM", keys.raw.get("is_causal"), keys.raw.get("sliding_window_non_causal") is False)
    check_last_tap(keys, reading, "vLLM")
    check_tensors(keys, folder, reading, stored_ends(folder, reading), reading.unused)


def authors(keys: Keys, folder: Folder, reading: ConfigReading) -> None:
    """The authors' package: `DFlashDraftModel.from_pretrained`, a Qwen3Config, the target's embedding and head."""
    check_window(keys, reading, "the authors' code")
    check_anchor(keys, reading, "the authors' code")
    check_causal(keys, reading, "the authors' code", keys.raw.get("is_causal"))
    if reading.own.get("last_tap") == "raw" and reading.options.get("num_target_layers") is not None:
        keys.note("last_tap", "is raw: the authors' code taps the target's last layer behind the last norm")
    check_ends(folder, "The authors' code", keys.problems)
    check_tensors(keys, folder, reading, set(), ENDS)


def native(keys: Keys, folder: Folder, reading: ConfigReading) -> None:
    """transformers' own class, which every fault of ours is one of, too."""
    check_tensors(keys, folder, reading, set(), reading.unused)


def check_speculators_config(part: Keys, kind: str) -> None:
    """Note what is wrong with `speculators_config`."""
    methods = part.raw.get("proposal_methods")
    first = methods[0] if type(methods) is list and methods and type(methods[0]) is dict else {}
    tokens = first.get("speculative_tokens", 1)
    if "speculative_tokens" not in first:
        part.note("proposal_methods", "has no first entry with speculative_tokens")
    elif type(tokens) is not int or tokens < 1:
        part.note("proposal_methods[0].speculative_tokens", f"is {tokens!r}, expected 1 or more")
    if part.raw.get("default_proposal_method") not in [m.get("proposal_type") for m in methods or [] if m]:
        part.note("default_proposal_method", "is the proposal_type of none of proposal_methods")
    if part.raw.get("algorithm") != kind:
        part.note("algorithm", f"is {part.raw.get('algorithm')!r}, expected {kind!r}")
    verifier = part.part("verifier")
    if not verifier.raw.get("name_or_path"):
        verifier.note("name_or_path", "is missing")


def check_architectures(keys: Keys, reading: ConfigReading) -> None:
    """Note another class than the one that engines know the layout by. Domino's published drafter names that of the
    backbone, which SGLang goes by."""
    expected = {"dflash": "DFlashDraftModel", DFLASH2: "DFlash2DraftModel", DSPARK: "Qwen3DSparkModel"}
    expected[SPECFORGE] = "DSparkDraftModel" if reading.own.get("markov_rank") else "DFlashDraftModel"
    if keys.raw.get("architectures") != [expected[reading.layout]]:
        keys.note("architectures", f"is {keys.raw.get('architectures')}, expected exactly {[expected[reading.layout]]}")


def check_window(keys: Keys, reading: ConfigReading, engine: str) -> None:
    """A Qwen3 config without use_sliding_window forgets its window when transformers reads it."""
    sliding = "sliding_attention" in reading.options.get("layer_types", [])
    if sliding and keys.raw.get("sliding_window") is not None and keys.raw.get("use_sliding_window") is not True:
        keys.note("use_sliding_window", f"is not true: {engine} would find no sliding_window")


def check_causal(keys: Keys, reading: ConfigReading, engine: str, *flags: bool | None) -> None:
    """Note where an engine reads another causality inside the block than we do: the first of its flags that is set
    counts for all layers, otherwise a sliding layer is causal and a full one is not."""
    flag = next((flag for flag in flags if flag is not None), None)
    kinds = [kind == "sliding_attention" for kind in reading.options.get("layer_types", [])]
    ours = reading.own.get("causal")
    if any((slides if flag is None else flag) != (slides if ours is None else ours) for slides in kinds):
        theirs = "goes by layer_types alone" if flag is None else f"would run every layer with causal {flag}"
        said = "layers of two kinds" if ours is None else f"is {ours}"
        keys.note("causal", f"{said}: {engine} {theirs}")


def check_last_tap(keys: Keys, reading: ConfigReading, engine: str) -> None:
    """Note a tap of the target's last layer that an engine reads before the last norm."""
    if reading.own.get("last_tap") == "normed" and reading.options.get("num_target_layers") is not None:
        keys.note("last_tap", f"is normed: {engine} taps the target's last layer before the last norm")


# by layout: keys of what it has words for, beside a plain drafter whose second slot is the first to draft
WORDS = {
    DFLASH2: ("selector_rank", "conv_kernel_size"),
    DSPARK: ("markov_rank", "sample_from_anchor"),
    SPECFORGE: ("markov_rank", "gru_hidden_dim", "sample_from_anchor"),
    "speculators dspark": ("markov_rank", "sample_from_anchor"),
    "speculators dflash2": ("selector_rank", "conv_kernel_size", "sample_from_anchor"),
}


def check_anchor(keys: Keys, reading: ConfigReading, engine: str) -> None:
    """Note what the layout has no words for: a first slot that drafts, a conditional head, convolutions."""
    kind, row, own = keys.raw.get("speculators_model_type"), head_of(reading.own), reading.own
    words = WORDS.get(f"speculators {kind}" if kind else reading.layout, ())
    if row is not None and row.key not in words:
        keys.note(row.key, f"is {own[row.key]!r}: {engine} would draft without the conditional head")
    if own.get("conv_kernel_size") and "conv_kernel_size" not in words:
        keys.note("conv_kernel_size", f"is {own['conv_kernel_size']}: {engine} has no convolutions there")
    if own.get("sample_from_anchor") and "sample_from_anchor" not in words:
        keys.note("sample_from_anchor", f"is true: {engine} drafts from the second slot on")
    if reading.layout in (DSPARK, SPECFORGE) and row is None:
        keys.note("markov_rank", f"is 0 or missing: {engine} reads this layout for DSpark's drafters alone")
    if reading.layout in (DSPARK, SPECFORGE) and not own.get("sample_from_anchor"):
        keys.note("sample_from_anchor", f"is false: {engine} drafts from the first slot on")


def check_ends(folder: Folder, engine: str, problems: list[str]) -> None:
    """Note a stored embedding or head that an engine would not use."""
    unused = sorted(ENDS & folder.tensors.keys())
    if unused:
        problems.append(f"{engine} takes the target's embedding and head and ignores {', '.join(unused)}")


def stored_ends(folder: Folder, reading: ConfigReading) -> set[str]:
    """Return the tensors of embedding and head that must be right: the stored ones, all for a draft vocabulary."""
    return ENDS if "draft_vocab_size" in reading.options else ENDS & folder.tensors.keys()


def check_tensors(keys: Keys, folder: Folder, reading: ConfigReading, ends: set[str], unused: set[str]) -> None:
    """Note what is wrong with the tensors, of those of embedding and head only with `ends`."""
    if folder.tensors and not reading.problems:
        wanted = {name: shape for name, shape in shapes(reading).items() if name not in ENDS or name in ends}
        keys.problems += tensor_problems(folder.renamed(reading.renamed), wanted, unused)
