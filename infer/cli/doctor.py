"""`doctor`: why a drafter's acceptance is low, here or in an engine."""

from dataclasses import dataclass

from infer.cli.models import OfTarget, load_all
from infer.utils.progress import HEARTBEAT, doing


@dataclass
class DoctorCommand(OfTarget):
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
        """Raise ValueError for what cannot be examined."""
        self.target.check()
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"url={self.url}: an address such as http://127.0.0.1:8000")
        if self.checkpoint == "lookup":
            raise ValueError(
                f"checkpoint={self.checkpoint}: a drafter's folder; lookup has no card"
            )


def run(config: DoctorCommand) -> None:
    from data.prompts import outside_prompts
    from infer.doctor.engines import examine_engine, open_client
    from infer.doctor.examine import examine, report
    from infer.evaluation.acceptance import find_reference, measure_reference

    reference = find_reference(config.checkpoint)
    carded = reference is not None
    target, [drafter] = load_all(config.target, [config.checkpoint])
    if target.tokenizer is None:
        raise ValueError(
            f"target.path={config.target.path}: it has no tokenizer, and prompts are sent as texts"
        )
    if reference is None:
        plain = outside_prompts(target.tokenizer, 64, False)
        chats = (
            plain
            if target.tokenizer.chat_template is None
            else outside_prompts(target.tokenizer, 64, True)
        )
        prompts = [(chats if i % 2 else plain)[i] for i in range(len(plain))]
        with doing(f"measuring what the drafter reaches on {len(prompts)} prompts"):
            reference = measure_reference(target, drafter, prompts)
    served = None
    if config.url is not None:
        with open_client(config.url) as client:
            served = examine_engine(client, reference)
    HEARTBEAT.at("trying what could explain the acceptance")
    found = examine(target, drafter, reference, served, carded, config.checkpoint)
    print(report(found))
    if not found.healthy:
        raise SystemExit(1)
