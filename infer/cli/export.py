"""The command `export`: writes a drafter in the file layout that another engine reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infer.cli.models import CommandWithTarget
from infer.drafters.families import EXPORT_FORMATS
from infer.utils.checks import require_one_of


@dataclass
class ExportCommand(CommandWithTarget):
    """Write a drafter in the file layout that another engine reads. The command
    `hf upload <user>/<name> <out>` then uploads it to the Hugging Face hub.

    checkpoint: the drafter, in any layout that load_drafter reads
    format: the layout. dflash is for vLLM and SGLang. dflash2 is dflash for drafters with a
        selector head, dspark for drafters with a Markov head, and specforge for drafters with a
        Markov or GRU head. speculators is for vLLM. transformers is for the method `generate` of
        transformers 5.23 or later. gguf is for llama.cpp
    converter: path of llama.cpp's script convert_hf_to_gguf.py, for format=gguf. null means that
        the script is searched on PATH
    out: a new or empty folder for the export
    license: the drafter's license that the model card names, such as apache-2.0. null means that
        the card names no license
    base_model: the target's name on the hub, for the model card. null means target.path
    target: see TargetConfig in infer/config.py. The formats speculators and dspark store the
        embedding and the output head of the target
    """

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    format: str = "dflash"
    out: str = "runs/export"
    converter: str | None = None
    license: str | None = None
    base_model: str | None = None

    def check(self) -> None:
        """Raise ValueError for an unknown format or an output folder that is not empty."""
        self.target.check()
        require_one_of(self, format=EXPORT_FORMATS)
        if not self.out:
            raise ValueError("out is empty: give a folder")
        if Path(self.out).is_dir() and any(Path(self.out).iterdir()):
            raise ValueError(f"out={self.out}: this folder is not empty; choose another folder")
        if self.converter is not None and self.format != "gguf":
            raise ValueError(
                f"converter={self.converter} works with format=gguf only, not with "
                f"format={self.format}: remove converter"
            )


def run(config: ExportCommand) -> None:
    """Write the drafter and a model card to `out`, and print which engines can load the drafter."""
    from infer import load_drafter, load_target
    from infer.evaluation.acceptance import ACCEPTANCE_REFERENCE_FILE_NAME
    from infer.evaluation.card import write_card
    from infer.formats.compatibility import check_engines, format_engine_verdicts
    from infer.formats.export import check_base_model_sizes, check_export, export_drafter
    from infer.formats.gguf import convert_to_gguf, find_converter
    from infer.targets.loading import resolve_hub_id_or_folder
    from infer.utils.files import atomic_create_folder

    target_config = config.target
    out = Path(config.out)
    target = None
    converter = find_converter(config.converter) if config.format == "gguf" else None
    drafter: Any = load_drafter(config.checkpoint)
    check_export(drafter, config.format)
    if config.base_model is not None:
        warning = check_base_model_sizes(config.base_model, drafter)
        if warning:
            print(warning)
    has_embedding_or_head = drafter.embed_tokens is not None or drafter.lm_head is not None
    if EXPORT_FORMATS[config.format].stores_embedding_and_head or has_embedding_or_head:
        # Only the target's embedding and output head are needed. The last argument is the empty
        # list of decoder layers to load.
        target = load_target(
            target_config.path, target_config.dtype, "cpu", target_config.trust_remote_code, ()
        )
        drafter.check_target(target)
        target.name = config.base_model or resolve_hub_id_or_folder(target_config.path)
    with atomic_create_folder(out) as temporary_folder:
        export_drafter(drafter, config.format, target, temporary_folder)
        if converter:
            convert_to_gguf(temporary_folder, target_config.path, converter)
        base_model = config.base_model or target_config.path
        write_card(config.checkpoint, temporary_folder, config.license, base_model)
    print(f"export      {out}, format={config.format}")
    print(format_engine_verdicts(check_engines(out)))
    if converter:
        print(f"llama.cpp   reads {next(out.glob('*.gguf'))}")
    if not (out / ACCEPTANCE_REFERENCE_FILE_NAME).is_file():
        print(
            f"{ACCEPTANCE_REFERENCE_FILE_NAME} is not written, because the checkpoint was "
            "not evaluated greedily on external prompts (evaluation.external_prompts above 0). "
            "Without this file, ./launch.sh doctor measures the acceptance itself."
        )
