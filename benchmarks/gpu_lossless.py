"""Losslessness on a GPU: the embedded target's texts, drafted and plain, captured and launched,
alone and side by side.

    python benchmarks/gpu_lossless.py                      # some minutes

One line for every precision, method, number of rows and way of launching: texts that are those of
plain decoding, one text at a time, launched. In float32 all must be. In bfloat16 other batch shapes
round differently, so that texts part where two tokens are equally good: they are counted, and less
than half may. The drafter's n-grams are asked in rounds that are launched alone: rounds that look
them up on the host are no graphs. Fails where captured rounds were none.
"""

import argparse

import torch
from gpu import check, finish, need_cuda, nullgpu

from infer import Engine, load_drafter, load_target
from infer.config import EngineConfig, TextOptions
from infer.evaluation.evaluate import describe_device

PROMPTS = [
    "import os\n\n\nclass Reader:\n",
    "def main():\n",
    "for line in lines:\n",
    '"""Return',
    "x = [",
    "try:\n",
]
PROMPTS += ["# ", "if "]
WAYS = [
    ("plain", 0, {}),
    ("chain", 7, {}),
    ("ddtree", 16, {}),
    ("ddtree", 64, {}),
    ("static", 14, {}),
    ("ddtree", 16, {"temperature": 1.0}),
    ("ddtree", 16, {"temperature": 0.8, "top_p": 0.9, "top_k": 40}),
    ("ddtree", 16, {"repetition_penalty": 1.2}),
]


def write(
    target, drafter, prompts, method: str, nodes: int, rows: int, compile: bool, tokens: int, **text
) -> tuple[list[list[int]], bool]:
    """Return the texts, and whether rounds were replayed as graphs."""
    known = (
        "none" if compile or nullgpu is not None else None
    )  # a stand-in's numbers are no tokens to look up
    options = EngineConfig(method, max(nodes, 1), max_num_seqs=rows, compile=compile, ngrams=known)
    engine = Engine(target, None if method == "plain" else drafter, options, 512)
    texts = [
        engine.submit(p, TextOptions(max_new_tokens=tokens, ignore_eos=True, seed=3, **text))
        for p in prompts
    ]
    while engine.busy:
        engine.step()
    return [text.ids for text in texts], any(engine.runner.graphs.graphs.values())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--drafter", default="embedded")
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    device = need_cuda()
    faults = []
    torch.backends.cuda.matmul.allow_tf32 = False
    print(f"{describe_device(device)}: {len(PROMPTS)} prompts, {args.tokens} tokens each")
    print(f"{'':<10}{'':<12}{'options':<42}{'rows':>5}{'compile':>9}{'same':>8}")
    for dtype in ("float32", "bfloat16"):
        target = load_target("embedded", device="cuda", dtype=dtype)
        drafter = load_drafter(args.drafter).to(target.device, target.dtype)
        prompts = [target.tokenizer.encode(prompt) for prompt in PROMPTS]
        for method, nodes, text in WAYS:
            expected, _ = write(target, None, prompts, "plain", 0, 1, False, args.tokens, **text)
            for rows in (1, 8):
                for compile in (False, True):
                    found, replayed = write(
                        target, drafter, prompts, method, nodes, rows, compile, args.tokens, **text
                    )
                    way = f"{method} {nodes}, compile={compile}"
                    check(replayed == compile, f"{way}: replayed={replayed}", faults)
                    same = sum(ours == theirs for ours, theirs in zip(found, expected, strict=True))
                    name = f"{method} {nodes}" if nodes else method
                    said = " ".join(f"{key}={value}" for key, value in text.items()) or "greedy"
                    print(f"{dtype:<10}{name:<12}{said:<42}{rows:>5}{compile!s:>9}", end="")
                    print(f"{same:>5}/{len(prompts)}", flush=True)
                    least = len(prompts) if dtype == "float32" else len(prompts) / 2
                    if nullgpu is None:
                        check(
                            same >= least,
                            f"{dtype} {name} {said} {rows} rows compile={compile}: {same} same",
                            faults,
                        )
    finish(faults)


if __name__ == "__main__":
    main()
