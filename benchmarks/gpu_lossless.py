"""Check losslessness on a GPU: the embedded target's outputs with and without drafts, with and
without CUDA graphs, alone and in a batch.

    python benchmarks/gpu_lossless.py                      # some minutes

Prints one line for every dtype, method, number of rows and value of `compile`: how many outputs
equal those of baseline decoding of one sequence at a time without CUDA graphs. In float32 all must.
In bfloat16 other batch shapes round differently, so that outputs differ from where two tokens are
nearly equally likely; at most half may differ. The drafter's n-grams are used only in rounds
without CUDA graphs, as they are looked up on the host. Fails if rounds with `compile=True` were not
replayed as CUDA graphs.
"""

import argparse

import torch
from gpu import exit_with_failures, nullgpu, record_failure, require_cuda

from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, SamplingOptions
from infer.evaluation.evaluate import describe_device

PROMPT_TEXTS = [
    "import os\n\n\nclass Reader:\n",
    "def main():\n",
    "for line in lines:\n",
    '"""Return',
    "x = [",
    "try:\n",
    "# ",
    "if ",
]
# (method, nodes of a tree, sampling options)
DECODING_CASES = [
    ("plain", 0, {}),
    ("chain", 7, {}),
    ("ddtree", 16, {}),
    ("ddtree", 64, {}),
    ("static", 14, {}),
    ("ddtree", 16, {"temperature": 1.0}),
    ("ddtree", 16, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}),
    ("ddtree", 16, {"repetition_penalty": 1.2}),
]


def generate_outputs(
    target,
    drafter,
    prompts,
    method: str,
    nodes: int,
    rows: int,
    compile: bool,
    tokens: int,
    **sampling,
) -> tuple[list[list[int]], bool]:
    """Return the output ids, and whether rounds were replayed as CUDA graphs.

    rows: sequences that are decoded together
    tokens: new tokens of each sequence
    """
    # The ids of a stand-in for a GPU are not tokens that n-grams could be looked up for.
    continuity = "none" if compile or nullgpu is not None else None
    options = EngineConfig(
        method, max(nodes, 1), max_num_seqs=rows, compile=compile, ngrams=continuity
    )
    engine = Engine(target, None if method == "plain" else drafter, options, 512)
    text_options = SamplingOptions(max_new_tokens=tokens, ignore_eos=True, seed=3, **sampling)
    texts = [engine.submit(prompt, text_options) for prompt in prompts]
    while engine.has_unfinished_sequences:
        engine.step()
    return [text.ids for text in texts], any(engine.runner.graphs.graphs.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    device = require_cuda()
    failures = []
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{describe_device(device)}: {len(PROMPT_TEXTS)} prompts, {args.tokens} tokens each")
    print(f"{'':<10}{'':<12}{'options':<42}{'rows':>5}{'compile':>9}{'same':>8}")
    for dtype in ("float32", "bfloat16"):
        target = load_target("embedded", device="cuda", dtype=dtype)
        drafter = load_drafter(args.drafter).to(target.device, target.dtype)
        prompts = [target.tokenizer.encode(prompt) for prompt in PROMPT_TEXTS]
        min_equal = len(prompts) if dtype == "float32" else len(prompts) / 2
        for method, nodes, sampling in DECODING_CASES:
            name = f"{method} {nodes}" if nodes else method
            sampling_text = " ".join(f"{key}={value}" for key, value in sampling.items())
            sampling_text = sampling_text or "greedy"
            expected, _ = generate_outputs(
                target, None, prompts, "plain", 0, 1, False, args.tokens, **sampling
            )
            for rows in (1, 8):
                for compile in (False, True):
                    outputs, replayed = generate_outputs(
                        target,
                        drafter,
                        prompts,
                        method,
                        nodes,
                        rows,
                        compile,
                        args.tokens,
                        **sampling,
                    )
                    record_failure(
                        replayed == compile,
                        f"{method} {nodes}, compile={compile}: replayed={replayed}",
                        failures,
                    )
                    equal = sum(a == b for a, b in zip(outputs, expected, strict=True))
                    print(
                        f"{dtype:<10}{name:<12}{sampling_text:<42}{rows:>5}{compile!s:>9}"
                        f"{equal:>5}/{len(prompts)}",
                        flush=True,
                    )
                    if nullgpu is None:
                        record_failure(
                            equal >= min_equal,
                            f"{dtype} {name} {sampling_text} {rows} rows compile={compile}: "
                            f"{equal} same",
                            failures,
                        )
    exit_with_failures(failures)


if __name__ == "__main__":
    main()
