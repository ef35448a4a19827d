"""The command `doctor`: finds out why our engine or vLLM accepts few draft tokens of a drafter."""

from dataclasses import dataclass

from infer.cli.models import CommandWithTarget, load_target_and_drafters
from infer.utils.checks import require_http_address
from infer.utils.progress import HEARTBEAT, set_activity_within_block


@dataclass
class DoctorCommand(CommandWithTarget):
    """Find out why an engine accepts fewer draft tokens than the drafter's model card reports.

    checkpoint: a drafter's folder, a training checkpoint, a Hugging Face hub id, or the name of a
        target whose drafter this repository contains
    url: address of a running server of vLLM or of this project, which serves the target with the
        drafter. null means that only our engine is tested, in this process
    target: see TargetConfig in infer/config.py
    """

    checkpoint: str = "${target.path}"
    url: str | None = None

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        self.target.check()
        require_http_address(self, "url")
        if self.checkpoint == "lookup":
            raise ValueError(
                f"checkpoint={self.checkpoint}: prompt lookup has no model card to compare with; "
                "give a drafter's folder"
            )


DOCTOR_PROMPT_TOKENS = 64


def run(config: DoctorCommand) -> None:
    """Print a diagnosis. Exit with code 1 if it names a cause of low acceptance."""
    from data.prompts import load_external_prompts
    from infer.doctor.engines import measure_engine
    from infer.doctor.examine import diagnose_drafter, format_diagnosis
    from infer.evaluation.acceptance import load_stored_reference, measure_reference
    from infer.evaluation.engine_metrics import open_client

    reference = load_stored_reference(config.checkpoint)
    has_reference = reference is not None
    target, [drafter] = load_target_and_drafters(config.target, [config.checkpoint])
    if target.tokenizer is None:
        raise ValueError(
            f"target.path={config.target.path}: the target has no tokenizer, but this command "
            "must tokenize prompts; give a target with a tokenizer"
        )
    if reference is None:
        texts = load_external_prompts(target.tokenizer, DOCTOR_PROMPT_TOKENS, False)
        chats = texts
        if target.tokenizer.chat_template is not None:
            chats = load_external_prompts(target.tokenizer, DOCTOR_PROMPT_TOKENS, True)
        # Take every second prompt as plain text, and the others as chats.
        prompts = [(chats if i % 2 else texts)[i] for i in range(len(texts))]
        with set_activity_within_block(
            f"measuring the drafter's acceptance on {len(prompts)} prompts"
        ):
            reference = measure_reference(target, drafter, prompts)
    engine_result = None
    if config.url is not None:
        with open_client(config.url) as client:
            engine_result = measure_engine(client, reference)
    HEARTBEAT.set_activity("testing possible causes of low acceptance")
    examination = diagnose_drafter(
        target, drafter, reference, engine_result, has_reference, config.checkpoint
    )
    print(format_diagnosis(examination))
    if not examination.healthy:
        raise SystemExit(1)
