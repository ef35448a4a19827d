"""Compare decoding by this checkout, another one, transformers and llama.cpp, interleaved.

    python benchmarks/against.py [DRAFTER] --target FOLDER --suite QUESTIONS --gguf FILE --threads 2
    python benchmarks/against.py runs/embedded-dflash/checkpoints/best/drafter --other ../at-8ca1fa3

Every side (decoder) runs in a process of its own. They decode the same prompts in turns, so that a
noisy machine is equally noisy for all. Workloads (`--ways`):

- `plain`, `chain`, `ddtree N`: baseline decoding, and drafting with a chain or a DDTree of N nodes
- `text N`: a DDTree that also uses n-grams of the sequence itself
- `DFlash`: transformers' own DFlash assistant, with our drafter
- `rows N`: baseline decoding of N sequences at once after 16 tokens each, past their end tokens;
  the time to the first token is subtracted
- `prompt N`: prefill of N tokens; `rows` and `prompt` take `--repeats` turns
- `pass N`: one forward pass over N tokens after a prompt, with the argmax after each

Times are processor times of a process with one thread; with `--threads` wall-clock times, for a
quiet machine. The first table has medians over turns with 95 % bootstrap intervals: tokens per
second (of a pass milliseconds); the ratio to transformers (float32), llama.cpp and the other
checkout on the same workload, for drafting workloads to their baseline decoding; the ratio to the
side's own baseline (a pass: its cost in passes over one token); and whether all outputs equal our
baseline's (other weights or arithmetic give other outputs). The second table shows the time of
each stage of our rounds. Of the other checkout `load_target`, `load_drafter` and `generate` are
used. A side that is not installed is left out, and the reason is printed.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

CHECKOUT_FOLDER = Path(__file__).resolve().parents[1]
DEFAULT_WORKLOADS = (
    "plain",
    "chain",
    *(f"{tree} {budget}" for tree in ("ddtree", "text") for budget in (8, 16, 64)),
    "rows 1",
    "rows 64",
    "prompt 512",
    *(f"pass {tokens}" for tokens in (1, 9, 17, 33, 65)),
)
# Decoding method by kind of workload.
METHOD_BY_WORKLOAD_KIND = {"chain": "chain", "ddtree": "ddtree", "text": "ddtree"}
UNDRAFTED_WORKLOADS = {"plain", "rows", "prompt", "pass"}
SHOWN_STAGES = ("draft", "build", "verify", "commit")
# Of the last sequence of this worker: seconds by stage, and "rounds", the number of rounds.
LAST_STAGE_SECONDS: dict[str, float] = {}

Ids = list[list[int]]
# (workload, prompts, new tokens) -> the function that is timed, which returns the new ids
Prepare = Callable[[str, Ids, int], Callable[[], Ids]]


class Turn(NamedTuple):
    """Speed, time and output of one turn of a workload."""

    speed: float  # tokens per second; for a pass, passes per second
    seconds: float
    ids: Ids
    stages: dict[str, float]


def load_blockdraft(args: argparse.Namespace) -> Prepare:
    """Return `prepare` for the checkout that PYTHONPATH names."""
    from infer import generate, load_drafter, load_target

    target_options = {}
    if args.quantization and args.side == "ours":
        target_options["quantization"] = args.quantization
    target = load_target(args.target, device="cpu", dtype=args.dtype, **target_options)
    drafter = load_drafter(args.drafter, target.dtype) if args.drafter else None

    def prepare(workload: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = workload.partition(" ")
        if kind == "pass":
            return prepare_forward_pass(target, prompts[0], int(number))
        settings = {
            "method": METHOD_BY_WORKLOAD_KIND.get(kind, "plain"),
            "max_num_seqs": len(prompts),
            "max_new_tokens": count,
        }
        if kind in METHOD_BY_WORKLOAD_KIND:
            settings["budget"] = int(number) if number.isdigit() else number or 7
        if kind == "text":
            settings["ngrams"] = "text"
        if args.side == "ours":
            settings["clock"] = args.clock
        if kind in ("rows", "prompt"):
            settings |= {"positions": None, "ignore_eos": True}

        def decode() -> Ids:
            texts = generate(
                target, drafter if kind in METHOD_BY_WORKLOAD_KIND else None, prompts, **settings
            )
            LAST_STAGE_SECONDS.update(texts[0].stats.stage_seconds, rounds=texts[0].stats.rounds)
            return [text.ids for text in texts]

        return decode

    return prepare


def prepare_forward_pass(target, ids: list[int], count: int) -> Callable[[], Ids]:
    """Return a forward pass over the last `count` ids, as a chain of nodes, after the others."""
    from infer.engine.verification import argmax_tokens
    from infer.trees.tree import DraftTree

    cache = target.allocate_cache(1, len(ids))
    depths = torch.arange(count)[None]
    with cache.add_rows(1) as row:
        target.extend_cache([ids[:-count]], row, ())
    tree = DraftTree(
        torch.tensor([ids[-count:]]), (depths - 1).clamp(min=0), depths, depths.float(), count - 1
    )
    ancestors = tree.build_ancestor_mask()
    return lambda: argmax_tokens(
        target, target.verify(tree, ancestors, cache).last_hidden_states
    ).tolist()


def load_transformers(args: argparse.Namespace) -> Prepare:
    """Return `prepare` for transformers' `generate` and its DFlash assistant, in float32."""
    from assisted import build_assistant_options
    from transformers import DynamicCache

    from infer import load_drafter, load_target

    target = load_target(args.target, device="cpu", dtype="float32")
    model = target.model
    assistant_options = {}
    if args.drafter and "DFlash" in args.ways:
        assistant_options = build_assistant_options(target, load_drafter(args.drafter))
        if assistant_options is None:
            raise ImportError("it cannot run this drafter: leave `DFlash` out of --ways")

    def prepare(workload: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = workload.partition(" ")
        if kind == "pass":
            ids = torch.tensor(prompts)
            cache = DynamicCache(config=model.config)
            model(ids[:, : -int(number)], past_key_values=cache, logits_to_keep=1)
            return lambda: (
                model(ids[:, -int(number) :], past_key_values=cache).logits.argmax(-1).tolist()
            )
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.arange(width) >= torch.tensor([[width - len(prompt)] for prompt in prompts])
        settings = {
            "attention_mask": mask.long(),
            "do_sample": False,
            "pad_token_id": 0,
            "max_new_tokens": count,
        }
        if kind == "rows":  # an end token that the model cannot generate
            settings["eos_token_id"] = [model.config.vocab_size]
        if kind == "DFlash":
            settings |= assistant_options
        return lambda: model.generate(ids, **settings)[:, width:].tolist()

    return prepare


def load_llama_cpp(args: argparse.Namespace) -> Prepare:
    """Return `prepare` for llama.cpp, with the low-level interface of llama-cpp-python."""
    import llama_cpp as llama
    import numpy as np

    if not args.gguf:
        raise ImportError("no --gguf")
    silent = llama.llama_log_callback(lambda *message: None)
    llama.llama_log_set(silent, None)
    model = llama.llama_model_load_from_file(args.gguf.encode(), llama.llama_model_default_params())
    vocabulary = llama.llama_model_get_vocab(model)
    contexts = {}
    batch = llama.llama_batch_init(4096, 0, 1)
    vocabulary_shape = (llama.llama_vocab_n_tokens(vocabulary),)

    def context_of(rows: int) -> object:
        if rows not in contexts:
            settings = llama.llama_context_default_params()
            settings.n_seq_max = rows
            settings.n_ctx = max(1024, rows * (args.longest + args.new_tokens))
            settings.n_threads = settings.n_threads_batch = max(1, args.threads)
            contexts[rows] = silent, llama.llama_init_from_model(model, settings)
        context = contexts[rows][1]
        llama.llama_memory_clear(llama.llama_get_memory(context), True)
        return context

    def run(
        context: object, tokens: Sequence[tuple[int, int, int]], logit_indices: Sequence[int]
    ) -> list[int]:
        """Compute a batch of tokens (sequence, position, id).

        Return the most likely next ids after the tokens at `logit_indices`.
        """
        batch.n_tokens = len(tokens)
        for i, (row, position, token) in enumerate(tokens):
            batch.token[i] = token
            batch.pos[i] = position
            batch.n_seq_id[i] = 1
            batch.seq_id[i][0] = row
            batch.logits[i] = i in logit_indices
        if llama.llama_decode(context, batch):
            raise SystemExit("llama.cpp refused a batch")
        return [
            int(
                np.ctypeslib.as_array(
                    llama.llama_get_logits_ith(context, i), vocabulary_shape
                ).argmax()
            )
            for i in logit_indices
        ]

    def generate_batch(context: object, prompts: Ids, count: int, past_end: bool) -> Ids:
        """Return `count` greedy tokens of each prompt; a single one may end at its end token."""
        outputs = []
        for row, prompt in enumerate(prompts):
            tokens = [(row, position, token) for position, token in enumerate(prompt)]
            outputs.append(run(context, tokens, [len(prompt) - 1]))
        while len(outputs[0]) < count:
            if not past_end and llama.llama_vocab_is_eog(vocabulary, outputs[0][-1]):
                break
            last_tokens = [
                (row, len(prompts[row]) + len(output) - 1, output[-1])
                for row, output in enumerate(outputs)
            ]
            next_tokens = run(context, last_tokens, range(len(outputs)))
            for output, token in zip(outputs, next_tokens, strict=True):
                output.append(token)
        return outputs

    def prepare(workload: str, prompts: Ids, count: int) -> Callable[[], Ids]:
        kind, _, number = workload.partition(" ")
        context = context_of(len(prompts))
        if kind != "pass":
            return partial(generate_batch, context, prompts, count, kind == "rows")
        tokens = [(0, *pair) for pair in enumerate(prompts[0])]
        start = len(prompts[0]) - int(number)
        run(context, tokens[:start], [start - 1])
        return lambda: [run(context, tokens[start:], range(int(number)))]

    return prepare


DECODER_LOADERS = {
    "ours": load_blockdraft,
    "transformers": load_transformers,
    "llama.cpp": load_llama_cpp,
    "other": load_blockdraft,
}
SUPPORTED_WORKLOADS = {
    "ours": UNDRAFTED_WORKLOADS | {*METHOD_BY_WORKLOAD_KIND},
    "transformers": UNDRAFTED_WORKLOADS | {"DFlash"},
    "llama.cpp": UNDRAFTED_WORKLOADS,
}
SUPPORTED_WORKLOADS["other"] = {"plain", "chain", "ddtree"}


@torch.no_grad()
def run_worker(args: argparse.Namespace) -> None:
    """Run one side as a worker process.

    The first line that it prints is null, or a JSON string with the reason why the side cannot run.
    It then answers each line [workload, prompts, new tokens] of standard input with a line
    [seconds, output ids, seconds by stage].
    """
    torch.set_num_threads(max(1, args.threads))
    args.clock = clock = time.perf_counter if args.threads else time.thread_time
    try:
        prepare = DECODER_LOADERS[args.side](args)
    except ImportError as error:
        return print(json.dumps(str(error)), flush=True)
    print("null", flush=True)
    for line in sys.stdin:
        timed = prepare(*json.loads(line))
        began = clock()
        ids = timed()
        print(json.dumps([clock() - began, ids, LAST_STAGE_SECONDS]), flush=True)


def workload_kind(workload: str) -> str:
    """Return a workload's first word."""
    return workload.partition(" ")[0]


def start_worker(side: str, args: argparse.Namespace) -> subprocess.Popen:
    """Start the process of a side."""
    checkout = args.other if side == "other" else CHECKOUT_FOLDER
    count = str(max(1, args.threads))
    environment = os.environ | {"OMP_NUM_THREADS": count, "MKL_NUM_THREADS": count}
    environment["PYTHONPATH"] = os.pathsep.join([str(checkout), os.environ.get("PYTHONPATH", "")])
    command = [
        sys.executable,
        __file__,
        "--work",
        json.dumps(vars(args) | {"side": side}, default=str),
    ]
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def run_turn(worker: subprocess.Popen, workload: str, prompts: Ids, count: int) -> Turn:
    """Run a workload on a worker for `count` new tokens and return its time and output."""
    worker.stdin.write(json.dumps([workload, prompts, count]) + "\n")
    worker.stdin.flush()
    seconds, ids, stages = json.loads(worker.stdout.readline())
    work_done = {"prompt": len(prompts[0]), "pass": 1}.get(
        workload_kind(workload), sum(map(len, ids))
    )
    if workload_kind(workload) == "rows" and count > 1:
        seconds = seconds - run_turn(worker, workload, prompts, 1).seconds
        work_done = work_done - len(ids)
    return Turn(work_done / seconds, seconds, ids, stages)


def select_prompts(workload: str, turn: int, prompts: Ids, context: int) -> Ids:
    """Return the prompts of a turn: one, several at once, or one of a fixed length."""
    kind, _, number = workload.partition(" ")
    if kind == "rows":
        return [prompts[(turn + i) % len(prompts)][-16:] for i in range(int(number))]
    if kind not in ("prompt", "pass"):
        return [prompts[turn]]
    tokens = sum(prompts, [])
    length = int(number) + (context if kind == "pass" else 0)
    return [[tokens[(turn * length + i) % len(tokens)] for i in range(length)]]


def format_median(values: Sequence[float]) -> str:
    """Return the median of values, (turns,), with its 95 % bootstrap interval."""
    import numpy as np

    # Imported here because the other checkout may not have it.
    from infer.evaluation.metrics import bootstrap_interval

    values = np.asarray(values)
    median = np.median(values)
    limits = bootstrap_interval(lambda drawn: np.median(values[drawn], axis=1), len(values)) or ()
    digits = 1 if median >= 10 else 2
    text = f"{median:.{digits}f}"
    if limits:
        low, high = (f"{limit:.{digits}f}" for limit in limits)
        text += f" ({low} to {high})"
    return text


def format_ratio(turns: list[Turn], base: list[Turn] | None) -> str:
    """Return the median ratio of speeds, turn by turn; empty without a base or for itself."""
    ratio = ""
    if base and base is not turns:
        ratio = format_median([a.speed / b.speed for a, b in zip(turns, base, strict=False)])
    return f"{ratio:>24}"


def print_speeds(results: dict[tuple[str, str], list[Turn]]) -> None:
    """Print the speeds and ratios of all measured (side, workload)."""
    other_sides = [
        side for side in DECODER_LOADERS if side != "ours" and (side, "plain") in results
    ]
    headings = "".join(f"{f'to {name}':>24}" for name in (*other_sides, "own plain"))
    print(f"{'':<28}{'tokens/s, ms':>24}{headings}{'same':>6}")
    baseline_ids = [turn.ids for turn in results.get(("ours", "plain"), [])]
    for (side, workload), turns in results.items():
        kind = workload_kind(workload)
        is_decoding = kind in {"plain", "DFlash", *METHOD_BY_WORKLOAD_KIND}
        is_pass = kind == "pass"
        speeds = [1000 / turn.speed if is_pass else turn.speed for turn in turns]
        line = f"{f'{side}: {workload}':<28}{format_median(speeds):>24}"
        for name in other_sides:
            base = results[name, "plain"] if is_decoding else None
            line += format_ratio(turns, results.get((name, workload), base))
        own_base = results.get((side, "pass 1" if is_pass else "plain"))
        if is_pass and own_base:
            line += format_ratio(own_base, turns)
        else:
            line += format_ratio(turns, own_base)
        if is_decoding:
            same = "yes" if [turn.ids for turn in turns] == baseline_ids else "NO"
            line += f"{same:>6}"
        print(line)


def print_round_times(results: dict[tuple[str, str], list[Turn]]) -> None:
    """Print the milliseconds of each stage of our rounds."""
    stages = "".join(f"{name:>9}" for name in (*SHOWN_STAGES, "other"))
    print(f"\n{'milliseconds a round':<28}{'τ':>6}{stages}")
    for (side, workload), turns in results.items():
        if side != "ours" or workload_kind(workload) not in ("plain", *METHOD_BY_WORKLOAD_KIND):
            continue
        rounds = sum(turn.stages["rounds"] for turn in turns)
        milliseconds = [
            1000 / rounds * sum(turn.stages[stage] for turn in turns) for stage in SHOWN_STAGES
        ]
        decoding_seconds = sum(turn.seconds - turn.stages["prefill"] for turn in turns)
        other = 1000 / rounds * decoding_seconds - sum(milliseconds)
        tau = sum(len(turn.ids[0]) - 1 for turn in turns) / rounds
        cells = "".join(f"{each:>9.2f}" for each in (*milliseconds, other))
        print(f"{workload:<28}{tau:>6.2f}{cells}")


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        return run_worker(argparse.Namespace(**json.loads(sys.argv[2])))
    sys.path.insert(0, str(CHECKOUT_FOLDER))
    from inputs import add_prompt_options, add_target_options, load_cli_prompts

    from infer.targets.loading import load_tokenizer

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("drafter", nargs="?", help="without it, only workloads that do not draft")
    parser.add_argument("--other", type=Path, help="another checkout of this repository")
    parser.add_argument("--gguf", help="the target for llama.cpp")
    parser.add_argument("--threads", type=int, default=0, help="0: processor time of one thread")
    parser.add_argument(
        "--repeats", type=int, default=5, help="turns of the workloads rows and prompt"
    )
    parser.add_argument("--ways", nargs="+", default=DEFAULT_WORKLOADS)
    parser.add_argument("--sides", nargs="+", default=list(DECODER_LOADERS))
    parser.add_argument("--new-tokens", type=int, default=64)
    add_target_options(parser)
    add_prompt_options(parser)
    args = parser.parse_args()
    prompts = load_cli_prompts(args, load_tokenizer(args.target))
    args.longest = max(map(len, prompts))
    workers = {
        side: start_worker(side, args) for side in args.sides if side != "other" or args.other
    }
    for side, worker in [*workers.items()]:
        if reason := json.loads(worker.stdout.readline()):
            print(f"{side} is left out: {reason}")
            del workers[side]

    workloads = [
        workload
        for workload in args.ways
        if args.drafter or workload_kind(workload) in UNDRAFTED_WORKLOADS
    ]
    results: dict[tuple[str, str], list[Turn]] = {}
    for workload in workloads:
        for side in workers:
            if workload_kind(workload) in SUPPORTED_WORKLOADS[side]:
                results[side, workload] = []

    for number in range(-1, len(prompts)):  # turn -1 is a warm-up
        for (side, workload), turns in results.items():
            kind = workload_kind(workload)
            if number >= args.repeats and workload != "rows 1" and kind in ("rows", "prompt"):
                continue
            turn_prompts = select_prompts(workload, max(number, 0), prompts, args.prompt_tokens)
            new_tokens = 1 if kind == "prompt" else args.new_tokens
            turn = run_turn(workers[side], workload, turn_prompts, new_tokens)
            if number >= 0:
                turns.append(turn)
    threads = args.threads or "processor time of one"
    print(f"{len(prompts)} prompts, {args.new_tokens} new tokens, threads: {threads}")
    print_speeds(results)
    print_round_times(results)
    for worker in workers.values():
        worker.stdin.close()
        worker.wait()


if __name__ == "__main__":
    main()
