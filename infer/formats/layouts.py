"""Read the config.json of a drafter's folder in any layout: find the drafter's family, translate
the keys to this project's keys, and check which tensors the folder must contain.

The method `read_config` of each drafter class reads the layouts of its family. All problems of a
folder are reported, not only the first one.
"""

from collections.abc import Collection, Mapping

from infer.drafters.config_keys import ParsedConfig
from infer.drafters.families import DRAFTER_FAMILIES, MISSING_FAMILIES
from infer.formats.folders import INT8_DTYPE, DrafterFolder
from infer.utils.optional import find_missing_path

# Drafting methods that no drafter family of this project implements. Key: a substring, in lower
# case, of `architectures` or `speculators_model_type` in config.json. Value: a description.
UNSUPPORTED_DRAFTER_TYPES_BY_WORD = {
    "dfly": "a DFly drafter (a shared context and a mix for each layer, with TreeFlash's step)",
    "peagle": "a P-EAGLE drafter (EAGLE-3's layers over mask tokens; vLLM runs it)",
}
SAFETENSORS_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
SAFETENSORS_INDEX_DTYPES = ("I64", "I32")


def read_layout(folder: DrafterFolder, target_layers: int | None = None) -> ParsedConfig:
    """Translate the config.json of a folder to this project's keys. No exception is raised: the
    result lists the problems.

    target_layers: the target's number of layers, which some layouts do not store
    """
    raw = folder.config
    if not raw:
        return ParsedConfig("none", None, {}, [])

    method = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    if raw.get("parallel_drafting") and "eagle" in method:
        method = "peagle"
    for word, description in UNSUPPORTED_DRAFTER_TYPES_BY_WORD.items():
        if word in method:
            return refuse_config(f"this is {description}, which this project does not support")

    for family in DRAFTER_FAMILIES.values():
        reader = family.load().read_config
        reading = reader(family, raw, folder.tensors, target_layers)
        if reading is not None:
            return reading

    for family in MISSING_FAMILIES:
        if family.config_key in raw:
            module = find_missing_path(family.class_path)
            return refuse_config(
                f"this is a {family.title} drafter, and this installation lacks {module}"
            )
    architectures = ", ".join(f"['{family.architecture}']" for family in DRAFTER_FAMILIES.values())
    return refuse_config(
        f"architectures is {raw.get('architectures')}, expected {architectures}, or the class "
        "name of another public layout of these drafters"
    )


def refuse_config(reason: str) -> ParsedConfig:
    """Return a `ParsedConfig` with the only problem `reason`, for a config.json that no family can
    read."""
    return ParsedConfig("none", None, {}, [f"config.json: {reason}"])


def expected_shapes(reading: ParsedConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and the shape of each tensor that a drafter with this config has. `reading`
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
    """Compare the tensors of a folder with the expected tensors. Return one sentence for each kind
    of problem: missing, unknown, of wrong shape or of wrong dtype.

    expected: the shape of each tensor that the folder must contain, by the name of the tensor
    unused: names of tensors that are ignored if the folder contains them
    float_dtypes: allowed dtypes of all tensors except d2t, which holds integers
    """
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
    """Return the folder with the tensors renamed to this project's names, and without the padding
    rows of the vocabulary. `reading` must have no problems."""
    renamed = folder.rename_tensors(reading.renamed_tensors)
    return renamed.remove_padding(reading.padded_rows, reading.options["vocab_size"])


def find_folder_problems(folder: DrafterFolder, reading: ParsedConfig) -> list[str]:
    """Return a sentence for each problem that prevents loading the drafter from the folder; [] if
    there is none."""
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
        problems.append(f"these tensors are also stored under a second name: {names}")
    float_dtypes = (*SAFETENSORS_FLOAT_DTYPES, INT8_DTYPE)
    shapes = expected_shapes(reading)
    return problems + find_tensor_problems(converted, shapes, reading.unused_tensors, float_dtypes)
