"""Find out which inference engines would load a drafter's folder, and why others would not. Only
config.json and the headers of the weight files are read, never a tensor.

The layout of a folder is the set of config keys and tensor names that one project uses. The
requirements of the engines are taken from their source code of autumn 2026 (docs/formats.md).

Some engines support features of drafters that this project does not support, such as biases,
attention sinks and quantised weights. For a drafter with such a feature, a problem is reported for
every engine, although some engines could load it.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from infer.drafters.config_keys import ParsedConfig
from infer.drafters.heads.table import find_head_spec
from infer.formats.folders import DrafterFolder, open_drafter_folder
from infer.formats.layouts import (
    expected_shapes,
    find_folder_problems,
    find_tensor_problems,
    parse_drafter_config,
    rename_and_unpad_tensors,
)

EMBEDDING_HEAD_AND_VOCABULARY_NAMES = {"embed_tokens.weight", "lm_head.weight", "d2t", "t2d"}
# Layouts (config keys and tensor names) of DFlash drafters. All names of layouts are values of
# `CheckpointLayout.name` in infer/drafters/dflash/layouts.py.
DFLASH_LAYOUTS = ("dflash", "dflash2")
# Layouts (config keys and tensor names) of DSpark drafters. They draft a token at every position of
# a block, also at the first one, where the input is the bonus token.
DSPARK_LAYOUTS = ("DeepSpec", "SpecForge")
VLLM_ENGINE = "vLLM (method dflash)"
SGLANG_ENGINE = "SGLang (DFLASH)"
SPECULATORS_ENGINE = "speculators, and vLLM through it"
DFLASH_AUTHORS_ENGINE = "the DFlash authors' code"
TRANSFORMERS_ENGINE = "transformers (speculation_type=dflash)"
ANGELSLIM_ENGINE = "AngelSlim (dflash_benchmark.py)"
# Engines for which every feature of the drafter is checked. transformers is not among them, because
# it reads only drafters in its own format.
ENGINES_WITH_CHECKED_FEATURES = (
    VLLM_ENGINE,
    SGLANG_ENGINE,
    SPECULATORS_ENGINE,
    DFLASH_AUTHORS_ENGINE,
    ANGELSLIM_ENGINE,
)
# Keys are engines, values are the layouts (config keys and tensor names) that an engine reads.
ENGINE_LAYOUTS = {
    VLLM_ENGINE: (*DFLASH_LAYOUTS, *DSPARK_LAYOUTS),
    SGLANG_ENGINE: (*DFLASH_LAYOUTS, *DSPARK_LAYOUTS),
    SPECULATORS_ENGINE: ("speculators",),
    DFLASH_AUTHORS_ENGINE: DFLASH_LAYOUTS,
    TRANSFORMERS_ENGINE: ("transformers",),
    ANGELSLIM_ENGINE: ("AngelSlim",),
}
# Keys are layouts (config keys and tensor names of one project). Values are the class names that
# vLLM and SGLang expect under `architectures` in config.json.
LAYOUT_ARCHITECTURES = {
    "dflash": "DFlashDraftModel",
    "dflash2": "DFlash2DraftModel",
    "DeepSpec": "Qwen3DSparkModel",
}
# Optional features of drafters that a layout (config keys and tensor names of one project)
# supports. Keys are layouts, values are the config.json keys that turn the features on. Layouts
# that are not listed support none of these features.
SUPPORTED_CONFIG_KEYS_BY_LAYOUT = {
    "dflash2": ("selector_rank", "conv_kernel_size"),
    "DeepSpec": ("markov_rank", "sample_from_anchor"),
    "SpecForge": ("markov_rank", "gru_hidden_dim", "sample_from_anchor"),
    "speculators dspark": ("markov_rank", "sample_from_anchor"),
    "speculators dflash2": ("selector_rank", "conv_kernel_size", "sample_from_anchor"),
    "speculators xpress": ("xpress_rank", "sample_from_anchor"),
    "AngelSlim": ("layer_fusion",),
}
# Iterator over problems. Each problem is a pair: the engines that have it, and a text about it.
EngineProblems = Iterator[tuple[tuple[str, ...], str]]


@dataclass(frozen=True)
class EngineVerdict:
    """Whether an inference engine would load a drafter's folder, and if not, why."""

    engine: str
    # why the engine would not load the folder, or would load it wrongly; [] if there is no problem
    problems: list[str]
    # whether the engine reads folders with these config keys and tensor names at all
    reads_layout: bool = True

    def __str__(self) -> str:
        if not self.problems:
            return f"{self.engine}: would load it"
        lines = [f"  - {problem}" for problem in self.problems]
        return "\n".join([f"{self.engine}: would not load it, or would load it wrongly", *lines])


def check_engines(path: str | Path, target_layers: int | None = None) -> list[EngineVerdict]:
    """Check for each known inference engine whether it would load a drafter's folder. The last
    result is for this project.

    path: the drafter's folder or its id on the Hugging Face hub, see `find_drafter_folder`
    target_layers: the target's number of layers, needed if config.json does not contain it

    Raises FileNotFoundError if there is no folder.
    """
    folder = open_drafter_folder(path)
    reading = parse_drafter_config(folder, target_layers)
    for doubt in reading.warnings:
        warnings.warn(f"{path}: {doubt}", stacklevel=2)
    verdicts = []
    for engine, layouts in ENGINE_LAYOUTS.items():
        problems = find_engine_problems(folder, reading, engine)
        reads_layout = reading.layout_name in (*layouts, "none")
        verdicts.append(EngineVerdict(engine, problems, reads_layout))
    return [*verdicts, EngineVerdict("blockdraft", find_folder_problems(folder, reading))]


def format_engine_verdicts(verdicts: list[EngineVerdict]) -> str:
    """Format the results of `check_engines` for an exported folder as text for the user.

    The first line lists the engines that would load the folder. Then come the engines that read
    such folders but would not load this one, with the reasons. The last line lists the engines that
    need another export format.
    """
    loading = [verdict.engine for verdict in verdicts if not verdict.problems]
    refusing = [verdict for verdict in verdicts if verdict.problems and verdict.reads_layout]
    # AngelSlim is not listed among the engines that need another export format, because this
    # project has no export format for it.
    others = [
        verdict.engine
        for verdict in verdicts
        if not verdict.reads_layout and verdict.engine != ANGELSLIM_ENGINE
    ]
    lines = [f"loads in    {'; '.join(loading) or 'no engine'}", *map(str, refusing)]
    if others:
        lines.append(f"others      read other formats (choose with format=): {'; '.join(others)}")
    return "\n".join(lines)


def find_engine_problems(folder: DrafterFolder, reading: ParsedConfig, engine: str) -> list[str]:
    """Return the reasons why an engine would not load a drafter's folder, or would compute
    something else with the drafter than this project does. Return [] if there is no such reason.

    reading: the parsed config of the folder
    """
    problems = [*folder.problems]
    layouts = ENGINE_LAYOUTS[engine]
    if reading.layout_name not in (*layouts, "none"):
        architectures = folder.config.get("architectures")
        problems.append(
            f"config.json: the layout is {reading.layout_name} (architectures {architectures}), "
            f"expected the layout {layouts[0]}"
        )
        return problems
    problems += reading.problems
    if not reading.config_kwargs or reading.problems:
        return problems

    config_problems = [
        *find_missing_or_different_keys(folder.config, reading),
        *find_unsupported_features(folder.config, reading),
        *find_final_norm_differences(reading),
        *find_causality_differences(folder.config, reading),
    ]
    problems += [
        f"config.json: {sentence}" for engines, sentence in config_problems if engine in engines
    ]
    return problems + find_engine_tensor_problems(folder, reading, engine)


def get_nested_object(config: Mapping, key: str) -> dict:
    """Return the dictionary that a config contains under `key`; {} if it contains none."""
    value = config.get(key)
    return value if type(value) is dict else {}


def find_missing_or_different_keys(config: dict, reading: ParsedConfig) -> EngineProblems:
    """Yield a problem for each key of config.json that is not where an engine reads it, or that has
    another value than the engine expects.

    config: the content of config.json. reading: the same config, translated to this project's keys.
    """
    dflash_config = get_nested_object(config, "dflash_config")
    speculators_config = get_nested_object(config, "speculators_config")
    architecture = (
        "DSparkDraftModel" if reading.family_config.get("markov_rank") else "DFlashDraftModel"
    )
    architecture = LAYOUT_ARCHITECTURES.get(reading.layout_name, architecture)
    if config.get("architectures") != [architecture]:
        yield (
            (VLLM_ENGINE, SGLANG_ENGINE),
            f"architectures is {config.get('architectures')}, expected exactly {[architecture]}",
        )
    if reading.layout_name == "SpecForge" and find_head_spec(
        reading.family_config
    ) != find_head_spec(config):
        yield (
            (VLLM_ENGINE,),
            "markov_rank is missing at the top level, where vLLM reads it; vLLM does not support "
            "Domino drafters",
        )
    if config.get("model_type") != "qwen3":
        yield (VLLM_ENGINE,), f"model_type is {config.get('model_type')!r}, expected 'qwen3'"

    target_layers = config.get("num_target_layers", dflash_config.get("num_target_layers"))
    if target_layers is None:
        yield (
            (SGLANG_ENGINE,),
            "num_target_layers is missing: SGLang would use the drafter's number of layers instead",
        )

    layer_config = get_nested_object(config, "transformer_layer_config") or config
    has_window = "sliding_window" in reading.config_kwargs and layer_config.get("sliding_window")
    if has_window and not layer_config.get("use_sliding_window"):
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            "use_sliding_window is not true: the engine would ignore sliding_window",
        )

    if not speculators_config:
        yield (SPECULATORS_ENGINE,), "speculators_config is missing"
    elif not get_nested_object(speculators_config, "verifier").get("name_or_path"):
        yield (SPECULATORS_ENGINE,), "speculators_config.verifier.name_or_path is missing"


def find_unsupported_features(config: dict, reading: ParsedConfig) -> EngineProblems:
    """Yield a problem for each feature of the drafter, such as its conditional head, that engines
    ignore when they read a config.json with this drafter's layout.

    config: the content of config.json. reading: the same config, translated to this project's keys.
    """
    family_config = reading.family_config
    head = find_head_spec(family_config)
    layout = reading.layout_name
    if config.get("speculators_model_type"):
        layout = f"speculators {config['speculators_model_type']}"
    supported_keys = SUPPORTED_CONFIG_KEYS_BY_LAYOUT.get(layout, ())

    if head is not None and head.presence_key not in supported_keys:
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            f"{head.presence_key} is {family_config[head.presence_key]!r}: the engine would draft "
            "without the conditional head",
        )
    kernel_size = family_config.get("conv_kernel_size")
    if kernel_size and "conv_kernel_size" not in supported_keys:
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            f"conv_kernel_size is {kernel_size}: the engine supports no convolutions in this "
            "layout",
        )
    if family_config.get("layer_fusion") and "layer_fusion" not in supported_keys:
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            "layer_fusion is true: in the engine, all drafter layers read the same mix of the "
            "target's layers",
        )
    if family_config.get("sample_from_anchor") and "sample_from_anchor" not in supported_keys:
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            "sample_from_anchor is true: in the engine, the first slot drafts no token",
        )
    if reading.layout_name in DSPARK_LAYOUTS and head is None:
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            "markov_rank is 0 or missing: the engine reads this layout only for DSpark drafters",
        )
    if reading.layout_name in DSPARK_LAYOUTS and not family_config.get("sample_from_anchor"):
        yield (
            ENGINES_WITH_CHECKED_FEATURES,
            "sample_from_anchor is false: in the engine, the first slot drafts a token too",
        )


def find_final_norm_differences(reading: ParsedConfig) -> EngineProblems:
    """Yield a problem for each engine that would give the drafter another output of the target's
    last layer than this project. Some engines use the output before the final norm, others the
    output after it, and SGLang cannot use this layer. Nothing is yielded for a drafter that does
    not read the last layer.

    reading: the parsed config of the drafter
    """
    if reading.config_kwargs["num_target_layers"] is None:
        return
    last_layer_features = reading.family_config.get("last_tap")
    if last_layer_features == "normed":
        yield (
            (VLLM_ENGINE, SPECULATORS_ENGINE),
            "last_tap is normed: vLLM reads the target's last layer before the final norm",
        )
    if last_layer_features == "raw":
        yield (
            (DFLASH_AUTHORS_ENGINE,),
            "last_tap is raw: the authors' code reads the target's last layer after the final norm",
        )
    if last_layer_features is not None:
        yield (
            (SGLANG_ENGINE,),
            "target_layer_ids contains the target's last layer: SGLang reads the output of a "
            "layer at the input of the next layer, and the last layer has no next layer",
        )


def find_causality_differences(config: dict, reading: ParsedConfig) -> EngineProblems:
    """Yield a problem for each engine that would run a layer of the drafter with another attention
    mask than this project does: causal inside the drafted block instead of bidirectional, or the
    reverse.

    An engine reads one or more flags of config.json. The first flag that is set decides for all
    layers. If no flag is set, layers with a sliding window are causal, and layers with full
    attention are not.

    config: the content of config.json. reading: the same config, translated to this project's keys.
    """
    our_flag = reading.family_config.get("causal")
    dflash_config = get_nested_object(config, "dflash_config")
    flags_by_engine = {
        VLLM_ENGINE: (config.get("is_causal"), dflash_config.get("causal")),
        SGLANG_ENGINE: (),
        SPECULATORS_ENGINE: (
            config.get("is_causal"),
            config.get("sliding_window_non_causal") is False,
        ),
        DFLASH_AUTHORS_ENGINE: (config.get("is_causal"),),
    }
    is_sliding_values = {
        kind == "sliding_attention" for kind in reading.config_kwargs["layer_types"]
    }
    for engine, flags in flags_by_engine.items():
        engine_flag = next((flag for flag in flags if flag is not None), None)
        is_different = False
        for is_sliding in is_sliding_values:
            engine_causal = is_sliding if engine_flag is None else engine_flag
            our_causal = is_sliding if our_flag is None else our_flag
            if engine_causal != our_causal:
                is_different = True
        if not is_different:
            continue

        our_layers = "depends on the layer" if our_flag is None else f"is {our_flag}"
        behaviour = f"would run every layer with causal {engine_flag}"
        if engine_flag is None:
            behaviour = "reads only layer_types to decide whether a layer is causal"
        yield (engine,), f"causal {our_layers}: {engine.split(',')[0]} {behaviour}"


def find_engine_tensor_problems(
    folder: DrafterFolder, reading: ParsedConfig, engine: str
) -> list[str]:
    """Return the problems that an engine has with the tensors in a drafter's folder.

    If the folder contains an embedding and a language model head, vLLM uses them. SGLang and the
    DFlash authors' code ignore them and use those of the target. For drafters of DeepSpec this
    makes no difference, because the folder contains copies of the target's embedding and head.

    reading: the parsed config of the folder
    """
    has_reduced_vocabulary = "draft_vocab_size" in reading.config_kwargs
    stored_names = EMBEDDING_HEAD_AND_VOCABULARY_NAMES & folder.tensors.keys()
    problems = []
    if engine == VLLM_ENGINE and "d2t" in folder.tensors and not has_reduced_vocabulary:
        problems.append(
            "d2t is stored, although draft_vocab_size is missing or equals the target's vocabulary"
        )
    takes_stored = engine in (VLLM_ENGINE, SPECULATORS_ENGINE)
    if takes_stored and has_reduced_vocabulary and "lm_head.weight" not in folder.tensors:
        problems.append(
            "lm_head.weight is missing; with draft_vocab_size it is required, because the "
            "target's head has other rows"
        )
    takes_targets = (
        engine in (SGLANG_ENGINE, DFLASH_AUTHORS_ENGINE) and reading.layout_name != "DeepSpec"
    )
    if takes_targets and stored_names:
        names = ", ".join(sorted(stored_names))
        problems.append(f"the engine uses the target's embedding and head and ignores {names}")
    if not folder.tensors:
        return problems

    required_names = set()
    if takes_stored:
        required_names = (
            EMBEDDING_HEAD_AND_VOCABULARY_NAMES if has_reduced_vocabulary else stored_names
        )
    expected = {
        name: shape
        for name, shape in expected_shapes(reading).items()
        if name not in EMBEDDING_HEAD_AND_VOCABULARY_NAMES or name in required_names
    }
    unused_by_engine = {
        VLLM_ENGINE: {"t2d", "d2t"},
        SGLANG_ENGINE: EMBEDDING_HEAD_AND_VOCABULARY_NAMES,
        DFLASH_AUTHORS_ENGINE: EMBEDDING_HEAD_AND_VOCABULARY_NAMES,
    }
    unused = unused_by_engine.get(engine, reading.unused_tensors)
    return problems + find_tensor_problems(
        rename_and_unpad_tensors(folder, reading), expected, unused
    )
