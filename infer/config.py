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
    """The target model and how it is loaded.

    path: a hub id, a local folder, a GGUF file, "embedded" (the small target in this repository),
        or "smollm2" (a model that a Python package contains, see infer/targets/gguf.py)
    dtype: float32, bfloat16, float16, or auto: bfloat16 on CUDA, float32 elsewhere
    device: cpu, cuda, cuda:1 and so on, or auto
    trust_remote_code: run Python code that comes with the model
    model_config: the most important entries of the model's config.json, for ./launch.sh plan on a
        machine that cannot read the model
    shard: in training, distribute the target's layers over all processes, for a target that does
        not fit on one GPU
    chat_template_kwargs: variables for the target's chat template, such as {enable_thinking:
        false}, wherever chats are tokenized or served. They are saved with the drafter. An example
        or a request that sets the same variable takes precedence
    quantization: none, or int8: weights and matmuls in 8-bit integers, on a CPU only
    """

    path: str = "embedded"
    dtype: str = "auto"
    device: str = "auto"
    trust_remote_code: bool = False
    model_config: dict[str, Any] | None = None
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

    quantization: none, int8 (matmuls in 8-bit integers, on a CPU only), or auto: the same as the
        target
    sliding_window: dflash only: limit the drafter's attention and its KV cache to this many of the
        last positions, for long sequences; null: as in the drafter's config.json
    """

    quantization: str = "auto"
    sliding_window: int | None = None

    def check(self) -> None:
        """Raise ValueError for a way that does not exist."""
        one_of(self, "drafter.", quantization=("auto", "none", "int8"))


@dataclass
class HeadConfig:
    """A conditional head: it makes the score of a drafted token depend on the tokens drafted before
    it.

    name: none (positions are independent), markov, selector, swiglu, gru or xpress: the entries of
        infer/drafters/heads/table.py
    kind: markov only: vanilla (a table of token pairs), gated (by the hidden state of the position)
        or rnn (with a recurrent state)
    rank: markov, selector, gru and xpress: rank of the low-rank correction
    top_k: selector only: choose among this many most likely tokens of a position; 0: among all
    hidden_size: swiglu and gru: size of the hidden layer or state; null: the drafter's intermediate
        size for swiglu, 1024 for gru
    confidence_head: markov only: train a second head that predicts whether a draft is accepted, for
        engines that use it. Our engine calibrates path probabilities instead
        (infer/engine/budget.py)
    """

    name: str = "none"
    kind: str = "vanilla"
    rank: int = 256
    top_k: int = 0
    hidden_size: int | None = None
    confidence_head: bool = False

    def check(self) -> None:
        """Raise ValueError for a head that does not exist."""
        check_head(self)
        at_least(self, "drafter.head.", rank=1, top_k=0, hidden_size=1)


@dataclass
class DrafterConfig:
    """Architecture of the drafter to train. All sizes that are not options are the target's.

    family: dflash or dart, see infer/drafters/families.py
    layers: number of decoder layers; DART has 1
    block_size: the bonus token and block_size - 1 drafted positions
    target_layer_ids: ids of the target layers whose hidden states the drafter reads, from 0; null:
        evenly spaced by DFlash's public formula
    last_layer_output: which hidden state is read if the last layer is among them. raw: before the
        target's final norm, as vLLM does; normed: after it, as transformers and the DFlash authors
        do
    warm_start: initialise the drafter's layers from the target's if their architectures are equal
        (DFlash normalises queries and keys, as Qwen3 does and Llama does not); else random, with a
        warning
    mask_token_id: dflash only: the token at drafted positions; null: the tokenizer's mask token,
        else the first unused id, else a special token that the data do not contain
    sample_from_anchor: dflash only: the bonus token's position drafts too, so that a block has one
        position less; null: false, or as in init
    causal: dflash only: a drafted position attends only to earlier positions of its block
        (JetSpec); null: false, or as in init
    sliding_window: dflash only: the drafter's layers attend to this many last positions, and its KV
        cache keeps no more (speculators: 2048); null: no limit, or as in init
    layer_fusion: dflash only: each layer has its own projection of the target's hidden states
        (DFlare); null: false, or as in init
    conv_kernel_size: dflash only: kernel size of DFlash 2's convolutions around attention and MLP,
        published value 2; null: no convolutions, or as in init
    draft_vocab_size: draft only this many tokens, the most frequent ones of the training data
        (EAGLE-3, FR-Spec); 0: all; null: all, or as in init. With init, another number selects the
        tokens again, if the drafter has no conditional head
    init: start from this drafter: a folder in any layout that load_drafter reads, or a hub id
    head: the conditional head, see HeadConfig. With init, none keeps the drafter's own head, and a
        name adds a head to a drafter without one
    """

    family: str = "dflash"
    layers: int = 2
    block_size: int = 8
    target_layer_ids: list[int] | None = None
    last_layer_output: str = "raw"
    warm_start: bool = True
    mask_token_id: int | None = None
    sample_from_anchor: bool | None = None
    causal: bool | None = None
    sliding_window: int | None = None
    layer_fusion: bool | None = None
    conv_kernel_size: int | None = None
    draft_vocab_size: int | None = None
    init: str | None = None
    head: HeadConfig = field(default_factory=HeadConfig)

    def check(self) -> None:
        """Raise ValueError for sizes that no drafter can have."""
        check_options(self.family, self.layers)
        check_blocks(self)
        self.head.check()
        # a block is a bonus token and a draft
        at_least(self, "drafter.", layers=1, block_size=2, conv_kernel_size=0, draft_vocab_size=0)
        one_of(self, "drafter.", last_layer_output=("raw", "normed"))
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window={self.sliding_window}: the last slots of a block would not see its bonus token, "
                f"give at least drafter.block_size={self.block_size}"
            )


@dataclass
class TextOptions:
    """How one sequence is generated: sampling and stopping. Logits are processed in Hugging Face's
    order: repetition penalty, temperature, top-k, top-p, min-p. Log-probabilities are computed from
    the target's unprocessed logits.

    max_new_tokens: maximum number of generated tokens
    temperature: 0 is greedy decoding; above 0 logits are divided by it
    top_k: sample from the k most likely tokens only; 0: from all
    top_p: sample from the most likely tokens whose probabilities add up to this value
    min_p: exclude tokens whose probability is below this fraction of the most likely token's
    repetition_penalty: above 1 makes tokens less likely that the prompt or output already contains
    seed: seed of sampling; the same seed gives the same output with every decoding method
    ignore_eos: continue after end tokens
    stop: strings that end the output; they are not part of it
    loop_period: stop an output that repeats itself: the same period of at most this many tokens
        four times in a row; 0: never
    logprobs: return the log-probability of every token and of this many most likely alternatives (0
        to 20); null: none
    json_schema: the output is JSON that follows this JSON schema; @file: read the schema from a
        file
    regex: the whole output matches this regular expression (Rust's syntax); @file: read it from a
        file
    grammar: the output follows this grammar, in llguidance's Lark syntax; @file: read it from a
        file
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
    """How sequences are decoded. These options change the speed, never the output.

    method: plain, chain, ddtree, continuity, static or another of infer/trees/methods.py, see
        docs/methods.md
    budget: drafted nodes that the target verifies per round (a chain has at most block_size - 1);
        auto: chosen every round by measured cost and acceptance, down to 0
    ngrams: n-gram file (made by ./launch.sh ngram) that scores paths, for continuity and ddtree;
        ddtree also counts the n-grams of the sequence itself. null: for ddtree, the file beside the
        drafter's weights, if there is one; text: only the n-grams of the sequence itself; none: no
        n-grams
    width: static only: children of every node
    max_num_seqs: sequences decoded in one batch; others wait in a queue
    max_num_batched_tokens: positions that the target computes in one step: draft trees of all
        sequences and chunks of new prompts. It is never less than one tree. Positions after a long
        context count more. null: no limit. Larger values start new sequences sooner and slow down
        running ones
    prefix_cache_mib: MiB for the KV cache of earlier sequences, so that a prompt with the same
        prefix is prefilled from there; 0: no prefix cache. Hybrid targets have none
    compile: on CUDA, false turns CUDA graphs off; no effect elsewhere
    """

    method: str = "ddtree"
    budget: int | str = 64
    ngrams: str | None = None
    width: int = 2
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = (
        144  # a stream that others join waits at most 5 times as long: docs/serving.md
    )
    prefix_cache_mib: int = 0
    compile: bool | None = None

    @property
    def tree(self) -> TreeMethod:
        """Return the row of the tree method, which an n-gram file may change."""
        row = TREES[self.method]
        return TREES[row.with_ngrams] if row.with_ngrams and self.asks_ngrams else row

    @property
    def asks_ngrams(self) -> bool:
        """Return whether the options name an n-gram file."""
        return self.ngrams not in (None, NO_NGRAMS)

    def beside(self, ngrams: Path | None) -> Self:
        """Return the options for a drafter with an n-gram file of its own, for methods that have a
        use for one."""
        if ngrams is None or self.ngrams is not None or TREES[self.method].with_ngrams is None:
            return self
        return replace(self, ngrams=str(ngrams))

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
        at_least(self, width=1, max_num_seqs=1, max_num_batched_tokens=1, prefix_cache_mib=0)
        if isinstance(self.budget, str) and self.budget != "auto":
            raise ValueError(f"budget={self.budget}: a number of nodes, or auto")
        if self.tree.ngrams and not self.asks_ngrams:
            raise ValueError(
                f"method={self.method} needs ngrams=<n-gram file>: ./launch.sh ngram makes one"
            )
        if self.ngrams == TEXT_NGRAMS and not self.tree.recalls:
            raise ValueError(
                f"ngrams={TEXT_NGRAMS}: a text's own n-grams are for method=ddtree, not {self.method}"
            )
        if self.method == "static" and self.budget != "auto" and self.width > self.budget:
            raise ValueError(f"width={self.width} does not fit into budget={self.budget}")
        if self.asks_ngrams and not self.tree.ngrams:
            takers = " or ".join(
                name for name, row in TREES.items() if row.ngrams or row.with_ngrams
            )
            raise ValueError(f"ngrams={self.ngrams}: for method={takers}, not for {self.method}")
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
    """Options of EngineConfig and TextOptions together."""

    def check(self) -> None:
        """Raise ValueError for options that cannot be followed."""
        TextOptions.check(self)
        EngineConfig.check(self)


@dataclass
class EvaluationConfig:
    """What is decoded to measure a drafter. During training, checkpoints before the last one decode
    a quarter of the prompts, once, greedily, and no external prompts.

    prompts: number of held-out prompts, of several kinds; 0: no evaluation in training
    external_prompts: number of prompts that are not from the training data set, reported
        separately; at most `prompts`, and at most the 24 of data/embedded/outside.jsonl
    max_prompt_tokens: maximum tokens of a prompt
    max_new_tokens: maximum tokens of an output
    budgets: node budgets of draft trees; 3, 7 and 15 with their roots fill batches of 4, 8 and 16
        positions
    temperature: 0 is greedy decoding
    sampling_temperature: decode every second prompt again at this temperature; null: greedy only
    max_minutes: time limit. A prompt that was started is finished with every method; earlier
        checkpoints get a quarter. All kinds of prompts and all sets of a suite share the time, and
        the report says how many prompts were decoded. null: no limit, the default with suite=
    ngrams: n-gram file (made by ./launch.sh ngram): trees that use it, and n-grams without a
        drafter, are measured too, with the middle budget. null: the file beside the drafter's
        weights, if there is one, else the n-grams of the sequence itself; text: only those; none:
        no n-grams
    """

    prompts: int = 32
    external_prompts: int = 24
    max_prompt_tokens: int = 96
    max_new_tokens: int = 48
    budgets: list[int] = field(default_factory=lambda: [3, 7, 15])
    temperature: float = 0.0
    sampling_temperature: float | None = 1.0
    max_minutes: float | None = 10.0
    ngrams: str | None = None

    def check(self) -> None:
        """Raise ValueError for an evaluation that measures nothing."""
        at_least(
            self,
            "evaluation.",
            prompts=0,
            external_prompts=0,
            max_prompt_tokens=1,
            max_new_tokens=1,
        )
        temperature(self, "evaluation.")
        above_zero(self, "evaluation.", "max_minutes")
        if not self.budgets or any(budget < 1 for budget in self.budgets):
            raise ValueError(
                f"evaluation.budgets={list(self.budgets)}: name DDTree node budgets of at least 1"
            )
