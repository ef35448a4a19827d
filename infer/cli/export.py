"""`export`: a drafter in the layout of another engine."""

from dataclasses import dataclass
from pathlib import Path

from infer.cli.models import OfTarget
from infer.drafters.families import FORMATS
from infer.utils.checks import one_of


@dataclass
class ExportCommand(OfTarget):
    """Write a drafter in the layout of another engine (`hf upload <user>/<name> <out>` uploads it).

    checkpoint: any drafter that load_drafter reads
    format: dflash: for vLLM and SGLang; dflash2, dspark and specforge: the same with a selector, a
        Markov head, and a Markov head or a GRU; speculators: for vLLM; transformers: for its own
        `generate`, version 5.23 or later; gguf: for llama.cpp
    converter: for gguf: path of llama.cpp's convert_hf_to_gguf.py; null: found on PATH
    out: a new or empty folder
    license: the drafter's license for its model card, such as apache-2.0; null: the card names none
    base_model: the target's name on the hub for the model card; null: target.path
    target: see TargetConfig in infer/config.py; speculators and dspark store its embedding and head
    """

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    format: str = "dflash"
    out: str = "runs/export"
    converter: str | None = None
    license: str | None = None
    base_model: str | None = None

    def check(self) -> None:
        """Raise ValueError for what cannot be written."""
        self.target.check()
        one_of(self, format=FORMATS)
        if not self.out:
            raise ValueError("out=<folder>: where should the export go?")
        if Path(self.out).is_dir() and any(Path(self.out).iterdir()):
            raise ValueError(f"out={self.out}: that folder is not empty, choose another")
        if self.converter is not None and self.format != "gguf":
            raise ValueError(f"converter={self.converter}: for format=gguf, leave it out")


def run(config: ExportCommand) -> None:
    from infer import load_drafter, load_target
    from infer.evaluation.acceptance import FILE as REFERENCE_FILE
    from infer.evaluation.card import write_card
    from infer.formats.compatibility import check_folder, describe_export
    from infer.formats.export import check_base_model, check_export, export_drafter
    from infer.formats.gguf import convert, find_converter
    from infer.targets.loading import resolve_path
    from infer.utils.files import replacing_folder

    place = config.target
    out = Path(config.out)
    target = None
    converter = find_converter(config.converter) if config.format == "gguf" else None
    drafter = load_drafter(config.checkpoint)
    check_export(drafter, config.format)
    if config.base_model is not None and (doubt := check_base_model(config.base_model, drafter)):
        print(doubt)
    if (
        FORMATS[config.format].target
        or drafter.embed_tokens is not None
        or drafter.lm_head is not None
    ):
        target = load_target(
            place.path, place.dtype, "cpu", place.trust_remote_code, ()
        )  # its two ends
        drafter.check_target(target)
        target.name = config.base_model or resolve_path(place.path)
    with replacing_folder(out) as fresh:
        export_drafter(drafter, config.format, target, fresh)
        if converter:
            convert(fresh, place.path, converter)
        write_card(
            config.checkpoint, fresh, config.license, config.base_model or config.target.path
        )
    print(f"export      {out}, format={config.format}")
    print(describe_export(check_folder(out)))
    if converter:
        print(f"llama.cpp   reads {next(out.glob('*.gguf'))}")
    if not (out / REFERENCE_FILE).is_file():
        print(
            f"{REFERENCE_FILE} is not written, as the checkpoint's evaluation has no greedy chains on prompts from "
            "outside its data (evaluation.external_prompts=0, or none at all): ./launch.sh doctor measures them itself"
        )
