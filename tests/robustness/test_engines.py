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

from benchmarks.assisted import build_assistant_options
from infer import generate, load_drafter
from infer.drafters.dflash.model import DFlash
from infer.formats.export import export_drafter
from infer.formats.gguf import GGUF_CONVERTER_SCRIPT_NAME, GGUF_FILE_NAME, convert_to_gguf
from infer.targets.loading import EMBEDDED_TARGET_FOLDER

pytestmark = pytest.mark.robustness

# llama.cpp knows tokenizers by a list of names, in which the embedded one is not
TOKENIZER_FIX_SCRIPT = """
import runpy, sys
sys.path[:0] = [{folder!r}, {folder!r} + "/gguf-py"]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
sys.argv[0] = {folder!r} + "/convert_hf_to_gguf.py"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
GGUF_TENSOR_NAMES = {  # tensors: llama.cpp's name, ours
    "fc": "fc",
    "enc.output_norm": "hidden_norm",
    "output_norm": "norm",
    "blk.{}.attn_norm": "layers.{}.input_layernorm",
    "blk.{}.ffn_norm": "layers.{}.post_attention_layernorm",
    **{
        f"blk.{{}}.ffn_{projection}": f"layers.{{}}.mlp.{projection}_proj"
        for projection in ("gate", "up", "down")
    },
    **{
        f"blk.{{}}.attn_{projection}": f"layers.{{}}.self_attn.{projection}_proj"
        for projection in "qkv"
    },
    **{
        f"blk.{{}}.attn_{projection}_norm": f"layers.{{}}.self_attn.{projection}_norm"
        for projection in "qk"
    },
    "blk.{}.attn_output": "layers.{}.self_attn.o_proj",
}
GGUF_READER_SCRIPT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from gguf import GGUFReader
reader = GGUFReader(sys.argv[2])
fields = {name: field.contents() for name, field in reader.fields.items()
          if not name.startswith("tokenizer.")}
bits = {"BF16": lambda data: (data.view("uint16").astype("uint32") << 16).view("float32")}
sums = {}
for tensor in reader.tensors:
    to_float = bits.get(tensor.tensor_type.name, lambda data: data)
    sums[tensor.name] = abs(to_float(tensor.data).astype("float64")).sum()
print(json.dumps({"fields": fields, "sums": sums}, default=str))
"""
TRANSFORMERS_SCRIPT = """
import json, sys
import torch
from transformers import AutoModel, AutoModelForCausalLM
job = json.loads(sys.argv[1])
assert not any(name == "infer" or name.startswith("infer.") for name in sys.modules)
target = AutoModelForCausalLM.from_pretrained(job["target"], dtype=torch.float32)
drafter = AutoModel.from_pretrained(job["drafter"], dtype=torch.float32)
passes = []
target.model.register_forward_hook(lambda *arguments: passes.append(1))
output = target.generate(torch.tensor([job["ids"]]), max_new_tokens=40, do_sample=False,
                         assistant_model=drafter, speculation_type="dflash",
                         eos_token_id=[10**6], pad_token_id=0)
ids = output[0, len(job["ids"]):].tolist()
print(json.dumps({"ids": ids, "passes": len(passes), "class": type(drafter).__name__}))
"""


@pytest.fixture(scope="module")
def drafter_without_selector():
    """The drafter in the repository without its selector, which is a GPU kernel elsewhere."""
    drafter = load_drafter("embedded")
    for key in ("selector_rank", "selector_top_k"):
        drafter.config.dflash_config.pop(key)
    plain = DFlash(drafter.config)
    plain.load_state_dict(drafter.state_dict(), strict=False)
    return plain.eval().requires_grad_(False)


def run_isolated(script: str, *arguments: str) -> dict:
    """Run a script that does not see this project's folder; return what it printed."""
    command = [sys.executable, "-I", "-c", script, *arguments]
    process = subprocess.run(command, capture_output=True, text=True, cwd="/", check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    return json.loads(process.stdout.splitlines()[-1])


def test_transformers_reads_its_native_folder_and_drafts_with_it(
    drafter_without_selector, embedded, tmp_path
):
    prompt = embedded.tokenizer("import os\n\n\nclass Reader:\n")["input_ids"]
    expected = generate(
        embedded, None, prompt, method="plain", max_new_tokens=40, ignore_eos=True
    ).ids
    if build_assistant_options(embedded, drafter_without_selector) is None:
        pytest.skip("this transformers has no DFlash drafter of its own")
    export_drafter(drafter_without_selector, "transformers", embedded, tmp_path)
    job = {"target": str(EMBEDDED_TARGET_FOLDER.resolve()), "drafter": str(tmp_path), "ids": prompt}
    result = run_isolated(TRANSFORMERS_SCRIPT, json.dumps(job))
    assert result["ids"] == expected and result["passes"] < 30, result


@pytest.fixture(scope="module")
def llama_cpp_folder() -> Path:
    folder = Path(os.environ.get("LLAMA_CPP", "nowhere")).absolute()
    if not (folder / GGUF_CONVERTER_SCRIPT_NAME).is_file():
        pytest.skip(f"LLAMA_CPP names no folder with {GGUF_CONVERTER_SCRIPT_NAME}")
    return folder


@pytest.fixture(scope="module")
def converted_folder(llama_cpp_folder, drafter_without_selector, tmp_path_factory) -> Path:
    """A drafter's export with its GGUF file beside it, written by llama.cpp's converter."""
    folder = tmp_path_factory.mktemp("gguf")
    (folder / GGUF_CONVERTER_SCRIPT_NAME).write_text(
        TOKENIZER_FIX_SCRIPT.format(folder=str(llama_cpp_folder))
    )
    export_drafter(drafter_without_selector, "dflash", None, folder / "drafter")
    try:
        convert_to_gguf(folder / "drafter", "embedded", folder / GGUF_CONVERTER_SCRIPT_NAME)
    except ValueError as failed:
        if "sentencepiece" in str(failed) or "gguf" in str(failed):
            pytest.skip(f"the converter lacks a package: {failed}")
        raise
    return folder


def test_llama_cpps_reader_reads_the_gguf_file(
    llama_cpp_folder, converted_folder, drafter_without_selector
):
    result = run_isolated(
        GGUF_READER_SCRIPT,
        str(llama_cpp_folder / "gguf-py"),
        str(converted_folder / "drafter" / GGUF_FILE_NAME),
    )
    fields = result["fields"]
    sums = result["sums"]
    assert fields["general.architecture"] == "dflash" and fields["dflash.block_count"] == 2
    assert fields["dflash.block_size"] == 8 and fields["dflash.target_layers"] == [4, 20], fields
    our_sums = {
        name.removesuffix(".weight"): float(weight.double().abs().sum())
        for name, weight in drafter_without_selector.named_parameters()
    }
    for name, ending in GGUF_TENSOR_NAMES.items():
        for layer in ("0", "1") if "{}" in name else ("",):
            result = sums.pop(name.format(layer) + ".weight")
            assert math.isclose(result, our_sums.pop(ending.format(layer)), rel_tol=2e-3), (
                name
            )  # 16 bits
    assert not our_sums and not sums


def test_llama_cpps_program_drafts_with_the_gguf_file(
    llama_cpp_folder, converted_folder, embedded, tmp_path
):
    program = llama_cpp_folder / "build" / "bin" / "llama-speculative-simple"
    if not program.is_file():
        pytest.skip(f"{program.name} is not built")
    command = [
        sys.executable,
        str(converted_folder / GGUF_CONVERTER_SCRIPT_NAME),
        str(EMBEDDED_TARGET_FOLDER.resolve()),
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
        str(converted_folder / "drafter" / GGUF_FILE_NAME),
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
    process = subprocess.run(
        command, capture_output=True, text=True, errors="replace", cwd="/", check=True
    )
    assert expected in process.stdout, process.stdout[-500:]
    assert "accepted 1/7 draft tokens" in process.stdout + process.stderr
