"""Which engine would load a drafter's folder, and what is at fault where it would not: config.json
and the headers of the weight files are read, never a tensor.

What vLLM, SGLang and speculators ask for is taken from their sources of autumn 2026
(docs/formats.md). A drafter of another architecture than ours (biases, attention sinks, quantised
weights) is at fault for all, though some have it.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from infer.drafters.config_keys import ConfigReading
from infer.drafters.heads.table import head_of
from infer.formats.folders import Folder, open_folder
from infer.formats.layouts import as_read, find_problems, read, shapes, tensor_problems

ENDS = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
BLOCKS = ("dflash", "dflash2")
FLAT = ("DeepSpec", "SpecForge")  # layouts of DSpark, where the first slot drafts
VLLM = "vLLM (method dflash)"
SGLANG = "SGLang (DFLASH)"
SPECULATORS = "speculators, and vLLM through it"
AUTHORS = "the DFlash authors' code"
NATIVE = "transformers (speculation_type=dflash)"
ANGELSLIM = "AngelSlim (dflash_benchmark.py)"
EVERY = (VLLM, SGLANG, SPECULATORS, AUTHORS, ANGELSLIM)
READS = {  # by engine: its layouts
    VLLM: (*BLOCKS, *FLAT),
    SGLANG: (*BLOCKS, *FLAT),
    SPECULATORS: ("speculators",),
    AUTHORS: BLOCKS,
    NATIVE: ("transformers",),
    ANGELSLIM: ("AngelSlim",),
}
CLASSES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "DeepSpec": "Qwen3DSparkModel",
}
# by layout: keys of what it has words for, beside a plain drafter whose second slot is the first to
# draft
WORDS = {
    "dflash2": ("selector_rank", "conv_kernel_size"),
    "DeepSpec": ("markov_rank", "sample_from_anchor"),
    "SpecForge": ("markov_rank", "gru_hidden_dim", "sample_from_anchor"),
    "speculators dspark": ("markov_rank", "sample_from_anchor"),
    "speculators dflash2": ("selector_rank", "conv_kernel_size", "sample_from_anchor"),
    "speculators xpress": ("xpress_rank", "sample_from_anchor"),
    "AngelSlim": ("layer_fusion",),
}


@dataclass(frozen=True)
class Verdict:
    """An engine's verdict on a folder."""

    engine: str
    problems: list[str]  # none: it would load it
    reads_layout: bool = True  # whether it reads folders of this layout at all

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.engine}: would load it"
        return "\n".join(
            [
                f"{self.engine}: would not, or would read it wrongly",
                *(f"  - {p}" for p in self.problems),
            ]
        )


def check_folder(path: str | Path, target_layers: int | None = None) -> list[Verdict]:
    """Return the engines' verdicts on a folder or hub id. Raises FileNotFoundError where there is
    no folder at all."""
    folder = open_folder(path)
    reading = read(folder, target_layers)
    for doubt in reading.doubts:
        warnings.warn(f"{path}: {doubt}", stacklevel=2)
    verdicts = [
        Verdict(
            engine, engine_problems(folder, reading, engine), reading.layout in (*layouts, "none")
        )
        for engine, layouts in READS.items()
    ]
    return [*verdicts, Verdict("blockdraft", find_problems(folder, reading))]


def describe_export(verdicts: list[Verdict]) -> str:
    """Return the engines' verdicts on an exported folder: those that load it, those that read its
    layout and would refuse it, with their reasons, and last, in a line, those of other layouts."""
    loading = [verdict.engine for verdict in verdicts if not verdict.problems]
    refusing = [verdict for verdict in verdicts if verdict.problems and verdict.reads_layout]
    # AngelSlim's layout is read but no format= writes it
    others = [
        verdict.engine
        for verdict in verdicts
        if not verdict.reads_layout and verdict.engine != ANGELSLIM
    ]
    lines = [f"loads in    {'; '.join(loading) or 'no engine'}", *map(str, refusing)]
    if others:
        lines.append(f"others      read other layouts (format=): {'; '.join(others)}")
    return "\n".join(lines)


def engine_problems(folder: Folder, reading: ConfigReading, engine: str) -> list[str]:
    """Return what is at fault for an engine."""
    problems = [*folder.problems]
    layouts = READS[engine]
    if reading.layout not in (*layouts, "none"):
        named = folder.config.get("architectures")
        wrong = f"the layout is {reading.layout}'s (architectures {named}), expected that of {layouts[0]}"
        return [*problems, f"config.json: {wrong}"]
    problems += reading.problems
    if reading.options and not reading.problems:
        faults = (*misplaced(folder.config, reading), *misread(folder.config, reading))
        problems += [f"config.json: {said}" for engines, said in faults if engine in engines]
        problems += stored_problems(folder, reading, engine)
    return problems


Faults = Iterator[tuple[tuple[str, ...], str]]  # the engines that a fault is for, and a sentence


def inside(raw: dict, key: str) -> dict:
    """Return the object under a key, empty where there is none."""
    found = raw.get(key)
    return found if type(found) is dict else {}


def misplaced(raw: dict, reading: ConfigReading) -> Faults:
    """Yield what stands in config.json where an engine does not look for it."""
    part = inside(raw, "dflash_config")
    told = inside(raw, "speculators_config")
    expected = CLASSES.get(
        reading.layout, "DSparkDraftModel" if reading.own.get("markov_rank") else "DFlashDraftModel"
    )
    if raw.get("architectures") != [expected]:
        yield (
            (VLLM, SGLANG),
            f"architectures is {raw.get('architectures')}, expected exactly {[expected]}",
        )
    if reading.layout == "SpecForge" and head_of(reading.own) != head_of(raw):
        yield (
            (VLLM,),
            "markov_rank is missing beside dflash_config, where vLLM looks for it; it has no Domino",
        )
    if raw.get("model_type") != "qwen3":
        yield (VLLM,), f"model_type is {raw.get('model_type')!r}, expected 'qwen3'"
    if raw.get("num_target_layers", part.get("num_target_layers")) is None:
        yield (
            (SGLANG,),
            "num_target_layers is missing: SGLang would take the drafter's own number of layers for it",
        )
    level = inside(raw, "transformer_layer_config") or raw
    if (
        "sliding_window" in reading.options
        and level.get("sliding_window")
        and not level.get("use_sliding_window")
    ):
        yield EVERY, "use_sliding_window is not true: the engine would find no sliding_window"
    if not told:
        yield (SPECULATORS,), "speculators_config is missing"
    elif not inside(told, "verifier").get("name_or_path"):
        yield (SPECULATORS,), "speculators_config.verifier.name_or_path is missing"


def misread(raw: dict, reading: ConfigReading) -> Faults:
    """Yield what an engine would compute otherwise, or has no words for."""
    own, row, kind = reading.own, head_of(reading.own), raw.get("speculators_model_type")
    words = WORDS.get(f"speculators {kind}" if kind else reading.layout, ())
    if row is not None and row.key not in words:
        yield (
            EVERY,
            f"{row.key} is {own[row.key]!r}: the engine would draft without the conditional head",
        )
    if own.get("conv_kernel_size") and "conv_kernel_size" not in words:
        yield (
            EVERY,
            f"conv_kernel_size is {own['conv_kernel_size']}: the engine has no convolutions there",
        )
    if own.get("layer_fusion") and "layer_fusion" not in words:
        yield (
            EVERY,
            "layer_fusion is true: the engine has one mix of the tapped layers for all of its own",
        )
    if own.get("sample_from_anchor") and "sample_from_anchor" not in words:
        yield EVERY, "sample_from_anchor is true: the engine drafts from the second slot on"
    if reading.layout in FLAT and row is None:
        yield (
            EVERY,
            "markov_rank is 0 or missing: the engine reads this layout for DSpark's drafters alone",
        )
    if reading.layout in FLAT and not own.get("sample_from_anchor"):
        yield EVERY, "sample_from_anchor is false: the engine drafts from the first slot on"
    tap = own.get("last_tap") if reading.options["num_target_layers"] is not None else None
    if tap == "normed":
        yield (
            (VLLM, SPECULATORS),
            "last_tap is normed: vLLM taps the target's last layer before the last norm",
        )
    if tap == "raw":
        yield (
            (AUTHORS,),
            "last_tap is raw: the authors' code taps the target's last layer behind the last norm",
        )
    if tap is not None:
        yield (
            (SGLANG,),
            "target_layer_ids has the target's last layer: SGLang taps before the layer behind",
        )
    yield from miscaused(raw, reading)


def miscaused(raw: dict, reading: ConfigReading) -> Faults:
    """Yield the engines that read another causality inside the block than we do: the first of their
    flags that is set counts for all layers, otherwise a sliding layer is causal and a full one is
    not."""
    ours = reading.own.get("causal")
    part = inside(raw, "dflash_config")
    flags = {
        VLLM: (raw.get("is_causal"), part.get("causal")),
        SGLANG: (),
        SPECULATORS: (raw.get("is_causal"), raw.get("sliding_window_non_causal") is False),
        AUTHORS: (raw.get("is_causal"),),
    }
    slides = {kind == "sliding_attention" for kind in reading.options["layer_types"]}
    for engine, said in flags.items():
        flag = next((flag for flag in said if flag is not None), None)
        if any(
            (one if flag is None else flag) != (one if ours is None else ours) for one in slides
        ):
            theirs = (
                "goes by layer_types alone"
                if flag is None
                else f"would run every layer with causal {flag}"
            )
            said = "layers of two kinds" if ours is None else f"is {ours}"
            yield (engine,), f"causal {said}: {engine.split(',')[0]} {theirs}"


def stored_problems(folder: Folder, reading: ConfigReading, engine: str) -> list[str]:
    """Return what is wrong with the tensors. vLLM takes the embedding and head that are stored;
    SGLang and the authors the target's, but for DeepSpec's drafters, which carry copies."""
    part = "draft_vocab_size" in reading.options
    problems = []
    ends = ENDS & folder.tensors.keys() if not part else ENDS
    if engine == VLLM and "d2t" in folder.tensors and not part:
        problems.append("d2t is stored, and draft_vocab_size says that the vocabulary is whole")
    if engine in (VLLM, SPECULATORS) and part and "lm_head.weight" not in folder.tensors:
        problems.append(
            "lm_head.weight is missing, and draft_vocab_size asks for one: the target's has other rows"
        )
    if (
        engine in (SGLANG, AUTHORS)
        and reading.layout != "DeepSpec"
        and ENDS & folder.tensors.keys()
    ):
        unused = ", ".join(sorted(ENDS & folder.tensors.keys()))
        problems.append(f"the engine takes the target's embedding and head and ignores {unused}")
    ends = ends if engine in (VLLM, SPECULATORS) else set()
    unused = {VLLM: {"t2d", "d2t"}, SGLANG: ENDS, AUTHORS: ENDS}.get(engine, reading.unused)
    wanted = {
        name: shape for name, shape in shapes(reading).items() if name not in ENDS or name in ends
    }
    return problems + (
        tensor_problems(as_read(folder, reading), wanted, unused) if folder.tensors else []
    )
