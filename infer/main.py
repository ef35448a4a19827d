"""`python infer/main.py --config-name eval|generate [overrides]`: the commands that need a trained drafter only."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from data.packing import DataConfig
from infer.config import DecodeOptions, EvaluationConfig, TargetConfig
from infer.entry import entry


@dataclass
class EvalCommand:
    """Evaluates a drafter the way training does at a checkpoint."""

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"  # a drafter folder or a training checkpoint
    out: str = "runs/evaluation"  # where numbers and pictures go
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be evaluated."""
        for part in (self.target, self.data, self.evaluation):
            part.check()


@dataclass
class GenerateCommand:
    """Continues a prompt and says what it took."""

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    prompt: str = "import os\n\ndef main():\n"
    target: TargetConfig = field(default_factory=TargetConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)

    def check(self) -> None:
        """Raises ValueError for what cannot be decoded."""
        self.target.check()
        self.decoding.check()
        if not self.prompt:
            raise ValueError("prompt: at least one character")


def load(target: TargetConfig, checkpoint: str):
    """Target and drafter, the drafter in the target's dtype. The drafter is looked at first: it is the cheaper one."""
    from infer import load_drafter, load_target

    drafter = load_drafter(checkpoint)
    model = load_target(target.path, target.dtype, target.device, target.trust_remote_code)
    return model, drafter.to(model.device, model.dtype)


def run_eval(config: EvalCommand) -> None:
    from data.prompts import held_out_prompts
    from infer.evaluate import evaluate
    from infer.report import table, write_report

    target, drafter = load(config.target, config.checkpoint)
    options = config.evaluation
    prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)

    def progress(done: int, total: int) -> None:
        print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)

    result = evaluate(target, drafter, prompts, options, progress)
    result |= {"step": None, "checkpoint": config.checkpoint, "drafter": config.checkpoint}
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"\nreport      {write_report(out, [result])}")


def run_generate(config: GenerateCommand) -> None:
    from infer import generate

    target, drafter = load(config.target, config.checkpoint)
    options = config.decoding
    answer = generate(target, drafter, config.prompt, options)
    stats = answer.stats
    print(config.prompt + answer.text)
    print(
        f"\n[{options.method}: {stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}, "
        f"{stats.tokens_per_second:.0f} tokens/s, ended by {answer.finish_reason}]",
        file=sys.stderr,
    )


COMMANDS = {"eval": (EvalCommand, run_eval), "generate": (GenerateCommand, run_generate)}

if __name__ == "__main__":
    flag, name, *overrides = [*sys.argv[1:], "", ""][:2] + sys.argv[3:]
    if flag != "--config-name" or name not in COMMANDS:
        print(f"error: usage: infer/main.py --config-name {'|'.join(COMMANDS)} [overrides]", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[1:] = overrides
    entry(name, *COMMANDS[name], overrides)
