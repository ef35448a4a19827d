"""`python infer/main.py --config-name COMMAND [overrides]`: all commands that train nothing."""

import json
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.config import (
    ChatConfig,
    DecodeOptions,
    EngineConfig,
    EvaluationConfig,
    MaskedOptions,
    ServerConfig,
    TargetConfig,
)
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
class CompareCommand:
    """Evaluates several drafters with every tree, on the same prompts."""

    # drafter folders, training checkpoints, or n-gram files
    checkpoints: list[str] = field(
        default_factory=lambda: [f"runs/embedded-{x}/checkpoints/best" for x in ("dflash", "dart")]
    )
    out: str = "runs/comparison"  # where the table, the picture and the numbers go
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be compared."""
        for part in (self.target, self.data, self.evaluation):
            part.check()
        if not self.checkpoints:
            raise ValueError("checkpoints=[runs/a/checkpoints/best,...]: which drafters?")
        if len(set(map(run_name, self.checkpoints))) < len(self.checkpoints):
            raise ValueError(f"checkpoints={list(self.checkpoints)}: one of them comes twice")


@dataclass
class NgramCommand:
    """Counts n-grams of token ids, for trees that judge paths by them."""

    out: str = "runs/ngrams"  # the file
    order: int | None = None  # the longest n-grams; None: as many tokens as a 64-bit key holds, at most 6
    workers: int | None = None  # processes; None: one a core
    chunk_tokens: int = 8_000_000  # tokens sorted at a time by a process, about 24 bytes each
    target: TargetConfig = field(default_factory=TargetConfig)  # whose tokenizer it is
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be counted."""
        for part in (self.target, self.data):
            part.check()
        if self.order is not None and self.order < 1:
            raise ValueError(f"order={self.order}: at least 1")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"workers={self.workers}: at least 1")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens={self.chunk_tokens}: at least 1")


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
class DiffuseCommand:
    """Lets a masked diffusion model fill in a text, or measures on held-out prompts what self drafting saves it."""

    checkpoint: str = "runs/embedded-diffusion/model"  # a folder of ours, or LLaDA or Dream: a folder or its name
    prompt: str = "import os\n\ndef main():\n"
    evaluate: bool = False  # print the table of draft lengths and orders instead
    prompts: int = 16  # held-out prompts of that table
    prompt_tokens: int = 64  # of them, at most
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 on CUDA, else float32
    device: str = "auto"  # cpu, cuda, cuda:1, ..., or auto
    trust_remote_code: bool = False  # run the modelling code that LLaDA and Dream come with
    data: DataConfig = field(default_factory=DataConfig)
    decoding: MaskedOptions = field(default_factory=MaskedOptions)

    def check(self) -> None:
        """Raises ValueError for what cannot be decoded."""
        self.data.check()
        self.decoding.check()
        if self.prompts < 1 or self.prompt_tokens < 1:
            raise ValueError("prompts and prompt_tokens are at least 1")
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


def run_name(checkpoint: str) -> str:
    """What a checkpoint is called beside others: its run, or its folder."""
    parts = Path(checkpoint).parts
    return parts[parts.index("checkpoints") - 1] if "checkpoints" in parts[1:] else Path(checkpoint).name


def load(target: TargetConfig, checkpoint: str):
    """Target and drafter, the drafter in the target's dtype. The drafter is looked at first: it is the cheaper one. An
    n-gram file is a drafter too: of its pairs."""
    from infer import load_drafter, load_target
    from infer.bigram import Bigram
    from infer.ngram import open_ngram

    drafter = None if Path(checkpoint).is_file() else load_drafter(checkpoint)
    model = load_target(target.path, target.dtype, target.device, target.trust_remote_code)
    if drafter is None:
        counts, vocabulary = open_ngram(checkpoint, model), len(model.head_weight)
        if counts.vocabulary != vocabulary:
            raise ValueError(f"{checkpoint}: counts {counts.vocabulary} tokens, the target's head has {vocabulary}")
        return model, Bigram(counts)
    return model, drafter.to(model.device, model.dtype)


def progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)


def run_eval(config: EvalCommand) -> None:
    from data.prompts import held_out_prompts
    from infer.evaluate import evaluate
    from infer.report import table, write_report

    target, drafter = load(config.target, config.checkpoint)
    options = config.evaluation
    prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)

    result = evaluate(target, drafter, prompts, options, progress)
    result |= {"step": None, "checkpoint": config.checkpoint, "drafter": config.checkpoint}
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"\nreport      {write_report(out, [result])}")


def run_compare(config: CompareCommand) -> None:
    from data.prompts import held_out_prompts
    from infer.evaluate import evaluate
    from infer.report import comparison, comparison_figure

    options, evaluations = config.evaluation, {}
    loaded = {run_name(checkpoint): load(config.target, checkpoint) for checkpoint in config.checkpoints}
    for name, (target, drafter) in loaded.items():
        print(f"{name}:", file=sys.stderr)
        prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)
        evaluations[name] = evaluate(target, drafter, prompts, options, progress)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(evaluations, indent=1) + "\n")
    some = next(iter(evaluations.values()))
    text = comparison(evaluations)
    (out / "comparison.md").write_text(f"{text}\n\n{some['device']}, {some['prompts']} prompts.\n")
    comparison_figure(evaluations).savefig(out / "comparison.png")
    print(f"{text}\n\ntable    {out / 'comparison.md'}\npicture  {out / 'comparison.png'}")


def run_ngram(config: NgramCommand) -> None:
    from data.packing import token_documents, tokenizer_digest
    from infer.count_ngrams import count_ngrams
    from infer.target import load_config, load_tokenizer

    place = config.target
    tokenizer = load_tokenizer(place.path, place.trust_remote_code)
    theirs = load_config(place.path, place.trust_remote_code)
    vocabulary = max(theirs.get_text_config().vocab_size, len(tokenizer))
    order = config.order or min(6, 64 // vocabulary.bit_length())

    def counted(tokens: int) -> None:
        print(f"\r{tokens:,} tokens", end="", file=sys.stderr, flush=True)

    out = Path(config.out)
    documents = token_documents(config.data, tokenizer)
    digest = tokenizer_digest(tokenizer)
    model = count_ngrams(documents, vocabulary, order, out, digest, config.workers, config.chunk_tokens, counted)
    nodes = sum(model.nodes)
    print(
        f"\n{out}: {model.tokens:,} tokens, {nodes:,} n-grams of up to {order}, {model.size_bytes / 1e6:,.1f} MB "
        f"({model.size_bytes / nodes:.1f} bytes each); use it with continuity={out}"
    )


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


def run_diffuse(config: DiffuseCommand) -> None:
    from infer.diffusion import generate_masked
    from infer.masked import load_masked

    model = load_masked(config.checkpoint, config.dtype, config.device, config.trust_remote_code)
    options = config.decoding
    if config.evaluate:
        from data.prompts import held_out_prompts
        from infer.evaluate_masked import evaluate_masked, table

        prompts = held_out_prompts(config.data, model.tokenizer, config.prompts, config.prompt_tokens)
        print(table(evaluate_masked(model, prompts, options, progress=progress)))
        return
    answer = generate_masked(model, config.prompt, options)[0]
    stats = answer.stats
    print(config.prompt + answer.text)
    print(
        f"\n[{options.method}: {stats.steps} tokens in {stats.passes} passes, {stats.step_reduction:.0%} fewer "
        f"than step by step, {stats.tokens_per_second:.0f} tokens/s, {stats.valid} tokens before an end]",
        file=sys.stderr,
    )


def run_serve(config: ServeCommand) -> None:
    from infer import Engine
    from infer.server import serve

    target, drafter = load(config.target, config.checkpoint)
    decoding, server = config.decoding, config.server
    positions = getattr(target.config, "max_position_embeddings", None) or server.max_length
    capacity = min(server.max_length, positions)
    engine = Engine(target, drafter, decoding, capacity)
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
    "compare": (CompareCommand, run_compare),
    "ngram": (NgramCommand, run_ngram),
    "generate": (GenerateCommand, run_generate),
    "diffuse": (DiffuseCommand, run_diffuse),
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
