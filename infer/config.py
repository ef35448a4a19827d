"""Options of targets, drafters, decoding and evaluation.

This module does not import torch, so that an invalid option is refused before torch is loaded. The
docstring of each class must have an entry "name: meaning" for every option; tests/test_conf.py
checks this.
"""

import re
from dataclasses import dataclass, field, replace
from inspect import cleandoc
from pathlib import Path
from typing import Any, Self, TypeVar

from infer.drafters.families import check_family_and_layers, check_family_options
from infer.drafters.heads.table import check_head_options
from infer.trees.methods import TREE_METHODS, TreeMethod, require_method_installed
from infer.utils.checks import (
    TEXT_OR_FILE_METADATA_KEY,
    require_at_least,
    require_one_of,
    require_positive,
    require_valid_temperature,
)

# Two values of the option `ngrams` that are not file names.
NGRAMS_OPTION_NONE = "none"  # use no n-grams
NGRAMS_OPTION_CURRENT_SEQUENCE = (
    "text"  # use only the n-grams of the sequence that is being decoded, not those of a file
)
# Options that constrain the output to a schema or grammar; at most one of them may be set.
GRAMMAR_OPTIONS = ("json_schema", "regex", "grammar")
MAX_LOGPROB_ALTERNATIVES = 20
OptionsClass = TypeVar("OptionsClass")


def append_inherited_help(cls: type[OptionsClass]) -> type[OptionsClass]:
    """Append the docstrings of the base classes to the docstring of a class, and return the class.

    This is a class decorator for dataclasses that inherit options. The command-line help is made
    from the docstring of a class, and must also explain the inherited options.
    """
    docstrings = [cleandoc(documented.__doc__ or "") for documented in (cls, *cls.__bases__)]
    cls.__doc__ = "\n\n".join(docstrings)
    return cls


@dataclass
class TargetConfig:
    """The target model and how it is loaded.

    path: a Hugging Face hub id, a local folder, a GGUF file, "embedded" (the small target in this
        repository), or "smollm2" (a model that a Python package contains, see
        infer/targets/gguf.py)
    dtype: float32, bfloat16, float16 or auto. auto means bfloat16 on CUDA and float32 elsewhere
    device: cpu, cuda, cuda:1 and so on, or auto. auto means CUDA if there is a GPU, else the CPU
    trust_remote_code: run Python code that comes with the model
    model_config: the most important entries of the model's config.json. ./launch.sh plan needs them
        on a machine that cannot read the model
    shard: in training, distribute the target's layers over all processes. Use it for a target that
        does not fit on one GPU
    chat_template_kwargs: variables for the target's chat template, such as {enable_thinking:
        false}. They apply wherever chats are tokenized or served, and are saved with the drafter.
        An example or a request that sets the same variable takes precedence
    quantization: none or int8. int8 stores weights and computes matmuls in 8-bit integers, on a CPU
        only
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
                f"target.quantization=int8 cannot be combined with target.dtype={self.dtype} and "
                f"target.shard={str(self.shard).lower()}: it needs target.dtype=auto or float32, "
                "and target.shard=false"
            )
        if not re.fullmatch(r"auto|[a-z]+(:[0-9]{1,4})?", self.device):
            raise ValueError(
                f"target.device={self.device}: use auto, cpu, cuda, or one GPU such as cuda:1"
            )
        for name, value in self.chat_template_kwargs.items():
            if not name.isidentifier() or not isinstance(value, bool | int | float | str | None):
                raise ValueError(
                    f"target.chat_template_kwargs.{name}={value}: the name must be an identifier, "
                    "and the value null, true, false, a number or a text"
                )


@dataclass
class DrafterLoadConfig:
    """How a trained drafter is loaded.

    quantization: none, int8 (matmuls in 8-bit integers, on a CPU only) or auto. auto uses the
        quantization of the target
    sliding_window: number of last positions that the drafter attends to and keeps in its KV cache;
        useful for long sequences. Only for drafters of the family dflash. null means the value in
        the drafter's config.json
    """

    quantization: str = "auto"
    sliding_window: int | None = None

    def check(self) -> None:
        """Raise ValueError for an unknown value of `quantization`."""
        require_one_of(self, "drafter.", quantization=("auto", "none", "int8"))


@dataclass
class HeadConfig:
    """A conditional head: it makes the score of a drafted token depend on the tokens drafted before
    it.

    name: none (the scores of a token do not depend on other drafted tokens), markov, selector,
        swiglu, gru or xpress, see infer/drafters/heads/table.py
    kind: variant of the markov head. vanilla scores pairs of consecutive tokens, gated multiplies
        these scores by a factor that depends on the hidden state of the position, and rnn has a
        recurrent state. Only for name=markov
    rank: rank of the low-rank matrices that compute the correction of the scores. Only for markov,
        selector, gru and xpress
    top_k: the head chooses among this many most likely tokens of a position; 0 means among all
        tokens. Only for selector
    hidden_size: size of the hidden layer (swiglu) or of the recurrent state (gru). null means the
        drafter's intermediate size for swiglu, and 1024 for gru. Only for swiglu and gru
    confidence_head: train a second head that predicts whether a drafted token is accepted. It is
        for engines that use it; our engine calibrates path probabilities instead
        (infer/engine/budget.py). Only for markov
    """

    name: str = "none"
    kind: str = "vanilla"
    rank: int = 256
    top_k: int = 0
    hidden_size: int | None = None
    confidence_head: bool = False

    def check(self) -> None:
        """Raise ValueError for an unknown head, or for sizes that are out of range."""
        check_head_options(self)
        require_at_least(self, "drafter.head.", rank=1, top_k=0, hidden_size=1)


@dataclass
class DrafterConfig:
    """Architecture of the drafter to train. All sizes that are not options equal the target's.

    With the option init, training starts from an existing drafter. For the options
    sample_from_anchor, causal, sliding_window, layer_fusion, conv_kernel_size and draft_vocab_size,
    null then means the value of the existing drafter. Without init, null means what is said below.

    family: dflash or dart, see infer/drafters/families.py
    layers: number of decoder layers; a DART drafter has exactly 1
    block_size: number of positions in a block, which are the bonus token and block_size - 1 drafted
        positions
    target_layer_ids: ids of the target layers whose hidden states the drafter reads; the first
        layer has id 0. null means evenly spaced layers, by the formula of the DFlash code
    last_layer_output: which hidden state the drafter reads if the target's last layer is among
        target_layer_ids. raw is the state before the target's final norm, as in vLLM; normed is the
        state after it, as in transformers and in the DFlash authors' code
    warm_start: copy the weights of the target's layers into the drafter's layers, if both have the
        same architecture. Otherwise the weights are random, and a warning says so. (DFlash
        normalises queries and keys, as Qwen3 does and Llama does not)
    mask_token_id: the token id that the drafter reads at drafted positions. null means the
        tokenizer's mask token; if it has none, the first unused id; if all ids are used, a special
        token that the data do not contain. Only for dflash
    sample_from_anchor: also draft a token at the position of the bonus token. The last position of
        the block is then not needed: block_size - 1 positions draft block_size - 1 tokens. null
        means false. Only for dflash
    causal: a drafted position attends only to earlier positions of its block, as in JetSpec. null
        means false. Only for dflash
    sliding_window: number of last positions that the drafter's layers attend to and that its KV
        cache keeps; the drafters of the speculators library use 2048. null means no limit. Only for
        dflash
    layer_fusion: each layer of the drafter has a separate projection of the target's hidden states,
        as in DFlare. null means false. Only for dflash
    conv_kernel_size: kernel size of the convolutions around attention and MLP in DFlash 2, whose
        published drafters use 2. null means no convolutions. Only for dflash
    draft_vocab_size: the drafter proposes only this many tokens, the most frequent ones of the
        training data (EAGLE-3, FR-Spec). 0 or null means all tokens. If it differs from the value
        of the drafter that init names, the tokens are selected again; that drafter must then have
        no conditional head
    init: the drafter that training starts from, which is a hub id or a folder in any layout that
        load_drafter reads. null means a new drafter
    head: the conditional head, see HeadConfig. With init, head.name=none keeps the head of that
        drafter, and another name adds a head to a drafter without one
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
        """Raise ValueError for an unknown drafter family, or for sizes that are out of range."""
        check_family_and_layers(self.family, self.layers)
        check_family_options(self)
        self.head.check()
        # block_size is at least 2: the position of the bonus token and one drafted position.
        require_at_least(
            self, "drafter.", layers=1, block_size=2, conv_kernel_size=0, draft_vocab_size=0
        )
        require_one_of(self, "drafter.", last_layer_output=("raw", "normed"))
        if self.sliding_window is not None and self.sliding_window < self.block_size:
            raise ValueError(
                f"drafter.sliding_window={self.sliding_window}: the last positions of a block "
                "would not attend to the block's bonus token; give at least "
                f"drafter.block_size={self.block_size}"
            )


@dataclass
class SamplingOptions:
    """How the tokens of one sequence are sampled, and when generation stops. Logits are processed
    in the order of Hugging Face transformers: repetition penalty, temperature, top-k, top-p, min-p.
    Log-probabilities are computed from the target's unprocessed logits.

    max_new_tokens: maximum number of generated tokens
    temperature: 0 means greedy decoding; a value above 0 divides the logits
    top_k: sample only from this many most likely tokens; 0 means from all tokens
    top_p: sample only from the most likely tokens whose probabilities add up to this value
    min_p: exclude tokens that are less likely than this fraction of the highest probability
    repetition_penalty: a value above 1 lowers the scores of tokens that the prompt or the output
        already contains
    seed: random seed of sampling; the same seed gives the same output with every decoding method
    ignore_eos: continue after end tokens
    stop: strings that end the output; the output is cut before such a string
    loop_period: stop an output that repeats itself. The output ends when its last tokens are four
        copies of the same sequence of at most this many tokens. 0 means never
    logprobs: return the log-probability of every token, and of this many most likely alternatives
        (0 to 20). null means no log-probabilities
    json_schema: the output is JSON that follows this JSON schema; @file reads the schema from a
        file
    regex: the whole output matches this regular expression (Rust's syntax); @file reads the
        expression from a file
    grammar: the output follows this grammar, in llguidance's Lark syntax; @file reads the grammar
        from a file
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
                f"ignore_eos=true cannot be combined with {grammars[0]}, because the output ends "
                f"where the grammar ends: remove ignore_eos or {grammars[0]}"
            )
        require_at_least(self, max_new_tokens=1, top_k=0, loop_period=0)
        require_valid_temperature(self)
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
            raise ValueError(
                "stop contains an empty string, which would end every output at once: remove it"
            )
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROB_ALTERNATIVES:
            raise ValueError(
                f"logprobs={self.logprobs}: must be null or a number from 0 to "
                f"{MAX_LOGPROB_ALTERNATIVES}"
            )


@dataclass
class EngineConfig:
    """How sequences are decoded. These options change the speed, never the output.

    method: how draft tokens are arranged for verification. One of plain (no drafter), chain,
        ddtree, continuity, static or another name in infer/trees/methods.py, see docs/methods.md
    budget: the node budget, which is the number of drafted tokens that the target verifies per
        round and sequence (a chain has at most block_size - 1). auto chooses the number every round
        from measured time and acceptance, and may choose 0
    ngrams: n-gram file (made by ./launch.sh ngram) whose n-grams score the paths of a draft tree,
        for continuity and ddtree; ddtree also uses the n-grams of the sequence itself. text means
        only the n-grams of the sequence itself. none means no n-grams. null means, for ddtree on a
        CPU, the n-gram file beside the drafter's weights if there is one; in all other cases no
        n-grams. On CUDA, rounds with n-grams run without CUDA graphs
    width: number of children of every tree node. Only for static
    max_num_seqs: maximum number of sequences that are decoded in one batch; others wait in a queue
    max_num_batched_tokens: maximum number of positions that the target computes in one step, in the
        draft trees of all sequences and in chunks of new prompts. One tree is always computed, even
        if it is larger. A position after a long context counts as more than one. With larger
        values, new sequences start sooner, and running sequences are slowed down more. null means
        no limit
    prefix_cache_mib: MiB of memory for the KV cache of finished sequences. The prefill of a prompt
        with the same prefix then starts after that prefix. 0 means no prefix cache. Hybrid targets
        (with recurrent layers) do not support it
    compile: false turns CUDA graphs off. It has no effect on other devices than CUDA
    """

    method: str = "ddtree"
    # With the root, 63 drafted nodes fill the tiles of GPU kernels (docs/results/gpu.md).
    budget: int | str = 63
    ngrams: str | None = None
    width: int = 2
    max_num_seqs: int = 16
    max_num_batched_tokens: int | None = (
        # With 144 positions per step, running sequences generate tokens at most 5 times more slowly
        # while new prompts are prefilled, see docs/serving.md.
        144
    )
    prefix_cache_mib: int = 0
    compile: bool | None = None

    @property
    def tree_method(self) -> TreeMethod:
        """The tree method that decoding uses, as an entry of `TREE_METHODS`.

        This is the tree method with the name `method`. If n-grams are used and this method has an
        `ngram_variant`, the variant is used instead.
        """
        method = TREE_METHODS[self.method]
        if method.ngram_variant and self.uses_ngrams:
            return TREE_METHODS[method.ngram_variant]
        return method

    @property
    def uses_ngrams(self) -> bool:
        """Whether decoding uses n-grams, of a file or of the sequence itself."""
        return self.ngrams not in (None, NGRAMS_OPTION_NONE)

    def with_drafter_ngrams(self, ngram_file: Path | None) -> Self:
        """Return a copy of the options that uses the n-gram file of a drafter, if it applies.

        ngram_file: the n-gram file beside the drafter's weights; None if there is none

        The options are returned unchanged if `ngram_file` is None, if `ngrams` is set already, or
        if the tree method has no variant with n-grams.
        """
        has_variant = TREE_METHODS[self.method].ngram_variant is not None
        if ngram_file is None or self.ngrams is not None or not has_variant:
            return self
        return replace(self, ngrams=str(ngram_file))

    def get_method_name(self, drafter: Any) -> str:
        """Return the name of the tree method that is used with a drafter.

        For method=ddtree and a drafter with an n-gram file, for example, it is "ddtree+ngrams".
        """
        ngram_file = None if drafter is None else drafter.default_ngram_path
        return self.with_drafter_ngrams(ngram_file).tree_method.name

    @property
    def uses_drafter(self) -> bool:
        """Whether the tree method needs a drafter; `plain` does not."""
        return self.tree_method.needs_drafter

    def count_output_positions(self, tokens: int) -> int:
        """Return how many positions of the KV cache an output of `tokens` tokens needs."""
        return tokens

    def check(self) -> None:
        """Raise ValueError for an unknown tree method, or options that it does not support."""
        require_method_installed(self.method)
        require_one_of(self, method=TREE_METHODS)
        require_at_least(
            self, width=1, max_num_seqs=1, max_num_batched_tokens=1, prefix_cache_mib=0
        )
        if isinstance(self.budget, str) and self.budget != "auto":
            raise ValueError(f"budget={self.budget}: must be a number of nodes, or auto")
        if self.tree_method.needs_ngrams and not self.uses_ngrams:
            raise ValueError(
                f"method={self.method} needs ngrams=<n-gram file>; ./launch.sh ngram creates one"
            )
        if (
            self.ngrams == NGRAMS_OPTION_CURRENT_SEQUENCE
            and not self.tree_method.uses_sequence_ngrams
        ):
            raise ValueError(
                f"ngrams={NGRAMS_OPTION_CURRENT_SEQUENCE} works with method=ddtree only, not with "
                f"{self.method}"
            )
        if self.method == "static" and self.budget != "auto" and self.width > self.budget:
            raise ValueError(
                f"width={self.width} is larger than budget={self.budget}: with method=static, "
                "budget must be at least width"
            )
        if self.uses_ngrams and not self.tree_method.needs_ngrams:
            methods = [
                name for name, row in TREE_METHODS.items() if row.needs_ngrams or row.ngram_variant
            ]
            raise ValueError(
                f"ngrams={self.ngrams} works with method={' or '.join(methods)} only, not with "
                f"{self.method}"
            )
        if (
            self.budget == "auto"
            and self.uses_drafter
            and not self.tree_method.sorts_nodes_by_probability
        ):
            methods = [name for name, row in TREE_METHODS.items() if row.sorts_nodes_by_probability]
            raise ValueError(
                f"budget=auto works with method={' or '.join(methods)} only, not with "
                f"{self.method}: give budget as a number of nodes"
            )
        if self.budget != "auto" and self.budget < 1:
            raise ValueError(
                f"budget={self.budget}: must be at least 1 node; use method=plain to decode "
                "without a drafter"
            )


@append_inherited_help
@dataclass
class DecodeOptions(EngineConfig, SamplingOptions):
    """How sequences are decoded, and how the tokens of each are sampled."""

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        SamplingOptions.check(self)
        EngineConfig.check(self)


@dataclass
class EvaluationConfig:
    """Which prompts are decoded to measure a drafter, and how. In training, these options apply to
    the last checkpoint. At earlier checkpoints, a quarter of the held-out prompts is decoded
    greedily, with a quarter of the time limit. External prompts and sampling_temperature are not
    used there.

    prompts: number of held-out prompts, of several kinds. 0 means no evaluation in training
    external_prompts: number of prompts that are not from the training data set. Their results are
        reported separately. At most `prompts`, and at most the 24 in data/embedded/outside.jsonl
    max_prompt_tokens: maximum number of tokens of a prompt
    max_new_tokens: maximum number of tokens of an output
    budgets: node budgets of the draft trees that are measured. The target processes one position
        more than the node budget, for the root: 4, 8 or 16 positions for 3, 7 or 15 nodes
    temperature: sampling temperature with which every prompt is decoded; 0 means greedy decoding
    sampling_temperature: decode every second prompt once more at this temperature. null means that
        no prompt is decoded twice
    max_minutes: time limit in minutes for the whole evaluation, with all kinds of prompts or all
        question sets of a suite. A prompt that was started is finished with every method. The
        report says how many prompts were decoded. null means no limit, which is the default with
        suite=
    ngrams: n-gram file (made by ./launch.sh ngram). With it, two more methods are measured at the
        median of budgets: draft trees that are scored by its n-grams, and drafting from its n-grams
        without a drafter. text means the n-grams of the sequence itself. none means no n-grams.
        null means the file beside the drafter's weights, or text if there is no such file
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
        """Raise ValueError for options that are out of range."""
        require_at_least(
            self,
            "evaluation.",
            prompts=0,
            external_prompts=0,
            max_prompt_tokens=1,
            max_new_tokens=1,
        )
        require_valid_temperature(self, "evaluation.")
        require_positive(self, "evaluation.", "max_minutes")
        if not self.budgets or any(budget < 1 for budget in self.budgets):
            raise ValueError(
                f"evaluation.budgets={list(self.budgets)}: give one or more node budgets, each at "
                "least 1"
            )
