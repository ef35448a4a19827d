"""The command `doctor`: why a drafter's acceptance is low, here or in another engine."""

from dataclasses import dataclass

from infer.cli.models import CommandWithTarget, load_target_and_drafters
from infer.utils.progress import HEARTBEAT, report_activity


@dataclass
class DoctorCommand(CommandWithTarget):
    """Find out why an engine accepts fewer drafts than the drafter's card reports.

    checkpoint: a drafter's folder, a training checkpoint, a hub id, or the name of a target whose
        drafter this repository contains
    url: address of a running engine with target and drafter, vLLM or ours; null: check only the
        folder
    target: see TargetConfig in infer/config.py
    """

    checkpoint: str = "${target.path}"
    url: str | None = None

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        self.target.check()
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: give an address such as http://127.0.0.1:8000")
        if self.checkpoint == "lookup":
            raise ValueError(
                f"checkpoint={self.checkpoint}: give a drafter's folder; lookup has no model card"
            )


DOCTOR_PROMPT_TOKENS = 64


def run(config: DoctorCommand) -> None:
    """Print a report. Exit with code 1 if it found a cause of low acceptance."""
    from data.prompts import load_outside_prompts
    from infer.doctor.engines import measure_engine, open_client
    from infer.doctor.examine import diagnose_drafter, format_diagnosis
    from infer.evaluation.acceptance import find_reference, measure_reference

    reference = find_reference(config.checkpoint)
    has_reference = reference is not None
    target, [drafter] = load_target_and_drafters(config.target, [config.checkpoint])
    if target.tokenizer is None:
        raise ValueError(
            f"target.path={config.target.path}: the target has no tokenizer, which the prompts of "
            "this command need"
        )
    if reference is None:
        texts = load_outside_prompts(target.tokenizer, DOCTOR_PROMPT_TOKENS, False)
        chats = texts
        if target.tokenizer.chat_template is not None:
            chats = load_outside_prompts(target.tokenizer, DOCTOR_PROMPT_TOKENS, True)
        # Texts and chats alternate.
        prompts = [(chats if i % 2 else texts)[i] for i in range(len(texts))]
        with report_activity(f"measuring the drafter's acceptance on {len(prompts)} prompts"):
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
