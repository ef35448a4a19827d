"""Build the arguments for transformers' assisted generation with our drafter.

Benchmarks and tests compare with it.
"""

from pathlib import Path
from tempfile import TemporaryDirectory


def build_assistant_options(target, drafter) -> dict[str, object] | None:
    """Return arguments for transformers' `generate` that decode with the drafter.

    Returns None if transformers' format cannot express the drafter, or the installed version does
    not have the assistant class.
    """
    import transformers

    has_format = "transformers" in drafter.family.formats
    if not has_format or not hasattr(transformers, "MuseGlimmerAssistantModel"):
        return None
    from infer.formats.export import export_drafter

    with TemporaryDirectory() as folder:
        try:
            export_drafter(drafter, "transformers", target, Path(folder))
        except ValueError:  # the drafter has a head, or a vocabulary of its own
            return None
        model = transformers.AutoModel.from_pretrained(folder, dtype=target.dtype)
    return {"assistant_model": model.to(target.device).eval(), "speculation_type": "dflash"}
