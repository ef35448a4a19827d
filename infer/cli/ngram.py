"""The command `ngram`: counts the n-grams of a data set and writes an n-gram file.

Some tree methods use the counts to score the paths of a draft tree.
"""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.cli.models import CommandWithTarget
from infer.utils.checks import require_at_least


@dataclass
class NgramCommand(CommandWithTarget):
    """Count the n-grams of token ids in a data set, and write an n-gram file. Tree methods such as
    continuity use it to score the paths of a draft tree.

    out: the n-gram file that is written
    order: number of tokens of the longest n-grams. null means as many as fit into a 64-bit key, at
        most 6
    min_count: n-grams that occur less often are left out
    target: the target, whose tokenizer is used, see TargetConfig in infer/config.py
    data: the data set whose n-grams are counted, see DataConfig in data/rows.py
    """

    out: str = "runs/ngrams"
    order: int | None = None
    min_count: int = 1
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        require_at_least(self, order=1, min_count=1)


def run(config: NgramCommand) -> None:
    """Count the n-grams, write the n-gram file, and print how large it is."""
    from data.counts import ExampleCounts
    from data.packing import tokenize_training_examples
    from infer.ngrams.count import count_ngrams, default_ngram_order
    from infer.targets.loading import load_config, load_tokenizer
    from infer.targets.target import tokenizer_digest
    from infer.utils.progress import Progress

    target = config.target
    tokenizer = load_tokenizer(target.path, target.trust_remote_code, target.chat_template_kwargs)
    model_config = load_config(target.path, target.trust_remote_code)
    vocabulary = max(model_config.get_text_config().vocab_size, len(tokenizer))
    counts = ExampleCounts()
    documents = tokenize_training_examples(config.data, tokenizer, counts)
    digest = tokenizer_digest(tokenizer)
    order = config.order or default_ngram_order(vocabulary)
    out = Path(config.out)
    progress = Progress("counting", "tokens")
    model = count_ngrams(documents, vocabulary, order, out, digest, progress, config.min_count)
    progress.end_open_line()
    print(*counts.format_lines(), sep="\n")
    nodes = sum(model.nodes_per_level)
    print(
        f"{out}: {model.num_tokens:,} tokens, {nodes:,} n-grams of up to {model.order} tokens, "
        f"{model.size_bytes / 1e6:,.1f} MB ({model.size_bytes / nodes:.1f} bytes each); use it "
        f"with decoding.ngrams={out}"
    )
