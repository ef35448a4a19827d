"""Read a drafter's folder in any layout: find its family, its config in our terms, and the tensors
that it must have.

The families know their own layouts (`read` of their classes). All problems are collected, not only
the first one.
"""

from collections.abc import Collection, Mapping

from infer.drafters.config_keys import ParsedConfig
from infer.drafters.families import DRAFTER_FAMILIES, MISSING_FAMILIES
from infer.formats.folders import INT8_DTYPE, DrafterFolder
from infer.utils.optional import find_missing_path

# methods that no family implements, by a word of `architectures` or `speculators_model_type`
UNSUPPORTED_DRAFTER_TYPES_BY_WORD = {
    "dfly": "a DFly drafter (a shared context and a mix for each layer, with TreeFlash's step)",
    "peagle": "a P-EAGLE drafter (EAGLE-3's layers over mask tokens; vLLM runs it)",
}
SAFETENSORS_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
SAFETENSORS_INDEX_DTYPES = ("I64", "I32")


def read_layout(folder: DrafterFolder, target_layers: int | None = None) -> ParsedConfig:
    """Read the config of a folder in our terms. Nothing is raised: problems are in the reading.

    target_layers: the target's number of layers, for layouts that do not store the feature layers
    """
    raw = folder.config
    if not raw:
        return ParsedConfig("none", None, {}, [])

    method = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    if raw.get("parallel_drafting") and "eagle" in method:
        method = "peagle"
    for word, description in UNSUPPORTED_DRAFTER_TYPES_BY_WORD.items():
        if word in method:
            return refuse_config(f"this is {description}, which is not read here")

    for family in DRAFTER_FAMILIES.values():
        reader = family.load().read_config
        reading = reader(family, raw, folder.tensors, target_layers)
        if reading is not None:
            return reading

    for family in MISSING_FAMILIES:
        if family.config_key in raw:
            module = find_missing_path(family.class_path)
            return refuse_config(f"this is a {family.title} drafter, and {module} is missing")
    architectures = ", ".join(f"['{family.architecture}']" for family in DRAFTER_FAMILIES.values())
    return refuse_config(
        f"architectures is {raw.get('architectures')}, expected {architectures}, or another class "
        "name of these drafters"
    )


def refuse_config(reason: str) -> ParsedConfig:
    """Return the reading of a config that no family can read."""
    return ParsedConfig("none", None, {}, [f"config.json: {reason}"])


def expected_shapes(reading: ParsedConfig) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the tensors that a drafter with this config has. The reading
    must have no problems."""
    return {
        name: tuple(tensor.shape) for name, tensor in reading.build_drafter().state_dict().items()
    }


def find_tensor_problems(
    folder: DrafterFolder,
    expected: Mapping[str, tuple[int, ...]],
    unused: Collection[str],
    float_dtypes: Collection[str] = SAFETENSORS_FLOAT_DTYPES,
) -> list[str]:
    """Compare a folder's tensors with the expected names and shapes. Return a sentence for each
    kind of problem, with the names of the tensors. `unused`: names that are ignored."""
    stored = folder.tensors
    common = [name for name in expected if name in stored]
    problems = {
        "missing": [name for name in expected if name not in stored],
        "unknown": [name for name in stored if name not in expected and name not in unused],
        "of wrong shape": [
            f"{name} {list(stored[name].shape)}, expected {list(expected[name])}"
            for name in common
            if stored[name].shape != expected[name]
        ],
        "of wrong type": [
            f"{name} {stored[name].dtype}"
            for name in common
            if stored[name].dtype
            not in (SAFETENSORS_INDEX_DTYPES if name == "d2t" else float_dtypes)
        ],
    }
    return [
        f"{kind} tensors: {', '.join(sorted(names))}" for kind, names in problems.items() if names
    ]


def normalise_tensors(folder: DrafterFolder, reading: ParsedConfig) -> DrafterFolder:
    """Return a folder with its tensors under our names, and without the padding rows of the
    vocabulary. The reading must have no problems."""
    renamed = folder.rename_tensors(reading.renamed_tensors)
    return renamed.remove_padding(reading.padded_rows, reading.options["vocab_size"])


def find_folder_problems(folder: DrafterFolder, reading: ParsedConfig) -> list[str]:
    """Return every problem that prevents loading the folder."""
    problems = folder.problems + reading.problems
    if reading.problems or not reading.options or not folder.tensors:
        return problems
    converted = normalise_tensors(folder, reading)
    if len(converted.tensors) < len(folder.tensors):
        duplicates = [
            name
            for name, our_name in reading.renamed_tensors.items()
            if name != our_name and our_name in folder.tensors
        ]
        names = ", ".join(sorted(duplicates))
        problems.append(f"tensors stored twice, under two names: {names}")
    float_dtypes = (*SAFETENSORS_FLOAT_DTYPES, INT8_DTYPE)
    shapes = expected_shapes(reading)
    return problems + find_tensor_problems(converted, shapes, reading.unused_tensors, float_dtypes)
