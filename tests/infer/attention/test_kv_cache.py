"""The memory of a cache."""

from pathlib import Path

import pytest
import torch

from infer.attention.kv_cache import KVCache


@pytest.mark.skipif(
    not Path("/proc/self/statm").exists(), reason="nobody says how much memory is in use"
)
def test_a_cache_takes_memory_where_it_is_written_alone():
    def megabytes() -> float:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

    before = megabytes()
    cache = KVCache(
        {layer: ((4, 64), (4, 64)) for layer in range(8)},
        16,
        4096,
        torch.bfloat16,
        torch.device("cpu"),
    )
    assert cache.buffer.nbytes == 2**29 and cache.buffer.dtype == torch.bfloat16
    assert megabytes() - before < 64
    cache.buffer[:, :100] = 1
    assert cache.buffer[:, 100:200].count_nonzero() == 0
    del cache
    assert megabytes() - before < 64
