"""Bytes that the objective's operators read and write, counted, beside the least that a plain one could.

    python benchmarks/objective_bytes.py                       # 7,680 rows, 2,560 x 151,936; 512 rows run, scaled
    python benchmarks/objective_bytes.py --run 64 --vocabulary 32000 --hidden 256

Every operator below autograd counts its inputs and outputs once, views left out. Operators whose tensors all fit in a
CPU's caches (32 MB) do not reach main memory again: what a slice brings there and back is counted by its first read and
its last write, as two passes over drafter's and target's logits. Least: products written, read once by the arithmetic,
gradients written, read by their product; the head read by three products; states.
"""

import argparse

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from train.config import ObjectiveConfig
from train.objective import divergence

CACHE = 32 << 20
PICKS = {torch.ops.aten.index, torch.ops.aten.index_select, torch.ops.aten.gather}


class Count(TorchDispatchMode):
    """Sums the bytes of tensors that operators take and return: of those beyond the caches, and of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.beyond = self.within = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = [x for x in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(x, torch.Tensor)]
        made = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, torch.Tensor)]
        if not func.is_view:
            read = made if func.overloadpacket in PICKS else given  # these read as much as they write
            sizes = [x.numel() * x.element_size() for x in (*read, *made)]
            if max(sizes, default=0) > CACHE:
                self.beyond += sum(sizes)
            else:
                self.within += sum(sizes)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=7680)
    parser.add_argument("--run", type=int, default=512, help="rows that are really computed")
    parser.add_argument("--hidden", type=int, default=2560)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows, hidden, vocabulary = args.run, args.hidden, args.vocabulary
    drafted, teacher = torch.randn(rows, hidden, requires_grad=True), torch.randn(rows, hidden)
    head, which = torch.randn(vocabulary, hidden).mul_(hidden**-0.5), torch.arange(rows)[:, None]
    config = ObjectiveConfig()
    with Count() as seen:
        divergence(drafted, teacher, which, which, torch.ones(rows, 1), head, config).loss.backward()
    logits, scale = 4 * rows * vocabulary, args.rows / rows
    slices = 4 * logits if seen.within > logits else 0  # a read and a write of both sides
    heads = 3 * 4 * vocabulary * hidden * -(-rows // config.chunk_rows)
    least = 6 * logits + heads  # the target's: written and read; the drafter's: both, and so for its gradient
    print(f"{args.rows:,} rows, hidden {hidden:,}, vocabulary {vocabulary:,}, float32; {rows} run")
    print(f"beyond the caches   {(seen.beyond + slices) * scale / 1e9:8.1f} GB")
    print(
        f"least               {least * scale / 1e9:8.1f} GB, {(seen.beyond + slices) / least:.2f} times that are moved"
    )
    print(f"within the caches   {seen.within * scale / 1e9:8.1f} GB")


if __name__ == "__main__":
    main()
