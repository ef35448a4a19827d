"""Exports read by those they are for, in processes that know nothing of this project: llama.cpp's
code and program, and transformers.

`LLAMA_CPP=<folder>` names llama.cpp's sources, with build/bin/llama-speculative-simple where that
is built; their converter needs sentencepiece.
"""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.assisted import assisted
from infer import generate, load_drafter
from infer.drafters.dflash.model import DFlash
from infer.formats.export import export_drafter
from infer.formats.gguf import CONVERTER, FILE, convert
from infer.targets.loading import EMBEDDED

pytestmark = pytest.mark.robustness

# llama.cpp knows tokenizers by a list of names, in which the embedded one is not
RENAMED = """
import runpy, sys
sys.path[:0] = [{folder!r}, {folder!r} + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = {folder!r} + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
THEIRS = {  # tensors: llama.cpp's name, ours
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    **{f"blk.{{}}.ffn_{part}": f"layers.{{}}.mlp.{part}_proj" for part in ("gate", "up", "down")},
    **{f"blk.{{}}.attn_{part}": f"layers.{{}}.self_attn.{part}_proj" for part in "qkv"},
    **{f"blk.{{}}.attn_{part}_norm": f"layers.{{}}.self_attn.{part}_norm" for part in "qk"},
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
}
READ = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gguf import GGUFReader
found = GGUFReader(sys.argv[2])
fields = {name: field.contents() for name, field in found.fields.items() if not name.startswith("tokenizer.")}
bits = {"BF16": lambda data: (data.view("uint16").astype("uint32") << 16).view("float32")}
tensors = {one.name: abs(bits.get(one.tensor_type.name, lambda data: data)(one.data).astype("float64")).sum()
           for one in found.tensors}
print(json.dumps({"fields": fields, "sums": tensors}, default=str))
"""
GENERATE = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM
asked = json.loads(sys.argv[1])
assert not any(name == "infer" or name.startswith("infer.") for name in sys.modules)
target = AutoModelForCausalLM.from_pretrained(asked["target"], dtype=torch.float32)
drafter = AutoModel.from_pretrained(asked["drafter"], dtype=torch.float32)
passes = []
target.model.register_forward_hook(lambda *arguments: passes.append(1))
out = target.generate(torch.tensor([asked["ids"]]), max_new_tokens=40, do_sample=False, assistant_model=drafter,
                      speculation_type="dflash", eos_token_id=[10**6], pad_token_id=0)
print(json.dumps({"ids": out[0, len(asked["ids"]):].tolist(), "passes": len(passes), "class": type(drafter).__name__}))
"""


@pytest.fixture(scope="module")
def plain_drafter():
    """The drafter in the repository without its selector, which is a GPU kernel elsewhere."""
    drafter = load_drafter("embedded")
    for key in ("selector_rank", "selector_top_k"):
        drafter.config.dflash_config.pop(key)
    plain = DFlash(drafter.config)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval().requires_grad_(False)


def alone(script: str, *arguments: str) -> dict:
    """Run a script that does not see this project's folder; return what it printed."""
    command = [sys.executable, "-I", "-c", script, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_transformers_reads_its_native_folder_and_drafts_with_it(plain_drafter, embedded, tmp_path):
    prompt = embedded.tokenizer("import os\n\n\nclass Reader:\n")["input_ids"]
    expected = generate(
        embedded, None, prompt, method="plain", max_new_tokens=40, ignore_eos=True
    ).ids
    if assisted(embedded, plain_drafter) is None:
        pytest.skip("this transformers has no DFlash drafter of its own")
    export_drafter(plain_drafter, "transformers", embedded, tmp_path)
    asked = {"target": str(EMBEDDED.resolve()), "drafter": str(tmp_path), "ids": prompt}
    found = alone(GENERATE, json.dumps(asked))
    assert found["ids"] == expected and found["passes"] < 30, found


@pytest.fixture(scope="module")
def llama() -> Path:
    folder = Path(os.environ.get("LLAMA_CPP", "nowhere")).absolute()
    if not (folder / CONVERTER).is_file():
        pytest.skip(f"LLAMA_CPP names no folder with {CONVERTER}")
    return folder


@pytest.fixture(scope="module")
def converted(llama, plain_drafter, tmp_path_factory) -> Path:
    """A drafter's export with its GGUF file beside it, written by llama.cpp's converter."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / CONVERTER).write_text(RENAMED.format(folder=str(llama)))
    export_drafter(plain_drafter, "dflash", None, folder / "drafter")
    try:
        convert(folder / "drafter", "embedded", folder / CONVERTER)
    except ValueError as failed:
        if "sentencepiece" in str(failed) or "gguf" in str(failed):
            pytest.skip(f"the converter lacks a package: {failed}")
        raise
    return folder


def test_llama_cpps_reader_reads_the_gguf_file(llama, converted, plain_drafter):
    found = alone(READ, str(llama / "gguf-py"), str(converted / "drafter" / FILE))
    fields = found["fields"]
    sums = found["sums"]
    assert fields["general.architecture"] == "dflash" and fields["dflash.block_count"] == 2
    assert fields["dflash.block_size"] == 8 and fields["dflash.target_layers"] == [4, 20], fields
    ours = {
        name.removesuffix(".weight"): float(w.double().abs().sum())
        for name, w in plain_drafter.named_parameters()
    }
    for name, ending in THEIRS.items():
        for layer in ("0", "1") if "{}" in name else ("",):
            found = sums.pop(name.format(layer) + ".weight")
            assert math.isclose(found, ours.pop(ending.format(layer)), rel_tol=2e-3), (
                name
            )  # 16 bits
    assert not ours and not sums


def test_llama_cpps_program_drafts_with_the_gguf_file(llama, converted, embedded, tmp_path):
    program = llama / "build" / "bin" / "llama-speculative-simple"
    if not program.is_file():
        pytest.skip(f"{program.name} is not built")
    command = [
        sys.executable,
        str(converted / CONVERTER),
        str(EMBEDDED.resolve()),
        "--outtype",
        "f32",
    ]
    subprocess.run(
        [*command, "--outfile", str(tmp_path / "target.gguf")], check=True, capture_output=True
    )
    prompt = "import os\n\n\nclass Reader:\n"
    ids = embedded.tokenizer(prompt)["input_ids"]
    expected = generate(
        embedded, None, ids, method="plain", max_new_tokens=40, ignore_eos=True
    ).text
    (tmp_path / "prompt.txt").write_text(prompt + "\n")  # it takes one newline away
    command = [
        str(program),
        "-m",
        str(tmp_path / "target.gguf"),
        "-md",
        str(converted / "drafter" / FILE),
    ]
    command += [
        "--spec-type",
        "draft-dflash",
        "--spec-draft-n-max",
        "7",
        "-n",
        "60",
        "--temp",
        "0",
        "--ignore-eos",
    ]
    command += ["-c", "512", "-t", "1", "-lv", "5", "-f", str(tmp_path / "prompt.txt")]
    done = subprocess.run(
        command, capture_output=True, text=True, errors="replace", cwd="/", check=True
    )
    assert expected in done.stdout, done.stdout[-500:]
    assert "accepted 1/7 draft tokens" in done.stdout + done.stderr
