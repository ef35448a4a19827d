"""What a draft tree costs a recurrent layer: one triangular system, against a state for every node.

    python benchmarks/tree_states.py [--heads 16] [--size 128] [--repeats 15] [--device cuda]

One Gated DeltaNet recurrence in float32, one text, trees that DDTree builds from random marginals: checking all nodes
and committing the deepest path. `tree` is ours; `copies` keeps a state a node and computes the nodes of a depth
together; `steps` computes one node after the other from its parent's state. Then whole passes of a Qwen3.5-shaped
random target: a tree against as many plain passes. Every way's outputs are compared with ours before it is timed. On
CUDA, or its stand-in (benchmarks/gpu.py), launches are counted instead, and passes have Qwen3.5-4B's shape.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from gpu import need_cuda, nullgpu, watch
from torch.profiler import profile
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from infer.evaluation.evaluate import describe_device
from infer.targets.recurrent import Lineage, recur
from infer.targets.target import Target
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, Proposal

Inputs = tuple[torch.Tensor, ...]  # queries, keys (1, H, M, K), values (1, H, M, E), decay, beta (1, H, M, 1)


def random_tree(nodes: int) -> DraftTree:
    """A tree of so many drafted nodes below a root, as a drafter of blocks of 16 gives it."""
    logits = 3 * torch.randn(1, 15, 200, generator=torch.Generator().manual_seed(nodes))
    return ddtree(Proposal(torch.tensor([1]), logits.log_softmax(-1), nodes))


def as_tree(tree: DraftTree, inputs: Inputs, state: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Return the outputs (1, H, M, E), and the bytes kept for the commit, which is made."""
    piece = Lineage.tree(tree.parents, tree.ancestors()).pieces[0]
    done = recur(*inputs, state, piece)
    done.state_after(state, tree.depths.argmax(1), piece)
    return done.outputs, sum(kept.nbytes for kept in (done.keys, done.updates, done.decay))


def from_parents(
    tree: DraftTree, inputs: Inputs, state: torch.Tensor, groups: list, states: torch.Tensor
) -> tuple[torch.Tensor, int]:
    """The same, with a state for every node, (M, H, K, E); the nodes of a group are computed together."""
    queries, keys, values, decay, beta = (x[0].transpose(0, 1) for x in inputs)  # (M, H, ...)
    outputs = torch.empty_like(values)
    for number, nodes in enumerate(groups):
        parents = tree.parents[0, nodes]
        before = states[parents] if number else state  # (n, H, K, E)
        before = before * decay[nodes, :, :, None].exp()
        key = keys[nodes, :, :, None]
        write = beta[nodes, :, :, None] * (values[nodes, :, None] - key.mT @ before)
        states[nodes] = before + key @ write
        outputs[nodes] = (queries[nodes, :, None] @ states[nodes])[:, :, 0]
    state.copy_(states[tree.depths.argmax(1)])
    return outputs.transpose(0, 1)[None], states.nbytes


def timed(run: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call."""
    run(), run()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


def launches(run: Callable[[], object]) -> int:
    """Return how many kernels a call launches on the device."""
    run(), run()
    with watch() as seen:
        run()
    return seen.launches


def calls(run: Callable[[], object]) -> int:
    """Return how many ATen operators a call runs that call no others: about the launches on a GPU."""
    with profile() as seen:
        run()
    return sum(event.name.startswith("aten::") and not event.cpu_children for event in seen.events())


def layer_rows(heads: int, size: int, nodes: int, repeats: int, device: torch.device) -> None:
    """Print a layer's rows."""
    generator, drawn = torch.Generator().manual_seed(0), random_tree(nodes)
    tree = on(drawn, device)
    width = nodes + 1
    queries, keys, values = (torch.randn(1, heads, width, size, generator=generator) for _ in range(3))
    keys = keys / keys.norm(dim=-1, keepdim=True)
    decay, beta = (torch.rand(1, heads, width, 1, generator=generator) for _ in range(2))
    inputs = tuple(x.to(device) for x in (queries * size**-0.5, keys, values, -decay, beta))
    state = torch.randn(1, heads, size, size, generator=generator).to(device)
    depths = range(int(drawn.depths.max()) + 1)
    by_depth = [(drawn.depths[0] == depth).nonzero()[:, 0].to(device) for depth in depths]
    states = torch.zeros(width, heads, size, size, device=device)
    singly = list(torch.arange(width, device=device)[:, None])
    ways = {
        "tree": lambda: as_tree(tree, inputs, state.clone()),
        "copies": lambda: from_parents(tree, inputs, state.clone(), by_depth, states),
        "steps": lambda: from_parents(tree, inputs, state.clone(), singly, states),
    }
    ours = ways["tree"]()[0]
    for name, run in ways.items():
        outputs, kept = run()
        assert nullgpu is not None or (outputs - ours).abs().max() < 1e-4, name
        if device.type == "cuda":
            print(f"{nodes:5}  {name:8}{kept / 2**20:24.2f} MiB{launches(run):7}", flush=True)
            continue
        print(
            f"{nodes:5}  {name:8}{1e3 * timed(run, repeats):9.2f} ms{kept / 2**20:9.2f} MiB{calls(run):7}", flush=True
        )


def on(tree: DraftTree, device: torch.device) -> DraftTree:
    """Return the tree on the device."""
    return replace(tree, tokens=tree.tokens.to(device), parents=tree.parents.to(device), depths=tree.depths.to(device))


def device_rows(device: torch.device) -> None:
    """Print the launches of whole passes of Qwen3.5-4B's shape in bfloat16, and of rounds."""
    config = Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=2560,
        intermediate_size=9216,
        num_hidden_layers=32,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=256,
        linear_num_key_heads=16,
        linear_num_value_heads=32,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        eos_token_id=None,
    )
    with device:
        target = Target(Qwen3_5ForCausalLM(config).to(torch.bfloat16))
    cache = target.cache(1, 300)
    with torch.inference_mode():
        with cache.add(1) as part:
            target.extend([list(range(200))], part, ())
        for nodes in (0, 16, 64):
            tree = on(random_tree(nodes) if nodes else random_tree(1).first(0), device)
            ancestors = tree.ancestors()
            count = launches(lambda: target.verify(tree, ancestors, cache))  # noqa: B023
            print(f"{nodes:5} nodes {count:7} launches a pass", flush=True)


def target_rows(repeats: int) -> None:
    """Print a whole target's rows."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
    )
    target = Target(Qwen3_5ForCausalLM(config))
    cache = target.cache(1, 300)
    with torch.inference_mode():
        with cache.add(1) as part:
            target.extend([list(range(200))], part, ())
        taken = {}
        for nodes in (0, 16, 64):
            tree = random_tree(nodes) if nodes else random_tree(1).first(0)
            ancestors = tree.ancestors()
            taken[nodes] = timed(lambda: target.verify(tree, ancestors, cache), repeats)  # noqa: B023
            plain = taken[nodes] / taken[0]
            print(f"{nodes:5} {1e3 * taken[nodes]:9.1f} ms, as {plain:5.1f} plain passes, of {nodes + 1}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--heads", type=int, default=16, help="heads of values")
    parser.add_argument("--size", type=int, default=128, help="of keys and values")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    device = need_cuda() if args.device == "cuda" else torch.device("cpu")
    print(f"{describe_device(device)}\none layer, {args.heads} heads of {args.size} x {args.size}\n")
    print("nodes  way           time         kept  calls")
    for nodes in (16, 64):
        layer_rows(args.heads, args.size, nodes, args.repeats, device)
    if device.type == "cuda":
        print("\nQwen3.5-4B's shape, 200 tokens of context")
        return device_rows(device)
    print("\na Qwen3.5-shaped target of 8 layers of 256, 200 tokens of context")
    target_rows(args.repeats)


if __name__ == "__main__":
    main()
