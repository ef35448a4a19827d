"""Options of targets, drafters, decoding and evaluation.

This module does not import torch, so that an invalid option is refused before torch is loaded. The
docstring of a class has an entry "name: meaning" for every option; tests/test_conf.py checks that
none is missing.
"""

import re
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, Self, TypeVar

from infer.drafters.families import check_family_and_layers, check_family_options
from infer.drafters.heads.table import check_head_options
from infer.trees.methods import TREE_METHODS, TreeMethod, require_method
from infer.utils.checks import (
    TEXT_OR_FILE_METADATA_KEY,
    require_at_least,
    require_one_of,
    require_positive,
    require_temperature,
)

# Values of `ngrams` that are not file names: no n-grams, and only the n-grams of the sequence
# that is being decoded.
NGRAMS_OPTION_NONE = "none"
NGRAMS_OPTION_CURRENT_SEQUENCE = "text"
# Options that constrain the output to a grammar; at most one of them may be set.
GRAMMAR_OPTIONS = ("json_schema", "regex", "grammar")
MAX_LOGPROB_ALTERNATIVES = 20
OptionsClass = TypeVar("OptionsClass")


def append_inherited_help(cls: type[OptionsClass]) -> type[OptionsClass]:
    """Append the docstrings of the base classes to a class's own, for its help.

    A class decorator for dataclasses that inherit options.
    """
    docstrings = [cleandoc(documented.__doc__ or "") for documented in (cls, *cls.__bases__)]
    cls.__doc__ = "\n\n".join(docstrings)
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
        """Raise ValueError for invalid options, such as an empty path or an unknown dtype."""
        if not self.path:
            raise ValueError("target.path is empty: give a folder or a name on the hub")
        require_one_of(
            self,
            "target.",
            dtype=("auto", "float32", "bfloat16", "float16"),
            quantization=("none", "int8"),
        )
        if self.quantization == "int8" and (self.dtype not in ("auto", "float32") or self.shard):
            raise ValueError(
                "target.quantization=int8 works with the defaults of target.dtype and "
                "target.shard only: leave them out"
            )
        if not re.fullmatch(r"auto|[a-z]+(:[0-9]{1,4})?", self.device):
            raise ValueError(
                f"target.device={self.device}: use auto, cpu, cuda, or cuda:1 and the like"
            )
        for name, value in self.chat_template_kwargs.items():
            if not name.isidentifier() or not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"target.chat_template_kwargs.{name}={value}: the name must be an identifier, "
                    "and the value null, true, false, a number or a text"
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
        """Raise ValueError for an unknown quantization."""
        require_one_of(self, "drafter.", quantization=("auto", "none", "int8"))


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
        """Raise ValueError for an unknown head or impossible sizes."""
        check_head_options(self)
        require_at_least(self, "drafter.head.", rank=1, top_k=0, hidden_size=1)


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
        """Raise ValueError for an unknown family or impossible sizes."""
        check_family_and_layers(self.family, self.layers)
        check_family_options(self)
        self.head.check()
        # A block contains the bonus token and at least one drafted position.
        require_at_least(
            self, "drafter.", layers=1, block_size=2, conv_kernel_size=0, draft_vocab_size=0
        )
        require_one_of(self, "drafter.", last_layer_output=("raw", "normed"))
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window={self.sliding_window}: the last positions of a block "
                "would not see its bonus token; give at least "
                f"drafter.block_size={self.block_size}"
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
    stop: list[str] = field(default_factory=list, metadata={TEXT_OR_FILE_METADATA_KEY: True})
    loop_period: int = 0
    logprobs: int | None = None
    json_schema: str | None = field(default=None, metadata={TEXT_OR_FILE_METADATA_KEY: True})
    regex: str | None = field(default=None, metadata={TEXT_OR_FILE_METADATA_KEY: True})
    grammar: str | None = field(default=None, metadata={TEXT_OR_FILE_METADATA_KEY: True})

    def check(self) -> None:
        """Raise ValueError for values out of range and for options that exclude each other."""
        grammars = [name for name in GRAMMAR_OPTIONS if getattr(self, name) is not None]
        if len(grammars) > 1:
            raise ValueError(f"{' and '.join(grammars)}: give at most one of them")
        if grammars and self.ignore_eos:
            raise ValueError(
                f"ignore_eos=true: an output that follows {grammars[0]} ends where that ends, "
                "leave one of them out"
            )
        require_at_least(self, max_new_tokens=1, top_k=0, loop_period=0)
        require_temperature(self)
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p}: must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p={self.min_p}: must be between 0 and 1")
        if not 0 < self.repetition_penalty < float("inf"):
            raise ValueError(
                f"repetition_penalty={self.repetition_penalty}: must be above 0 and finite; 1 "
                "means no penalty"
            )
        if any(not stop_string for stop_string in self.stop):
            raise ValueError("stop: contains an empty string, which would end every output at once")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROB_ALTERNATIVES:
            raise ValueError(
                f"logprobs={self.logprobs}: use 0 to {MAX_LOGPROB_ALTERNATIVES}, or null"
            )


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
        """The table entry of the tree method.

        With n-grams, a method may be replaced by its variant that uses them.
        """
        method = TREE_METHODS[self.method]
        if method.ngram_variant and self.uses_ngram_file:
            return TREE_METHODS[method.ngram_variant]
        return method

    @property
    def uses_ngram_file(self) -> bool:
        """Whether `ngrams` names an n-gram file, or the sequence's own n-grams."""
        return self.ngrams not in (None, NGRAMS_OPTION_NONE)

    def with_drafter_ngrams(self, ngram_file: Path | None) -> Self:
        """Return the options with the n-gram file that is stored next to a drafter's weights.

        Returns the options unchanged if there is no file, if `ngrams` is set already, or if
        the method has no variant with n-grams.
        """
        has_variant = TREE_METHODS[self.method].ngram_variant is not None
        if ngram_file is None or self.ngrams is not None or not has_variant:
            return self
        return replace(self, ngrams=str(ngram_file))

    def describe_method(self, drafter: Any) -> str:
        """Return the name of the tree method that is used with a drafter.

        For example "ddtree+ngrams" for method=ddtree and a drafter with an n-gram file.
        """
        ngram_file = None if drafter is None else drafter.ngram_path
        return self.with_drafter_ngrams(ngram_file).tree.name

    @property
    def uses_drafter(self) -> bool:
        """Whether the method needs a drafter."""
        return self.tree.needs_drafter

    def output_positions(self, tokens: int) -> int:
        """Return how many positions of the KV cache an output of `tokens` tokens needs."""
        return tokens

    def check(self) -> None:
        """Raise ValueError for unknown methods and for options that do not fit the method."""
        require_method(self.method)
        require_one_of(self, method=TREE_METHODS)
        require_at_least(
            self, width=1, max_num_seqs=1, max_num_batched_tokens=1, prefix_cache_mib=0
        )
        if isinstance(self.budget, str) and self.budget != "auto":
            raise ValueError(f"budget={self.budget}: give a number of nodes, or auto")
        if self.tree.needs_ngrams and not self.uses_ngram_file:
            raise ValueError(
                f"method={self.method} needs ngrams=<n-gram file>; ./launch.sh ngram creates one"
            )
        if self.ngrams == NGRAMS_OPTION_CURRENT_SEQUENCE and not self.tree.uses_sequence_ngrams:
            raise ValueError(
                f"ngrams={NGRAMS_OPTION_CURRENT_SEQUENCE} works with method=ddtree only, not with "
                f"{self.method}"
            )
        if self.method == "static" and self.budget != "auto" and self.width > self.budget:
            raise ValueError(
                f"width={self.width} is larger than budget={self.budget}: give a larger budget"
            )
        if self.uses_ngram_file and not self.tree.needs_ngrams:
            methods = [
                name for name, row in TREE_METHODS.items() if row.needs_ngrams or row.ngram_variant
            ]
            raise ValueError(
                f"ngrams={self.ngrams} works with method={' or '.join(methods)} only, not with "
                f"{self.method}"
            )
        if self.budget == "auto" and self.uses_drafter and not self.tree.ranked:
            methods = [name for name, row in TREE_METHODS.items() if row.ranked]
            raise ValueError(
                f"budget=auto works with method={' or '.join(methods)} only; give "
                f"method={self.method} a number of nodes"
            )
        if self.budget != "auto" and self.budget < 1:
            raise ValueError(
                f"budget={self.budget}: must be at least 1 node; use method=plain to decode "
                "without a drafter"
            )


@append_inherited_help
@dataclass
class DecodeOptions(EngineConfig, TextOptions):
    """Options of EngineConfig and TextOptions together."""

    def check(self) -> None:
        """Raise ValueError for invalid options."""
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
        """Raise ValueError for values out of range."""
        require_at_least(
            self,
            "evaluation.",
            prompts=0,
            external_prompts=0,
            max_prompt_tokens=1,
            max_new_tokens=1,
        )
        require_temperature(self, "evaluation.")
        require_positive(self, "evaluation.", "max_minutes")
        if not self.budgets or any(budget < 1 for budget in self.budgets):
            raise ValueError(
                f"evaluation.budgets={list(self.budgets)}: give one or more node budgets, each at "
                "least 1"
            )
