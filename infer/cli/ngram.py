"""`ngram`: n-grams counted, for trees that judge paths by them."""

import sys
from dataclasses import dataclass, field
from pathlib import Path

from data.rows import DataConfig
from infer.config import TargetConfig


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


def run(config: NgramCommand) -> None:
    from data.packing import token_documents
    from infer.ngrams.count import count_ngrams
    from infer.targets.loading import load_config, load_tokenizer
    from infer.targets.target import tokenizer_digest

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
