"""Read the config.json of a drafter that this or another project has saved: find the drafter's
family, translate the keys to this project's keys, and check the names and shapes of the tensors.

A layout is the set of config keys and tensor names that one project uses. The method `read_config`
of each drafter class reads the layouts of its family. All problems of a folder are reported, not
only the first one.
"""

from collections.abc import Collection, Mapping

from infer.drafters.config_keys import ParsedConfig
from infer.drafters.families import DRAFTER_FAMILIES, MISSING_FAMILIES
from infer.formats.folders import INT8_LINEAR_WEIGHT_DTYPE, DrafterFolder
from infer.utils.optional import find_missing_path

# Drafting methods that no drafter family of this project implements. Keys are lower-case substrings
# of `architectures` or `speculators_model_type` in a drafter's config.json. Values are descriptions
# for the error message.
UNSUPPORTED_DRAFTER_TYPES_BY_SUBSTRING = {
    "dfly": "a DFly drafter (a shared context and a mix for each layer, with TreeFlash's step)",
    "peagle": "a P-EAGLE drafter (EAGLE-3's layers over mask tokens; vLLM runs it)",
}
SAFETENSORS_FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
SAFETENSORS_INDEX_DTYPES = ("I64", "I32")


def parse_drafter_config(folder: DrafterFolder, target_layers: int | None = None) -> ParsedConfig:
    """Translate the config.json of a drafter's folder to this project's keys.

    target_layers: the target's number of layers, needed if config.json does not contain it

    Problems do not raise an exception; they are listed in the field `problems` of the result.
    """
    raw = folder.config
    if not raw:
        return ParsedConfig("none", None, {}, [])

    method = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    if raw.get("parallel_drafting") and "eagle" in method:
        method = "peagle"
    for word, description in UNSUPPORTED_DRAFTER_TYPES_BY_SUBSTRING.items():
        if word in method:
            return build_unreadable_config_result(
                f"this is {description}, which this project does not support"
            )

    for family in DRAFTER_FAMILIES.values():
        reader = family.load().read_config
        reading = reader(family, raw, folder.tensors, target_layers)
        if reading is not None:
            return reading

    for family in MISSING_FAMILIES:
        if family.config_key in raw:
            module = find_missing_path(family.class_path)
            return build_unreadable_config_result(
                f"this is a {family.title} drafter, and this installation lacks {module}"
            )
    architectures = ", ".join(f"['{family.architecture}']" for family in DRAFTER_FAMILIES.values())
    return build_unreadable_config_result(
        f"architectures is {raw.get('architectures')}, expected {architectures}, or the class "
        "name of another public layout of these drafters"
    )


def build_unreadable_config_result(reason: str) -> ParsedConfig:
    """Return a `ParsedConfig` for a config.json that no drafter family can read. It has no options,
    and its only problem is `reason`.
    """
    return ParsedConfig("none", None, {}, [f"config.json: {reason}"])


def expected_shapes(reading: ParsedConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a drafter with the given config. Keys are the tensors'
    names in this project.

    reading: a parsed config without problems
    """
    return {
        name: tuple(tensor.shape) for name, tensor in reading.build_drafter().state_dict().items()
    }


def find_tensor_problems(
    folder: DrafterFolder,
    expected: Mapping[str, tuple[int, ...]],
    unused: Collection[str],
    float_dtypes: Collection[str] = SAFETENSORS_FLOAT_DTYPES,
) -> list[str]:
    """Compare the tensors of a folder with the expected tensors. Return a list with at most one
    text for each kind of problem: missing, unknown, of wrong shape or of wrong dtype.

    expected: keys are names of the tensors that the folder must contain, values are their shapes
    unused: names of tensors that are ignored if the folder contains them
    float_dtypes: allowed dtypes of all tensors except d2t, which contains integers
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


def rename_and_unpad_tensors(folder: DrafterFolder, reading: ParsedConfig) -> DrafterFolder:
    """Return a copy of `folder` in which tensors have this project's names, and the vocabulary has
    no padding. Nothing changes on disk.

    reading: the parsed config of the folder, without problems
    """
    renamed = folder.rename_tensors(reading.renamed_tensors)
    return renamed.remove_padding(reading.padded_vocab_size, reading.config_kwargs["vocab_size"])


def find_folder_problems(folder: DrafterFolder, parsed_config: ParsedConfig) -> list[str]:
    """Check whether a drafter can be loaded from a folder. Return a text for each problem; [] if
    there is none.

    parsed_config: the parsed config of the folder, from `parse_drafter_config`
    """
    problems = folder.problems + parsed_config.problems
    if parsed_config.problems or not parsed_config.config_kwargs or not folder.tensors:
        return problems
    converted = rename_and_unpad_tensors(folder, parsed_config)
    if len(converted.tensors) < len(folder.tensors):
        duplicates = [
            name
            for name, our_name in parsed_config.renamed_tensors.items()
            if name != our_name and our_name in folder.tensors
        ]
        names = ", ".join(sorted(duplicates))
        problems.append(f"these tensors are also stored under a second name: {names}")
    float_dtypes = (*SAFETENSORS_FLOAT_DTYPES, INT8_LINEAR_WEIGHT_DTYPE)
    shapes = expected_shapes(parsed_config)
    return problems + find_tensor_problems(
        converted, shapes, parsed_config.unused_tensors, float_dtypes
    )
