"""Time the kernels of a decoder layer of Qwen3-4B's shape on a GPU, alone and in CUDA graphs.

    python benchmarks/gpu_kernels.py                       # two minutes
    python benchmarks/gpu_kernels.py --small               # to try the script

Microseconds a call in a graph of 36 calls with 36 sets of weights, so that nothing stays in the L2
cache; the median of some replays. The tables have: the matmuls of a layer by cuBLAS, and by
candidate tiles of gpu_matmul.py with their relative error and whether a position has the same bits
alone and beside others; the row kernels; and attention by tile, number of programs, positions and
context. The time to read the weights is that of a copy of as many bytes.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from gpu import measure_copy_bandwidth, measure_milliseconds, nullgpu, require_cuda
from gpu_matmul import MatmulTile, matmul_few_rows

from infer.attention.kv_cache import KVCache
from infer.attention.masks import build_tree_mask
from infer.evaluation.evaluate import describe_device
from infer.kernels import reference, triton_attention, triton_rows
from infer.kernels.operands import SILU_COEFFICIENTS, Activation, RMSNormWeights
from infer.kernels.triton_attention import AttentionTile

HIDDEN_SIZE = 2560
QUERY_HEADS = 32
KEY_HEADS = 8
HEAD_SIZE = 128
MLP_SIZE = 9728
QKV_HEADS = QUERY_HEADS + 2 * KEY_HEADS
# (inputs, outputs) of the matmuls of a layer
MATMUL_SHAPES = {
    "qkv": (HIDDEN_SIZE, QKV_HEADS * HEAD_SIZE),
    "attention output": (QUERY_HEADS * HEAD_SIZE, HIDDEN_SIZE),
    "gate and up": (HIDDEN_SIZE, 2 * MLP_SIZE),
    "down": (MLP_SIZE, HIDDEN_SIZE),
}
MATMUL_TILES = {
    "qkv": [(16, 256, 2, 4, 3), (32, 128, 2, 4, 4), (32, 256, 2, 4, 3), (64, 128, 4, 4, 4)],
    "attention output": [
        (16, 256, 4, 4, 3),
        (32, 128, 4, 4, 4),
        (32, 256, 8, 4, 2),
        (64, 128, 8, 4, 4),
    ],
    "gate and up": [(16, 256, 1, 4, 3), (32, 128, 1, 4, 4), (64, 128, 1, 4, 4), (64, 128, 2, 4, 4)],
    "down": [(16, 256, 4, 4, 3), (32, 128, 4, 4, 4), (32, 256, 8, 4, 3), (64, 128, 8, 4, 4)],
}
ATTENTION_TILES = [
    (16, 64, 4, 3),
    (16, 128, 4, 2),
    (32, 64, 4, 3),
    (32, 64, 2, 3),
    (32, 128, 4, 2),
    (64, 64, 4, 3),
    (64, 128, 8, 2),
]
ATTENTION_PROGRAM_COUNTS = (132, 264)
# (positions, context)
ATTENTION_CASES = [
    (1, 1000),
    (1, 4000),
    (16, 1000),
    (64, 1000),
    (128, 1000),
    (16, 4000),
    (64, 4000),
]
CACHE_CAPACITY = 4352
POSITION_COUNTS = (1, 16, 64)
MAX_SPLITS = 32


def make_states(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def measure_microseconds(function: Callable[[], object], calls: int) -> float:
    """Return the microseconds of a call if `function` makes `calls` calls in a CUDA graph."""
    side_stream = torch.cuda.Stream()
    side_stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side_stream), torch.inference_mode():
        function()  # compiles
    torch.cuda.current_stream().wait_stream(side_stream)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        function()
    graph.replay()
    return 1000 * measure_milliseconds(graph.replay, 7) / calls


def print_row(name: str, values: Sequence[float], remark: str = "") -> None:
    print(f"{name:<42}{''.join(f'{value:>8.2f}' for value in values)}  {remark}", flush=True)


def print_matmuls(layers: int, bytes_per_second: float) -> None:
    """Print the times of the matmuls of a layer."""
    partial_out = torch.empty(MAX_SPLITS * 64 * 2 * MLP_SIZE, device="cuda")
    finished_counts = torch.zeros(4096, dtype=torch.int32, device="cuda")
    for name, (inputs, outputs) in MATMUL_SHAPES.items():
        weights = [make_states(outputs, inputs) * inputs**-0.5 for _ in range(layers)]
        states = {count: make_states(count, inputs) for count in POSITION_COUNTS}
        read_microseconds = 2e6 * inputs * outputs / bytes_per_second

        def run_cublas(count: int, states=states, weights=weights) -> None:
            for weight in weights:
                torch.mm(states[count], weight.t())

        times = [measure_microseconds(lambda n=n: run_cublas(n), layers) for n in POSITION_COUNTS]
        print_row(f"{name}, cuBLAS", times, f"{read_microseconds:.2f} to read the weights")
        for numbers in MATMUL_TILES[name]:
            tile = MatmulTile(*numbers)
            work = (tile, partial_out, finished_counts)

            def run_tile(count: int, states=states, weights=weights, work=work) -> None:
                for weight in weights:
                    matmul_few_rows(states[count], weight, *work)

            try:
                actual = matmul_few_rows(states[16], weights[0], *work)
                alone = matmul_few_rows(states[16][:1].contiguous(), weights[0], *work)
                times = [
                    measure_microseconds(lambda n=n: run_tile(n), layers) for n in POSITION_COUNTS
                ]
            except Exception as error:  # noqa: BLE001 a tile that does not compile
                print(f"{name}, {numbers}: {type(error).__name__}: {str(error)[:80]}")
                continue
            expected = states[16].double() @ weights[0].double().t()
            error = float((actual.double() - expected).norm() / expected.norm())
            same = torch.equal(alone, actual[:1])
            print_row(f"{name}, {numbers}", times, f"error {error:.0e}, same bits alone: {same}")


def print_row_kernels(layers: int) -> None:
    """Print the times of the kernels between the matmuls, by Triton and by PyTorch."""
    sizes = dict.fromkeys(range(layers), ((KEY_HEADS, HEAD_SIZE),) * 2)
    device = torch.device("cuda")
    cache = KVCache(sizes, 1, CACHE_CAPACITY, torch.bfloat16, device)
    norm = RMSNormWeights(make_states(HIDDEN_SIZE), 1e-6)
    qk_norm = RMSNormWeights(make_states(1, QUERY_HEADS + KEY_HEADS, HEAD_SIZE), 1e-6)
    activation = Activation(torch.nn.functional.silu, SILU_COEFFICIENTS)
    with cache.add_rows(1) as rows:
        rows.advance_lengths([1000])

    def run(module, operation: str, count: int) -> Callable[[], None]:
        views = cache.make_view(count).layer_views()
        states = make_states(count, HIDDEN_SIZE)
        gate_up = make_states(count, 2 * MLP_SIZE)
        heads = make_states(count, 1, QKV_HEADS, HEAD_SIZE)
        rotation = make_states(count, 1, HEAD_SIZE), make_states(count, 1, HEAD_SIZE)
        calls = {
            "add_rms_norm": lambda view: module.add_rms_norm(states, states, norm),
            "gated_activation": lambda view: module.gated_activation(gate_up, activation),
            "qk_norm_rope_write": lambda view: module.qk_norm_rope_write(
                heads, KEY_HEADS, qk_norm, rotation, view
            ),
        }

        def run_layers() -> None:
            for view in views:
                calls[operation](view)

        return run_layers

    for operation in ("add_rms_norm", "qk_norm_rope_write", "gated_activation"):
        for module in (triton_rows, reference):
            times = [
                measure_microseconds(run(module, operation, count), layers)
                for count in POSITION_COUNTS
            ]
            print_row(f"{operation}, {module.__name__.rsplit('.', 1)[-1]}", times)


def print_attention(layers: int) -> None:
    """Print the times of attention by tile and number of programs."""
    planes = make_states(2 * layers, 1, CACHE_CAPACITY, KEY_HEADS, HEAD_SIZE).transpose(2, 3)
    print(f"attention: columns are (positions, context) {ATTENTION_CASES}")
    for numbers in ATTENTION_TILES:
        tile = AttentionTile(*numbers)
        for programs in ATTENTION_PROGRAM_COUNTS:
            triton_attention.FEW_QUERIES_TILE = triton_attention.MANY_QUERIES_TILE = tile
            triton_attention.WANTED_TRITON_ATTENTION_PROGRAMS = programs
            times = []
            for count, context in ATTENTION_CASES:
                queries = make_states(count, QUERY_HEADS, HEAD_SIZE)
                lengths = torch.tensor([context], device="cuda")
                positions = lengths[:, None] + torch.arange(count, device="cuda")
                causal = torch.ones(1, count, count, dtype=torch.bool, device="cuda").tril()
                mask = build_tree_mask(lengths, positions, causal, CACHE_CAPACITY)

                def attend(queries=queries, mask=mask) -> None:
                    for layer in range(layers):
                        triton_attention.tree_attention(
                            queries, planes[2 * layer], planes[2 * layer + 1], mask, 0.09
                        )

                times.append(measure_microseconds(attend, layers))
            print_row(f"{numbers}, {programs} programs", times)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="two layers")
    args = parser.parse_args()
    device = require_cuda()
    layers = 2 if args.small or nullgpu is not None else 36
    bytes_per_second = statistics.median(measure_copy_bandwidth(device) for _ in range(3))
    print(f"{describe_device(device)}, torch {torch.__version__}, copies at ", end="")
    print(f"{bytes_per_second / 1e12:.2f} TB/s; microseconds for {POSITION_COUNTS} positions")
    print_row_kernels(layers)
    print_matmuls(layers, bytes_per_second)
    print_attention(layers)


if __name__ == "__main__":
    main()
