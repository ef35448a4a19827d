"""Assisted generation of transformers with our drafter as its own class: what benchmarks and tests
compare with."""

from pathlib import Path
from tempfile import TemporaryDirectory


def assisted(target, drafter) -> dict[str, object] | None:
    """Return the arguments of transformers' `generate`; None where it has no words for the drafter,
    or the installed one no such class."""
    import transformers

    if "transformers" not in drafter.family.formats or not hasattr(
        transformers, "MuseGlimmerAssistantModel"
    ):
        return None
    from infer.formats.export import export_drafter

    with TemporaryDirectory() as folder:
        try:
            export_drafter(drafter, "transformers", target, Path(folder))
        except ValueError:  # a head, or a vocabulary of its own
            return None
        model = transformers.AutoModel.from_pretrained(folder, dtype=target.dtype)
    return {"assistant_model": model.to(target.device).eval(), "speculation_type": "dflash"}
