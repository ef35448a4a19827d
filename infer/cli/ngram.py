"""`ngram`: n-grams counted, for trees that judge paths by them."""

from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.cli.models import OfTarget
from infer.utils.checks import at_least


@dataclass
class NgramCommand(OfTarget):
    """Count n-grams of token ids, for draft trees that score paths by them.

    out: the file that is written
    order: tokens of the longest n-grams; null: as many as a 64-bit key can hold, at most 6
    min_count: n-grams that occur fewer times are left out
    target: the target, whose tokenizer is used, see TargetConfig in infer/config.py
    data: the text to count, see DataConfig in data/rows.py
    """

    out: str = "runs/ngrams"
    order: int | None = None
    min_count: int = 1
    data: DataConfig = field(default_factory=DataConfig)

    def check(self) -> None:
        """Raise ValueError for what cannot be counted."""
        super().check()
        at_least(self, order=1, min_count=1)


def run(config: NgramCommand) -> None:
    from data.counts import ExampleCounts
    from data.packing import token_documents
    from infer.ngrams.count import count_ngrams, usual_order
    from infer.targets.loading import load_config, load_tokenizer
    from infer.targets.target import tokenizer_digest
    from infer.utils.progress import Progress

    place = config.target
    tokenizer = load_tokenizer(place.path, place.trust_remote_code, place.chat_template_kwargs)
    theirs = load_config(place.path, place.trust_remote_code)
    vocabulary = max(theirs.get_text_config().vocab_size, len(tokenizer))
    counts = ExampleCounts()
    documents = token_documents(config.data, tokenizer, counts)
    digest = tokenizer_digest(tokenizer)
    order = config.order or usual_order(vocabulary)
    out = Path(config.out)
    counted = Progress("counting", "tokens")
    model = count_ngrams(documents, vocabulary, order, out, digest, counted, config.min_count)
    counted.close()
    print(*counts.lines(), sep="\n")
    nodes = sum(model.nodes)
    print(
        f"{out}: {model.tokens:,} tokens, {nodes:,} n-grams of up to {model.order}, {model.size_bytes / 1e6:,.1f} MB "
        f"({model.size_bytes / nodes:.1f} bytes each); use it with ngrams={out}"
    )
