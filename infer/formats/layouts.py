"""Read a drafter's folder in our terms, whatever its layout: a family, a config, and the tensors
that it must have.

The families know their own layouts (`read` of their classes). All faults are noted, not the first
one only.
"""

from infer.drafters.config_keys import ConfigReading
from infer.drafters.families import FAMILIES, MISSING_FAMILIES
from infer.formats.folders import CODED, Folder
from infer.utils.optional import find_missing

REFUSED = {  # by a word of `architectures` or `speculators_model_type`: methods that no family here has
    "dfly": "a DFly drafter (a shared context and a mix for each layer, with TreeFlash's step)",
    "peagle": "a P-EAGLE drafter (EAGLE-3's layers over mask tokens; vLLM runs it)",
}
FLOATS = ("F64", "F32", "F16", "BF16")


def read(folder: Folder, target_layers: int | None = None) -> ConfigReading:
    """Read a folder; `target_layers`: how many layers the target has, for layouts that do not say.
    Nothing is raised: faults are among the reading's problems."""
    raw = folder.config
    if not raw:
        return ConfigReading("none", None, {}, [])
    named = f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()
    if raw.get("parallel_drafting") and "eagle" in named:
        named = "peagle"
    for word in [word for word in REFUSED if word in named]:
        return ConfigReading(
            "none", None, {}, [f"config.json: this is {REFUSED[word]}, which is not read here"]
        )
    for family in FAMILIES.values():
        reading = family.load().read(family, raw, folder.tensors, target_layers)
        if reading is not None:
            return reading
    for family in MISSING_FAMILIES:
        if family.config_key in raw:
            sentence = (
                f"this is a {family.title} drafter, and {find_missing(family.drafter)} is missing"
            )
            return ConfigReading("none", None, {}, [f"config.json: {sentence}"])
    known = ", ".join(f"['{family.architecture}']" for family in FAMILIES.values())
    sentence = (
        f"architectures is {raw.get('architectures')}, expected {known}, or another name of theirs"
    )
    return ConfigReading("none", None, {}, [f"config.json: {sentence}"])


def shapes(reading: ConfigReading) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the tensors that a drafter of this config has. The config has no
    problems."""
    return {name: tuple(tensor.shape) for name, tensor in reading.drafter().state_dict().items()}


def tensor_problems(
    folder: Folder,
    expected: dict[str, tuple[int, ...]],
    unused: set[str],
    floats: tuple[str, ...] = FLOATS,
) -> list[str]:
    """Return a sentence for each kind of fault of a folder's tensors, with their names."""
    found = folder.tensors
    groups = {
        "missing": [name for name in expected if name not in found],
        "unknown": [name for name in found if name not in expected and name not in unused],
        "of wrong shape": [
            f"{name} {list(found[name].shape)}, expected {list(shape)}"
            for name, shape in expected.items()
            if name in found and found[name].shape != shape
        ],
        "of wrong type": [
            f"{name} {found[name].dtype}"
            for name in expected
            if name in found
            and found[name].dtype not in (("I64", "I32") if name == "d2t" else floats)
        ],
    }
    return [
        f"{what} tensors: {', '.join(sorted(names))}" for what, names in groups.items() if names
    ]


def as_read(folder: Folder, reading: ConfigReading) -> Folder:
    """Return a folder with its tensors under our names, and without rows that stand for no token.
    The config has no problems."""
    renamed = folder.renamed(reading.renamed)
    return renamed.without_padding(reading.padded_rows, reading.options["vocab_size"])


def find_problems(folder: Folder, reading: ConfigReading) -> list[str]:
    """Return every fault that keeps a folder from being loaded here."""
    config = folder.problems + reading.problems
    if reading.problems or not reading.options or not folder.tensors:
        return config
    renamed = as_read(folder, reading)
    if len(renamed.tensors) < len(folder.tensors):
        twice = [
            name
            for name, ours in reading.renamed.items()
            if name != ours and ours in folder.tensors
        ]
        config = [*config, f"tensors stored twice, under two names: {', '.join(sorted(twice))}"]
    return config + tensor_problems(renamed, shapes(reading), reading.unused, (*FLOATS, CODED))
