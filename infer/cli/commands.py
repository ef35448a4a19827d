"""The options of every command that trains nothing. No torch here: a wrong option is refused before it loads."""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig
from data.suites import SuiteConfig
from infer.config import (
    MASKED_METHODS,
    DecodeOptions,
    EngineConfig,
    EvaluationConfig,
    MaskedConfig,
    ServerConfig,
    TargetConfig,
)
from infer.drafters.families import FORMATS


def run_name(checkpoint: str) -> str:
    """What a checkpoint is called beside others: its run, or its folder."""
    parts = Path(checkpoint).parts
    return parts[parts.index("checkpoints") - 1] if "checkpoints" in parts[1:] else Path(checkpoint).name


@dataclass
class EvalCommand:
    """Evaluates a drafter the way training does at a checkpoint, or on a suite of question sets; of a masked diffusion
    model, which has no drafter, what drafting for itself saves.

    checkpoint: a drafter folder or a training checkpoint
    out: where numbers and pictures go
    target: see TargetConfig in infer/config.py
    data: held-out text, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    suite: question sets instead of data, see SuiteConfig in data/suites.py; decoded as evaluation says, without
        its prompts
    masked: where the target is a masked diffusion model, see MaskedConfig in infer/config.py
    """

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    out: str = "runs/evaluation"
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be evaluated."""
        for part in (self.target, self.data, self.evaluation, self.suite, self.masked):
            part.check()


@dataclass
class CompareCommand:
    """Evaluates several drafters with every tree, on the same prompts.

    checkpoints: drafter folders, training checkpoints, or n-gram files
    out: where the table, the picture and the numbers go
    target: see TargetConfig in infer/config.py
    data: held-out text, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    checkpoints: list[str] = field(
        default_factory=lambda: [f"runs/embedded-{x}/checkpoints/best" for x in ("dflash", "dart")]
    )
    out: str = "runs/comparison"
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
    """Counts n-grams of token ids, for trees that judge paths by them.

    out: the file that is written
    order: the longest n-grams; None: as many tokens as a 64-bit key holds, at most 6
    workers: processes that count; None: one a core
    chunk_tokens: tokens sorted at a time by a process, about 24 bytes each
    target: whose tokenizer it is, see TargetConfig in infer/config.py
    data: the text to count, see DataConfig in data/rows.py
    """

    out: str = "runs/ngrams"
    order: int | None = None
    workers: int | None = None
    chunk_tokens: int = 8_000_000
    target: TargetConfig = field(default_factory=TargetConfig)
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
    """Continues a prompt and says what it took.

    checkpoint: a drafter folder, a training checkpoint or an n-gram file
    prompt: the text to continue
    target: see TargetConfig in infer/config.py
    decoding: see DecodeOptions in infer/config.py
    """

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
    """Serves a target and its drafter over HTTP.

    checkpoint: a drafter folder, a training checkpoint or an n-gram file
    target: see TargetConfig in infer/config.py
    decoding: see EngineConfig in infer/config.py
    server: see ServerConfig in infer/serving/config.py
    """

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    target: TargetConfig = field(default_factory=TargetConfig)
    decoding: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be served."""
        for part in (self.target, self.decoding, self.server):
            part.check()
        if self.server.verify and self.decoding.method in MASKED_METHODS:
            raise ValueError(f"server.verify={self.server.verify}: for causal targets, not for {self.decoding.method}")


@dataclass
class RegenerateCommand:
    """Lets the target rewrite the answers of a data set: what a drafter should learn from.

    out: one line a row, in the rows' order; a stopped run goes on where it was
    checkpoint: a drafter that makes it faster, for decoding.method=chain or ddtree
    server: instead of our engine, an address with OpenAI's API, such as http://host:8000/v1
    model: what that server calls the target; None: the first it has
    at_once: requests under way at that server
    prompt_tokens: how many tokens of a row that is one text are the prompt
    most_failures: most rows that may fail; more end the run
    target: see TargetConfig in infer/config.py
    data: the prompts, see DataConfig in data/rows.py
    decoding: see DecodeOptions in infer/config.py
    """

    out: str = "runs/answers.jsonl"
    checkpoint: str | None = None
    server: str | None = None
    model: str | None = None
    at_once: int = 64
    prompt_tokens: int = 96
    most_failures: int = 100
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    decoding: DecodeOptions = field(default_factory=DecodeOptions)

    def check(self) -> None:
        """Raises ValueError for what cannot be asked for."""
        for part in (self.target, self.data, self.decoding):
            part.check()
        if self.server is None and self.checkpoint is None and self.decoding.drafts:
            raise ValueError(f"decoding.method={self.decoding.method} needs checkpoint=..., or use decoding=plain")
        if min(self.at_once, self.prompt_tokens) < 1:
            raise ValueError("at_once and prompt_tokens are at least 1")
        if self.most_failures < 0:
            raise ValueError(f"most_failures={self.most_failures}: 0 or more")


@dataclass
class ExportCommand:
    """Writes a drafter for other engines, and uploads it if that is asked for.

    checkpoint: anything that load_drafter reads
    format: the layout. dflash: vLLM and SGLang; speculators: vLLM; dart: the DART authors' code
    out: a folder that is not there yet, or empty
    push_to_hub: a name on the hub, user/name, to upload it to, with the token that you are logged in with
    license: the drafter's license, for its card: apache-2.0, ...; None: the card says that none was named
    base_model: the target's name on the hub, for others to read; None: target.path
    target: see TargetConfig in infer/config.py; speculators stores its embedding, head and name
    """

    checkpoint: str = "runs/embedded-dflash/checkpoints/best"
    format: str = "dflash"
    out: str = "runs/export"
    push_to_hub: str | None = None
    license: str | None = None
    base_model: str | None = None
    target: TargetConfig = field(default_factory=TargetConfig)

    def check(self) -> None:
        """Raises ValueError for what cannot be written."""
        self.target.check()
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format}: use one of {', '.join(FORMATS)}")
        if not self.out:
            raise ValueError("out=<folder>: where should the export go?")
        if Path(self.out).is_dir() and any(Path(self.out).iterdir()):
            raise ValueError(f"out={self.out}: that folder is not empty, choose another")
        if self.push_to_hub is not None and self.push_to_hub.count("/") != 1:
            raise ValueError(f"push_to_hub={self.push_to_hub}: a name on the hub such as user/name")
        local = self.target.path == "embedded" or Path(self.target.path).exists()
        if self.push_to_hub is not None and self.format == "speculators" and self.base_model is None and local:
            raise ValueError("format=speculators stores where the target is: give its name on the hub, base_model=...")


@dataclass
class CheckCommand:
    """Says which engines would load a drafter's folder, and what is at fault where one would not.

    path: a folder, a training checkpoint, or a hub id
    target_layers: how many layers the target has, for configs that do not say
    """

    path: str = "runs/embedded-dflash/checkpoints/best"
    target_layers: int | None = None

    def check(self) -> None:
        """Raises ValueError for what cannot be looked at."""
        if not self.path:
            raise ValueError("path=<folder or hub id>: which drafter?")
        if self.target_layers is not None and self.target_layers < 1:
            raise ValueError(f"target_layers={self.target_layers}: at least 1")
