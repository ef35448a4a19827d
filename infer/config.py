"""Options of targets, drafters, decoding and evaluation. No torch here: a wrong option is refused
before it loads.

The docstring of a class has an entry "name: meaning" for every option; tests/test_conf.py checks
that none is missing.
"""

import re
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, Self

from infer.drafters.families import check_blocks, check_options
from infer.drafters.heads.table import check_head
from infer.trees.methods import TREES, TreeMethod, require_method
from infer.utils.checks import FREE_TEXT, above_zero, at_least, one_of, temperature

# in place of a file's name: no n-grams, and those of the text itself alone
NO_NGRAMS = "none"
TEXT_NGRAMS = "text"
GRAMMARS = ("json_schema", "regex", "grammar")  # options that say what a text may look like


def inherited_help(cls: type) -> type:
    """Append the docstrings of the inherited options to a class's own, which is all that help()
    shows."""
    cls.__doc__ = "\n\n".join(cleandoc(each.__doc__) for each in (cls, *cls.__bases__))
    return cls


@dataclass
class TargetConfig:
    """The target and how it is loaded.

    path: a hub id, a local folder, a GGUF file, "embedded": the small target of the repository, or
        "smollm2": a file that a Python package brings, infer/targets/gguf.py
    dtype: float32, bfloat16, or auto: bfloat16 on CUDA, else float32
    device: cpu, cuda, cuda:1, ..., or auto
    trust_remote_code: run modelling code that comes with the model
    sizes: its config.json in short, for ./launch.sh plan where that cannot be reached
    shard: in training, spread the target's layers over all processes, for a target too big for one
        GPU
    chat_template_kwargs: what its chat template is told, such as {enable_thinking: false}, wherever
        chats are read, written or served; written into the drafter's folder; a row or a request
        that says otherwise has its way
    quantization: none, or int8: products in 8-bit integers, on a CPU
    """

    path: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    sizes: dict[str, Any] | None = None
    shard: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    quantization: str = "none"

    def check(self) -> None:
        """Raise ValueError for a target without a name, or a dtype that does not exist."""
        if not self.path:
            raise ValueError("target.path=<folder or hub id>: which model is the target?")
        one_of(
            self,
            "target.",
            dtype=("auto", "float32", "bfloat16", "float16"),
            quantization=("none", "int8"),
        )
        if self.quantization == "int8" and (self.dtype not in ("auto", "float32") or self.shard):
            raise ValueError(
                "target.quantization=int8: leave target.dtype and target.shard as they are"
            )
        if not re.fullmatch(r"auto|[a-z]+(:[0-9]{1,4})?", self.device):
            raise ValueError(
                f"target.device={self.device}: use auto, cpu, cuda, or cuda:1 and the like"
            )
        for name, value in self.chat_template_kwargs.items():
            if not name.isidentifier() or not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"target.chat_template_kwargs.{name}={value}: true, false, a number or a text"
                )


@dataclass
class LoadedConfig:
    """How a trained drafter is loaded.

    quantization: none, int8: its products in 8-bit integers, on a CPU, or auto: as the target
    window: dflash only: its layers see the last so many positions, whatever they were trained with,
        and decoding keeps no more of a text: for long texts; None: as its config.json says
    """

    quantization: str = "auto"
    window: int | None = None

    def check(self) -> None:
        """Raise ValueError for a way that does not exist."""
        one_of(self, "drafter.", quantization=("auto", "none", "int8"))


@dataclass
class HeadConfig:
    """A conditional head: it makes a drafted token's score depend on the tokens before it.

    name: none: positions are independent; markov, selector, swiglu, gru or xpress: rows of
        infer/drafters/heads/table.py
    kind: markov only: vanilla, a table of pairs; gated by the slot's state; rnn, with a state of
        the block
    rank: markov, selector, gru and xpress: rank of the correction
    top_k: selector only: it chooses among so many of a slot's likeliest tokens; 0: among all
    hidden: swiglu and gru: entries of its hidden layer or state; None: the drafter's intermediate
        size, or 1024
    confidence: markov only: a second head learns how likely a draft is accepted, for engines that
        spend by it; ours calibrates the probabilities of paths, see infer/engine/budget.py
    """

    name: str = "none"
    kind: str = "vanilla"
    rank: int = 256
    top_k: int = 0
    hidden: int | None = None
    confidence: bool = False

    def check(self) -> None:
        """Raise ValueError for a head that does not exist."""
        check_head(self)
        at_least(self, "drafter.head.", rank=1, top_k=0, hidden=1)


@dataclass
class DrafterConfig:
    """Sizes of a drafter to train; all others are the target's.

    family: a row of `infer.drafters.families`: dflash or dart
    layers: decoder layers; DART has one
    block_size: bonus token and block_size - 1 drafted positions
    target_layer_ids: tapped decoder layers, from 0; None: spread by the public formula
    last_tap: where a tap of the last layer reads: raw, what the layer puts out, as vLLM does; or
        normed, behind the target's last norm, as transformers and the DFlash authors' code do
    warm_start: begin with the target's own layers where they compute what the drafter's would
        (DFlash's norm queries and keys, as Qwen 3's do and Llama's do not); else from noise, as a
        warning says
    mask_token_id: dflash only, the token at drafted positions; None: the tokenizer's mask token,
        the first id past its own, or a special token that the data do not use
    sample_from_anchor: dflash only: the bonus token's slot drafts too, so that a block has one slot
        less; None: no, or as init has it
    causal: dflash only: a slot sees the slots before it, not those behind it (JetSpec); None: no,
        or as init has it
    window: dflash only: its layers see the last so many positions, their own included, and decoding
        keeps no more of a text (speculators: 2048); None: all, or as init has it
    layer_fusion: dflash only: each layer reads its own mix of the tapped layers, by projections of
        its own (DFlare); None: no, or as init has it
    convolutions: dflash only: taps of DFlash 2's convolutions around attention and feed-forward,
        published: 2; None: none, or as init has them
    vocabulary: it proposes so many tokens only, the most frequent of its training data (EAGLE-3,
        FR-Spec), by so many rows of the head; 0: all; None: all, or as init has it; with init
        another number chooses them anew, where the drafter has no conditional head
    init: a drafter to start from instead: a folder in any layout that load_drafter reads, or a hub
        id
    head: the conditional head, see HeadConfig; with init: none keeps the drafter's own, another one
        is added to a drafter that has none
    """

    family: str = "dflash"
    layers: int = 2
    block_size: int = 8
    target_layer_ids: list[int] | None = None
    last_tap: str = "raw"
    warm_start: bool = True
    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    window: int | None = None
    layer_fusion: bool | None = None
    convolutions: int | None = None
    vocabulary: int | None = None
    init: str | None = None
    head: HeadConfig = field(default_factory=HeadConfig)

    def check(self) -> None:
        """Raise ValueError for sizes that no drafter can have."""
        check_options(self.family, self.layers)
        check_blocks(self)
        self.head.check()
        # a block is a bonus token and a draft
        at_least(self, "drafter.", layers=1, block_size=2, convolutions=0, vocabulary=0)
        one_of(self, "drafter.", last_tap=("raw", "normed"))
        if self.window is not None and self.window < self.block_size:
            raise ValueError(
                f"drafter.window={self.window}: the last slots of a block would not see its bonus token, "
                f"give at least drafter.block_size={self.block_size}"
            )


@dataclass
class TextOptions:
    """How one text is written: what the target may choose, and where the text ends. The order is
    Hugging Face's: penalty, temperature, top-k, top-p, min-p; log-probabilities are the target's
    own, before any of these.

    max_new_tokens: most tokens of the answer
    temperature: 0 is greedy, the likeliest token each time; above 0 the target's logits are divided
        by it
    top_k: sample among the k likeliest tokens only; 0: among all
    top_p: sample among the likeliest tokens that together have this probability
    min_p: leave out tokens less likely than this share of the likeliest one's probability
    repetition_penalty: above 1 makes tokens less likely that prompt or text hold already
    seed: seed of sampling; the same seed gives the same text, whatever the method
    ignore_eos: write on past end tokens
    stop: texts that end the answer; they are not part of it
    loop_period: end an answer that repeats itself, where a period of at most so many tokens has
        come four times; 0: let it go on
    logprobs: log-probability of every token, and of this many likeliest alternatives (0 to 20);
        None: none at all
    json_schema: the answer is JSON of this schema, itself JSON; @file: what the file holds
    regex: the answer matches this regular expression from beginning to end (Rust's syntax); @file
        too
    grammar: the answer is a sentence of this grammar, in Lark's syntax as llguidance reads it;
        @file too
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    ignore_eos: bool = False
    stop: list[str] = field(default_factory=list, metadata={FREE_TEXT: True})
    loop_period: int = 0
    logprobs: int | None = None
    json_schema: str | None = field(default=None, metadata={FREE_TEXT: True})
    regex: str | None = field(default=None, metadata={FREE_TEXT: True})
    grammar: str | None = field(default=None, metadata={FREE_TEXT: True})

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        asked = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)}: a text can follow one of them, give one")
        if asked and self.ignore_eos:
            raise ValueError(
                f"ignore_eos=true: a text that follows {asked[0]} ends where that ends, leave it out"
            )
        at_least(self, max_new_tokens=1, top_k=0, loop_period=0)
        temperature(self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: a probability above 0, at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: between 0 and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: above 0; 1 changes nothing"
            )
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty stop string would end every answer at once")
        if self.logprobs is not None and not 0 <= self.logprobs <= 20:
            raise ValueError(f"logprobs={self.logprobs}: 0 to 20 alternatives, or none at all")


@dataclass
class EngineConfig:
    """How texts are decoded. All of this changes the speed, never the text.

    method: plain, chain, ddtree, continuity, static or another of infer/trees/methods.py:
        docs/methods.md
    budget: drafted nodes verified each round (a chain uses at most block_size - 1); or "auto": as
        machine and load allow, down to none
    continuity: n-gram file (./launch.sh ngram) that judges paths, for continuity and ddtree; ddtree
        corrects its counts by those of the text itself. null: the one that lies beside the
        drafter's weights, if there is one, for ddtree; text: no file, the text's own n-grams alone,
        for ddtree; none: no n-grams
    width: children of every node of a static tree
    rows: texts decoded side by side at most; others wait
    positions: the most that the target computes between two tokens of a text: trees of all rows and
        pieces of new prompts together, never less than one tree; one behind a long context counts
        as several. null: no limit. More let new texts begin sooner, and texts in work wait longer
    prefix_memory: MiB for what target and drafter keep of earlier texts, so that a prompt that
        begins as one of them did is computed from there on; 0: nothing is kept, nor ever of hybrids
    compile: on CUDA, rounds are CUDA graphs, unless it is false; elsewhere it changes nothing
    """

    method: str = "ddtree"
    budget: int | str = 64
    continuity: str | None = None
    width: int = 2
    rows: int = 16
    positions: int | None = (
        144  # a stream that others join waits at most 5 times as long: docs/serving.md
    )
    prefix_memory: int = 0
    compile: bool | None = None

    @property
    def tree(self) -> TreeMethod:
        """Return the row of the tree method, which an n-gram file may change."""
        row = TREES[self.method]
        return TREES[row.with_ngrams] if row.with_ngrams and self.asks_ngrams else row

    @property
    def asks_ngrams(self) -> bool:
        """Return whether the options name an n-gram file."""
        return self.continuity not in (None, NO_NGRAMS)

    def beside(self, ngrams: Path | None) -> Self:
        """Return the options for a drafter with an n-gram file of its own, for methods that have a
        use for one."""
        if ngrams is None or self.continuity is not None or TREES[self.method].with_ngrams is None:
            return self
        return replace(self, continuity=str(ngrams))

    def name_with(self, drafter) -> str:
        """Return what decodes, by name: ddtree+ngrams for ddtree and a drafter with an n-gram file
        of its own."""
        return self.beside(None if drafter is None else drafter.ngrams).tree.name

    @property
    def drafts(self) -> bool:
        """Return whether the method needs a drafter."""
        return self.tree.drafts

    def room(self, tokens: int) -> int:
        """Return the positions that an answer of so many tokens takes."""
        return tokens

    def check(self) -> None:
        """Raise ValueError for a way of decoding that does not exist."""
        require_method(self.method)
        one_of(self, method=TREES)
        at_least(self, width=1, rows=1, positions=1, prefix_memory=0)
        if isinstance(self.budget, str) and self.budget != "auto":
            raise ValueError(f"budget={self.budget}: a number of nodes, or auto")
        if self.tree.ngrams and not self.asks_ngrams:
            raise ValueError(
                f"method={self.method} needs continuity=<n-gram file>: ./launch.sh ngram makes one"
            )
        if self.continuity == TEXT_NGRAMS and not self.tree.recalls:
            raise ValueError(
                f"continuity={TEXT_NGRAMS}: a text's own n-grams are for method=ddtree, not {self.method}"
            )
        if self.method == "static" and self.budget != "auto" and self.width > self.budget:
            raise ValueError(f"width={self.width} does not fit into budget={self.budget}")
        if self.asks_ngrams and not self.tree.ngrams:
            takers = " or ".join(
                name for name, row in TREES.items() if row.ngrams or row.with_ngrams
            )
            raise ValueError(
                f"continuity={self.continuity}: for method={takers}, not for {self.method}"
            )
        if self.budget == "auto" and self.drafts and not self.tree.ranked:
            ranked = " or ".join(name for name, row in TREES.items() if row.ranked)
            raise ValueError(
                f"budget=auto: for method={ranked} only; give method={self.method} a number of nodes"
            )
        if self.budget != "auto" and self.budget < 1:
            raise ValueError(
                f"budget={self.budget}: a draft tree has at least 1 node (or use method=plain)"
            )


@inherited_help
@dataclass
class DecodeOptions(EngineConfig, TextOptions):
    """What is written and how it is decoded: the options of EngineConfig and TextOptions."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        TextOptions.check(self)
        EngineConfig.check(self)


@dataclass
class EvaluationConfig:
    """What is decoded, and how often. Training decodes all of it at its last checkpoint; at those
    before, a quarter of the prompts once, with neither texts from outside nor sampled ones.

    prompts: held-out prompts, of several kinds; 0: training evaluates nothing
    outside: texts from outside the data, which are reported beside those; at most as many as
        prompts, and the 24 of data/embedded/outside.jsonl
    prompt_tokens: tokens of a prompt at most
    max_new_tokens: most tokens of an answer
    budgets: node budgets of the trees; with their roots 3, 7 and 15 fill passes of 4, 8 and 16 rows
    temperature: 0 is greedy
    sampled: beside greedy texts, every second of the prompts at this temperature, once; None: no
        sampled texts
    minutes: so long prompts are begun, at checkpoints before the last a quarter of it; one that is
        begun is finished with every method. The kinds of prompts share it, and so do a suite's
        sets. The report says how many there was time for. null: no limit, as suite= has it
    continuity: n-gram file (./launch.sh ngram): with the middle budget, trees that ask it are
        measured too, and the n-grams alone, without a drafter. null: the file that lies beside the
        drafter's weights, if there is one, else the texts' own n-grams alone; text: the texts' own;
        none: no n-grams
    """

    prompts: int = 32
    outside: int = 24
    prompt_tokens: int = 96
    max_new_tokens: int = 48
    budgets: list[int] = field(default_factory=lambda: [3, 7, 15])
    temperature: float = 0.0
    sampled: float | None = 1.0
    minutes: float | None = 10.0
    continuity: str | None = None

    def check(self) -> None:
        """Raise ValueError for an evaluation that measures nothing."""
        at_least(self, "evaluation.", prompts=0, outside=0, prompt_tokens=1, max_new_tokens=1)
        temperature(self, "evaluation.")
        above_zero(self, "evaluation.", "minutes")
        if not self.budgets or any(budget < 1 for budget in self.budgets):
            raise ValueError(
                f"evaluation.budgets={list(self.budgets)}: name DDTree node budgets of at least 1"
            )
