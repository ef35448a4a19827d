"""`regenerate`: the answers of a data set, written anew by the target."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar

from data.rows import DataConfig
from infer.cli.models import load
from infer.config import DecodeOptions, TargetConfig
from infer.utils.checks import at_least, check_parts


@dataclass
class RegenerateCommand:
    """Let the target rewrite the answers of a data set, for a drafter to learn from.

    out: one line a row, in the rows' order; a stopped run goes on where it was
    checkpoint: a drafter that makes it faster, for decoding.method=chain or ddtree
    server: instead of our engine, an address with OpenAI's API, such as http://host:8000/v1
    server_model: what that server calls the target; None: the first it has
    at_once: requests under way at that server
    prompt_tokens: how many tokens of a row that is one text are the prompt
    most_failures: most rows that may fail; more end the run
    target: see TargetConfig in infer/config.py
    data: the prompts, see DataConfig in data/rows.py
    decoding: see DecodeOptions in infer/config.py
    """

    FROM_RUN: ClassVar = ("target",)  # of the checkpoint's run, unless they are given
    out: str = "runs/answers.jsonl"
    checkpoint: str | None = None
    server: str | None = None
    server_model: str | None = None  # not `model`, which is a group of presets
    at_once: int = 64
    prompt_tokens: int = 96
    most_failures: int = 100
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        check_parts(self)
        if self.server is None and self.checkpoint is None and self.decoding.drafts:
            raise ValueError(f"decoding.method={self.decoding.method} needs checkpoint=..., or use decoding=plain")
        at_least(self, at_once=1, prompt_tokens=1, most_failures=0)


def run(config: RegenerateCommand) -> None:
    from data.rows import questions
    from infer.api import encode
    from infer.serving.regenerate import Row, by_engine, by_server, options_of, regenerate
    from infer.targets.loading import load_tokenizer

    place = config.target
    if config.server is None:
        method = config.decoding.method
        target, drafter = load(place, config.checkpoint if config.decoding.drafts else None, method)
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
        answers = by_server(config.server, config.server_model, config.decoding, config.at_once)
    else:
        longest = max(len(encode(target, row.prompt)) for row in rows)
        answers = by_engine(target, drafter, config.decoding, longest + config.decoding.max_new_tokens)
    settings = {"target": place.path, "server": config.server, "data": asdict(config.data)}
    settings |= {"prompt_tokens": config.prompt_tokens} | options_of(config.decoding)

    counts = regenerate(rows, answers, Path(config.out), settings, config.most_failures)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} rows failed")
