"""`python infer/main.py --config-name COMMAND [overrides]`: all commands that train nothing."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.config import ChatConfig, DecodeOptions, EngineConfig, EvaluationConfig, ServerConfig, TargetConfig
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


@dataclass
class ServeCommand:
    """Serves a target and its drafter over HTTP."""

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    target: TargetConfig = field(default_factory=TargetConfig)
    decoding: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be served."""
        for part in (self.target, self.decoding, self.server):
            part.check()


@dataclass
class RegenerateCommand:
    """Lets the target rewrite the answers of a data set: what a drafter should learn from."""

    out: str = "runs/answers.jsonl"  # one line a row, in the rows' order; a stopped run goes on where it was
    checkpoint: str | None = None  # a drafter that makes it faster, for decoding.method=chain or ddtree
    server: str | None = None  # instead of our engine: an address with OpenAI's API, such as http://host:8000/v1
    model: str | None = None  # what that server calls the target; None: the first it has
    at_once: int = 64  # requests under way at that server
    prompt_tokens: int = 96  # of a row that is one text, the target continues so many tokens
    most_failures: int = 100  # rows; beyond that something is wrong
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)

    def check(self) -> None:
        """Raises ValueError for what cannot be asked for."""
        for part in (self.target, self.data, self.decoding):
            part.check()
        if self.server is None and self.checkpoint is None and self.decoding.method != "plain":
            raise ValueError(f"decoding.method={self.decoding.method} needs checkpoint=..., or use decoding=plain")
        if min(self.at_once, self.prompt_tokens) < 1:
            raise ValueError("at_once and prompt_tokens are at least 1")


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


def run_serve(config: ServeCommand) -> None:
    from infer import Engine
    from infer.server import serve

    target, drafter = load(config.target, config.checkpoint)
    decoding, server = config.decoding, config.server
    positions = getattr(target.config, "max_position_embeddings", None) or server.max_length
    capacity = min(server.max_length, positions)
    engine = Engine(target, drafter, decoding.method, decoding.budget, decoding.rows, capacity, decoding.compile)
    print(
        f"{server.model_name or target.name} at http://{server.host}:{server.port}/v1: {decoding.method}, "
        f"{decoding.rows} texts at a time, {capacity} tokens each; talk to it with ./launch.sh chat",
        file=sys.stderr,
        flush=True,
    )
    serve(engine, server)


def run_regenerate(config: RegenerateCommand) -> None:
    from data.rows import questions
    from infer import load_drafter, load_target
    from infer.api import encode
    from infer.regenerate import Row, by_engine, by_server, options_of, regenerate
    from infer.target import load_tokenizer

    place = config.target
    if config.server is None:
        target = load_target(place.path, place.dtype, place.device, place.trust_remote_code)
        tokenizer = target.tokenizer
    else:  # the server has the model
        tokenizer = load_tokenizer(place.path, place.trust_remote_code)
    rows = []
    for index, row in enumerate(questions(config.data)):
        prompt = row["messages"] or row["prompt"]
        if not prompt:
            ids = tokenizer(row["text"])["input_ids"][: config.prompt_tokens]
            prompt = tokenizer.decode(ids, skip_special_tokens=True)
        rows.append(Row(index, prompt))
    if config.server is not None:
        answers = by_server(config.server, config.model, config.decoding, config.at_once)
    else:
        drafter = None
        if config.decoding.method != "plain":
            drafter = load_drafter(config.checkpoint).to(target.device, target.dtype)
        longest = max(len(encode(target, row.prompt)) for row in rows)
        answers = by_engine(target, drafter, config.decoding, longest + config.decoding.max_new_tokens)
    settings = {"target": place.path, "server": config.server, "data": asdict(config.data)}
    settings |= {"prompt_tokens": config.prompt_tokens} | options_of(config.decoding)

    def progress(done: int, total: int, failed: int) -> None:
        note = f", {failed} failed" if failed else ""
        print(f"\r{done}/{total} rows{note}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    counts = regenerate(rows, answers, Path(config.out), settings, config.most_failures, progress)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} rows failed")


def run_chat(config: ChatConfig) -> None:
    from infer.chat import chat

    chat(config)


COMMANDS = {
    "eval": (EvalCommand, run_eval),
    "generate": (GenerateCommand, run_generate),
    "serve": (ServeCommand, run_serve),
    "chat": (ChatConfig, run_chat),
    "regenerate": (RegenerateCommand, run_regenerate),
}

if __name__ == "__main__":
    flag, name, *overrides = [*sys.argv[1:], "", ""][:2] + sys.argv[3:]
    if flag != "--config-name" or name not in COMMANDS:
        print(f"error: usage: infer/main.py --config-name {'|'.join(COMMANDS)} [overrides]", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[1:] = overrides
    entry(name, *COMMANDS[name], overrides)
