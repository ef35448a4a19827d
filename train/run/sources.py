"""What a run learns from, by content: its target and its training rows. A path says neither what is there today nor
what was there when the run was begun."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from infer.targets.identity import target_identity
from infer.targets.target import Target
from infer.utils.files import refuse_other_settings, write_json
from train.features import StoredRows

if TYPE_CHECKING:
    from datasets import Dataset

SOURCES = "sources.json"


def sources(path: str, target: Target, rows: "StoredRows | Dataset") -> dict:
    """Return what identifies a target (at `path`) and the training rows; about a second for a gigabyte of tokens."""
    return {
        "target": target_identity(path, target.tokenizer_digest),
        "data": {"rows": len(rows), "content": rows_digest(rows)},
    }


def rows_digest(rows: "StoredRows | Dataset") -> str:
    """Return a digest of all rows' tokens, in order, and of which of them carry loss. Stored features and the rows that
    they were made of have the same one."""
    digest = hashlib.sha256()
    for name, kind in (("ids", np.int64), ("loss", np.bool_)):
        for part in column_parts(rows, name):
            digest.update(np.ascontiguousarray(part, dtype=kind))
    return digest.hexdigest()


def column_parts(rows: "StoredRows | Dataset", name: str) -> Iterator[np.ndarray]:
    """Yield the entries of a column of all rows, one (entries,) piece after the other."""
    if isinstance(rows, StoredRows):
        yield from rows.column_parts(name)
        return
    for chunk in rows.data.column(name).chunks:  # pyarrow's, memory-mapped
        yield chunk.flatten().to_numpy(zero_copy_only=False)


def refuse_other_sources(run: Path, wanted: dict) -> None:
    """Raise ValueError if the run was begun with another target or other rows. A run of an earlier version, which has
    no record, gets one."""
    file = run / SOURCES
    if file.exists():
        try:
            known = dict(json.loads(file.read_text()))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{file} is damaged: choose another name=, or restore it") from error
        refuse_other_settings(
            known,
            wanted,
            f"{run} was begun with other contents under the same paths ({{keys}} differ), and rows held out then might "
            "be learnt from now: restore them, or choose another name=",
        )
    else:
        write_json(file, wanted)
