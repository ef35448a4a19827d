"""Drafters written for other engines: read back bit for bit, as the engines want them, and refused
where they would be read in another way; and the check of which engine would load a folder."""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from infer import load_drafter, load_target, save_drafter
from infer.cli.check import CheckCommand, run as run_check
from infer.cli.export import ExportCommand, run as run_export
from infer.config import DrafterConfig, HeadConfig, TargetConfig
from infer.drafters.build import create_drafter
from infer.drafters.dflash.model import DFlash
from infer.formats.compatibility import EngineVerdict, check_engines, format_engine_verdicts
from infer.formats.export import export_drafter
from infer.targets.loading import EMBEDDED_TARGET_FOLDER
from infer.utils.hydra_app import run_command

(
    VLLM_INDEX,
    SGLANG_INDEX,
    SPECULATORS_INDEX,
    AUTHORS_INDEX,
    TRANSFORMERS_INDEX,
    ANGELSLIM_INDEX,
    BLOCKDRAFT_INDEX,
) = range(7)


def draft_marginals(target, drafter) -> torch.Tensor:
    """Return the marginals (L, V) of a block after twelve tokens."""
    ids = torch.arange(12)[None] * 5
    features = target.compute_packed_features(
        ids, torch.arange(12)[None], torch.zeros_like(ids), drafter.layer_ids
    ).layer_features
    state = drafter.allocate_state(1, 40)
    with state.add(1) as row:
        drafter.update_context(target, features.to(drafter.norm.weight), ids, [12], row)
    return drafter.draft_block(target, torch.tensor([7]), state).marginals[0]


def list_loading(path, **options) -> list[bool]:
    """Return for each engine, in the order of the indices above, whether it would load a folder."""
    return [not verdict.problems for verdict in check_engines(path, **options)]


def make_sliding(drafter):
    """The same weights, with a first layer that slides over 6 positions."""

    config = drafter.config
    config.layer_types = ["sliding_attention", "full_attention"]
    config.use_sliding_window = True
    config.sliding_window = 6
    config.max_window_layers = 2
    again = DFlash(config)
    again.load_state_dict(drafter.state_dict())
    return again


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sliding", [False, True])
def test_what_is_exported_is_read_back_bit_for_bit(make_tiny, tmp_path, dtype, sliding):
    target, drafter = make_tiny(dtype)
    if sliding:
        drafter = make_sliding(drafter).to(dtype)
    expected = draft_marginals(target, drafter)
    export_drafter(drafter, "dflash", None, tmp_path / "dflash")
    assert torch.equal(draft_marginals(target, load_drafter(tmp_path / "dflash")), expected)
    assert list_loading(tmp_path / "dflash") == [True, True, False, True, False, False, True]
    export_drafter(drafter, "speculators", target, tmp_path / "speculators")
    again = load_drafter(tmp_path / "speculators")
    assert torch.equal(draft_marginals(target, again), expected)
    assert torch.equal(again.embed_tokens.weight, target.embedding.weight)
    # of sliding layers beside full ones, vLLM makes all causal
    assert list_loading(tmp_path / "speculators") == [
        False,
        False,
        not sliding,
        False,
        False,
        False,
        True,
    ]
    with pytest.raises(ValueError, match="set target.path"):
        export_drafter(again, "dflash", None, tmp_path / "back")
    export_drafter(again, "dflash", target, tmp_path / "back")  # and back, without the copies
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "dflash" / name).read_bytes()


def test_a_target_that_scales_its_embeddings(repo, tmp_path):
    """Gemma's: what is stored is what enters the first layer; and its two ends alone scale as
    well."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 6,
        "head_dim": 8,
        "vocab_size": 512,
    }
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0)
    )
    model.save_pretrained(tmp_path / "gemma")
    for file in (repo / "data" / "embedded").glob("*token*.json"):
        shutil.copy(file, tmp_path / "gemma")
    target = load_target(str(tmp_path / "gemma"), "float32", "cpu")
    ends = load_target(str(tmp_path / "gemma"), "float32", "cpu", only_layers=())
    ids = torch.arange(9)
    assert torch.equal(ends.embed(ids), target.embed(ids))
    assert not torch.allclose(target.embed(ids[1:]), target.embedding.weight[1:9])
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4, mask_token_id=1), target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    export_drafter(drafter, "speculators", ends, tmp_path / "out")
    again = load_drafter(tmp_path / "out")
    expected = draft_marginals(target, drafter)
    assert torch.allclose(
        draft_marginals(target, again), expected, atol=1e-5
    )  # a head of its own, another order of sums
    export_drafter(again, "dflash", ends, tmp_path / "back")
    assert torch.allclose(
        draft_marginals(target, load_drafter(tmp_path / "back")), expected, atol=1e-5
    )


def test_a_drafter_of_a_draft_vocabulary_goes_out_with_its_part_or_as_a_whole(make_tiny, tmp_path):
    """speculators' layout stores the rows of the target's head; readers of the others take them
    all."""
    target, drafter = make_tiny(draft_vocab_size=30)
    drafter.d2t.copy_(torch.arange(30) * 2)
    expected = draft_marginals(target, drafter)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "ours")
    assert torch.equal(draft_marginals(target, load_drafter(tmp_path / "ours")), expected)
    assert list_loading(tmp_path / "ours") == [False, False, False, False, False, False, True]
    export_drafter(load_drafter(tmp_path / "ours"), "speculators", target, tmp_path / "out")
    assert list_loading(tmp_path / "out") == [False, False, True, False, False, False, True]
    again = load_drafter(tmp_path / "out")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(draft_marginals(target, again), expected)
    assert torch.equal(stored["lm_head.weight"], target.head_weight[stored["t2d"]])
    assert stored["t2d"].sum() == 30
    assert (
        stored["t2d"].nonzero()[:, 0].tolist()
        == [*range(0, 90, 3)]
        == again.vocabulary.tokens.tolist()
    )
    for format in ("dflash", "transformers", "gguf"):
        export_drafter(again, format, target, tmp_path / format)
        exported_drafter = load_drafter(tmp_path / format)
        restricted = draft_marginals(target, exported_drafter)[..., again.vocabulary.tokens]
        assert exported_drafter.d2t is None
        assert torch.allclose(restricted.log_softmax(-1), expected.log_softmax(-1), atol=1e-5)
    _, headed = make_tiny(draft_vocab_size=30, head=HeadConfig("markov", rank=8))
    with pytest.raises(ValueError, match="conditional head has a reduced vocabulary"):
        export_drafter(headed, "dspark", target, tmp_path / "no")


def test_what_a_layout_cannot_express_is_refused(make_tiny, tmp_path):
    target, drafter = make_tiny()
    with pytest.raises(ValueError, match="set target.path"):
        export_drafter(drafter, "speculators", None, tmp_path / "no")
    original_keys = dict(drafter.config.dflash_config)
    for format, changes, word in (
        ("speculators", {"causal": True}, r"dflash_config\.causal"),
        ("transformers", {"causal": True}, "causal inside the block"),
        ("transformers", {"target_layer_ids": [1, 5], "last_tap": "raw"}, "last_tap is raw"),
        ("transformers", {"sample_from_anchor": True}, "sample_from_anchor"),
        ("dflash", {"sample_from_anchor": True}, "sample_from_anchor"),
    ):
        drafter.config.dflash_config = original_keys | changes
        with pytest.raises(ValueError, match=word):
            export_drafter(DFlash(drafter.config), format, target, tmp_path / "no")
    assert not (tmp_path / "no").exists()
    drafter.config.dflash_config = original_keys | {"causal": True}
    export_drafter(
        DFlash(drafter.config), "dflash", None, tmp_path / "causal"
    )  # vLLM has a key for it, SGLang has not
    verdicts = check_engines(tmp_path / "causal")
    assert verdicts[VLLM_INDEX].problems == verdicts[AUTHORS_INDEX].problems == []
    assert (
        "causal is True: SGLang (DFLASH) reads only layer_types"
        in verdicts[SGLANG_INDEX].problems[0]
    )


@pytest.fixture
def exported(make_tiny, tmp_path):
    """Folders of one drafter in both layouts, and a function that changes one of them: config keys
    (None: without it; with dots into objects) and tensors."""
    target, drafter = make_tiny()
    export_drafter(drafter, "dflash", None, tmp_path / "dflash")
    export_drafter(drafter, "speculators", target, tmp_path / "speculators")
    originals = {}

    def change(layout: str, keys: dict | None = None, tensors: dict | None = None):
        folder = tmp_path / layout
        if layout not in originals:
            originals[layout] = (
                (folder / "config.json").read_text(),
                load_file(folder / "model.safetensors"),
            )
        config = json.loads(originals[layout][0])
        weights = dict(originals[layout][1])
        for key, value in (keys or {}).items():
            *path, last = key.split(".")
            section = config
            for name in path:
                section = section[name]
            section[last] = value
            if value is None:
                del section[last]
        for name, tensor in (tensors or {}).items():
            weights[name] = tensor
            if tensor is None:
                del weights[name]
        (folder / "config.json").write_text(json.dumps(config))
        save_file(weights, folder / "model.safetensors")
        return [" | ".join(verdict.problems) for verdict in check_engines(folder)]

    return change


def test_check_names_every_key_at_fault(exported):
    assert exported("dflash")[:2] == ["", ""]
    problems = exported("dflash", {"num_target_layers": None})
    assert (
        "num_target_layers is missing" in problems[SGLANG_INDEX]
        and "num_target_layers" not in problems[VLLM_INDEX]
    )
    problems = exported("dflash", {"dflash_config.mask_token_id": None, "hidden_act": "gelu"})
    for word in ("mask_token_id is missing", "hidden_act is 'gelu'"):
        assert all(
            word in problems[engine] for engine in (VLLM_INDEX, SGLANG_INDEX, BLOCKDRAFT_INDEX)
        ), problems
    problems = exported("dflash", {"dflash_config.block_size": None, "block_size": None})
    assert "block_size is missing" in problems[SGLANG_INDEX]
    problems = exported("dflash", {"dflash_config.block_size": None})
    assert problems[VLLM_INDEX] == problems[SGLANG_INDEX] == problems[BLOCKDRAFT_INDEX] == ""
    problems = exported("dflash", {"architectures": ["DFlashDraftModel", "Other"]})
    assert all(
        "expected exactly ['DFlashDraftModel']" in problems[engine]
        for engine in (VLLM_INDEX, SGLANG_INDEX)
    )
    problems = exported("dflash", {"model_type": "llama"})
    assert "model_type is 'llama'" in problems[VLLM_INDEX] and problems[BLOCKDRAFT_INDEX] == ""
    problems = exported(
        "dflash", {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 64}
    )
    assert (
        "use_sliding_window is not true" in problems[VLLM_INDEX]
        and "use_sliding_window" in problems[SGLANG_INDEX]
    )
    assert problems[BLOCKDRAFT_INDEX] == ""
    problems = exported("dflash", {"dflash_config.target_layer_ids": [1, 6]})
    assert all(
        "[1, 6], expected layers from 0 to 5" in problems[engine]
        for engine in (VLLM_INDEX, SGLANG_INDEX, BLOCKDRAFT_INDEX)
    )
    problems = exported("dflash", {"architectures": ["DFlash2DraftModel"]})
    assert all(
        "selector_rank is missing" in problems[engine]
        for engine in (VLLM_INDEX, SGLANG_INDEX, AUTHORS_INDEX, BLOCKDRAFT_INDEX)
    )


def test_check_names_every_tensor_at_fault(exported):
    problems = exported(
        "dflash",
        tensors={"norm.weight": None, "fc.weight": torch.zeros(2, 2), "extra": torch.zeros(1)},
    )
    for word in (
        "missing tensors: norm.weight",
        "fc.weight [2, 2], expected [32, 64]",
        "unknown tensors: extra",
    ):
        assert all(
            word in problems[engine] for engine in (VLLM_INDEX, SGLANG_INDEX, BLOCKDRAFT_INDEX)
        ), (word, problems)
    problems = exported("dflash", tensors={"lm_head.weight": torch.zeros(97, 32)})
    assert (
        "ignores lm_head.weight" in problems[SGLANG_INDEX]
        and problems[VLLM_INDEX] == problems[BLOCKDRAFT_INDEX] == ""
    )
    problems = exported("dflash", tensors={"d2t": torch.zeros(97, dtype=torch.int64)})
    assert "draft_vocab_size" in problems[VLLM_INDEX] and problems[BLOCKDRAFT_INDEX] == ""
    problems = exported("dflash", {"draft_vocab_size": 40})
    assert (
        "lm_head.weight is missing" in problems[VLLM_INDEX]
        and "missing tensors: d2t" in problems[VLLM_INDEX]
    )
    assert "missing" not in problems[SGLANG_INDEX]
    weights = {f"model.{name}": torch.zeros(1) for name in ("fc.weight", "norm.weight")}
    assert (
        "unknown tensors: model.fc.weight, model.norm.weight"
        in exported("dflash", tensors=weights)[VLLM_INDEX]
    )


def test_check_of_the_speculators_layout(exported):
    assert [exported("speculators")[i] for i in (SPECULATORS_INDEX, BLOCKDRAFT_INDEX)] == ["", ""]
    without = {
        "embed_tokens.weight": None,
        "lm_head.weight": None,
    }  # newer ones leave the target's own away
    assert [
        exported("speculators", tensors=without)[i] for i in (SPECULATORS_INDEX, BLOCKDRAFT_INDEX)
    ] == ["", ""]
    problems = exported("speculators", {"speculators_config": None})
    assert (
        "speculators_config is missing" in problems[SPECULATORS_INDEX]
        and problems[BLOCKDRAFT_INDEX] == ""
    )
    problems = exported("speculators", {"speculators_config.verifier": {}})
    assert (
        "verifier.name_or_path" in problems[SPECULATORS_INDEX] and problems[BLOCKDRAFT_INDEX] == ""
    )
    problems = exported("speculators", {"aux_hidden_state_layer_ids": [0, 3]})
    assert "[0, 3], expected layers from 1" in problems[SPECULATORS_INDEX]
    problems = exported("speculators", {"draft_vocab_size": 40})
    for word in ("missing tensors: d2t", "lm_head.weight [97, 32], expected [40, 32]"):
        assert word in problems[SPECULATORS_INDEX] and word in problems[BLOCKDRAFT_INDEX]
    problems = exported("speculators", {"transformer_layer_config.hidden_size": None})
    assert "config.json: hidden_size is missing" in problems[SPECULATORS_INDEX]
    problems = exported("speculators", {"sample_from_anchor": True})
    assert (
        "sample_from_anchor is true" in problems[SPECULATORS_INDEX]
        and problems[BLOCKDRAFT_INDEX] == ""
    )


def test_check_reads_no_tensor_and_ends_with_1_where_no_engine_would_load_it(
    exported, tmp_path, monkeypatch, capsys
):
    exported("dflash", {"rope_theta": 5e5})
    monkeypatch.setattr(
        "infer.formats.folders.DrafterFolder.load", lambda *names: pytest.fail("tensors were read")
    )
    run_check(CheckCommand(str(tmp_path / "dflash")))  # ends as usual
    assert (
        "vLLM (method dflash): would load it\nSGLang (DFLASH): would load it\n"
        in capsys.readouterr().out
    )
    (tmp_path / "dflash" / "config.json").unlink()
    with pytest.raises(SystemExit) as end:
        run_check(CheckCommand(str(tmp_path / "dflash")))
    assert end.value.code == 1
    out = capsys.readouterr().out
    assert out.count("would not") == out.count("config.json is missing") == 7
    with pytest.raises(FileNotFoundError, match="is neither a folder nor an id"):
        run_check(CheckCommand(str(tmp_path / "gone")))


@pytest.fixture
def checkpoint(embedded, tmp_path):
    """A drafter for the embedded target."""
    drafter = create_drafter(DrafterConfig(layers=1), embedded).bfloat16()
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "run" / "drafter")
    return str(tmp_path / "run")


def test_a_base_model_is_one_of_the_drafters_sizes(
    repo, checkpoint, make_tiny, tmp_path, monkeypatch
):
    """The card presents figures of the target as those of `base_model`."""
    from transformers import AutoConfig, Qwen3Config

    from infer.formats.export import check_base_model_sizes

    embedded = load_drafter(checkpoint)
    tiny = make_tiny()[1]
    assert "was not checked" in check_base_model_sizes("Qwen/Qwen3-4B", tiny)
    published = Qwen3Config(hidden_size=2560, num_hidden_layers=36)
    monkeypatch.setattr("infer.formats.export.load_config", lambda name: published)
    with pytest.raises(
        ValueError, match="hidden_size 2560, expected 32; layers 36, expected 6; vocab_size 151936"
    ):
        run_export(
            ExportCommand(
                export_tiny(tiny, tmp_path), out=str(tmp_path / "no"), base_model="Qwen/Qwen3-4B"
            )
        )
    assert not (tmp_path / "no").exists()
    monkeypatch.setattr(
        "infer.formats.export.load_config",
        lambda name: AutoConfig.from_pretrained(EMBEDDED_TARGET_FOLDER),
    )
    assert check_base_model_sizes("they/theirs", embedded) is None


def export_tiny(drafter, folder) -> str:
    """Write a drafter's folder; return its path."""
    export_drafter(drafter, "dflash", None, folder / "tiny")
    return str(folder / "tiny")


def test_speculators_flag_says_of_all_layers_what_vllm_makes_of_it(make_tiny, tmp_path):
    """vLLM takes `not sliding_window_non_causal` for every layer."""
    target, drafter = make_tiny()
    export_drafter(drafter, "speculators", target, tmp_path / "full")
    raw = json.loads((tmp_path / "full" / "config.json").read_text())
    assert raw["sliding_window_non_causal"] is True
    raw["sliding_window_non_causal"] = False
    (tmp_path / "full" / "config.json").write_text(json.dumps(raw))
    problems = check_engines(tmp_path / "full")[SPECULATORS_INDEX].problems
    assert len(problems) == 1 and "would run every layer with causal True" in problems[0]
    export_drafter(
        make_sliding(drafter), "speculators", target, tmp_path / "mixed"
    )  # no value is right there
    assert "causal" in check_engines(tmp_path / "mixed")[SPECULATORS_INDEX].problems[0]


def test_export_and_check_as_commands(repo, checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("infer.formats.export.check_base_model_sizes", lambda name, drafter: None)
    run_export(ExportCommand(checkpoint, "dflash", str(tmp_path / "dflash")))  # as it is stored
    assert (
        load_file(tmp_path / "dflash" / "model.safetensors")["norm.weight"].dtype == torch.bfloat16
    )
    printed = capsys.readouterr().out.splitlines()
    assert (
        printed[0].startswith("export ")
        and printed[1].startswith("loads in ")
        and "SGLang" in printed[1]
    )
    assert (
        printed[2].startswith("others ")
        and "transformers" in printed[2]
        and "would not" not in "".join(printed)
    )
    assert printed[3].startswith("acceptance.json is not written") and len(printed) == 4
    out = tmp_path / "out"
    run_export(ExportCommand(checkpoint, "speculators", str(out)))
    assert {tensor.dtype for tensor in load_file(out / "model.safetensors").values()} == {
        torch.bfloat16
    }
    named = ExportCommand(
        checkpoint, "speculators", str(tmp_path / "named"), base_model="they/theirs"
    )
    run_export(named)
    raw = (tmp_path / "named" / "config.json").read_text()
    with safe_open(
        tmp_path / "named" / "model.safetensors", "pt"
    ) as written:  # what a later flip is problems by
        assert {"sha256", "config_sha256"} <= written.metadata().keys()
    assert '"name_or_path": "they/theirs"' in raw and str(repo) not in raw
    run_export(
        ExportCommand(str(out), "dflash", str(tmp_path / "back"))
    )  # its ends are the target's, and left away
    again = (tmp_path / "back" / "model.safetensors").read_bytes()
    assert again == (tmp_path / "dflash" / "model.safetensors").read_bytes()
    assert "\nloads in    speculators, and vLLM through it; blockdraft\n" in capsys.readouterr().out
    config = json.loads((out / "config.json").read_text())
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(
        repo / "data" / "embedded"
    )
    with pytest.raises(ValueError, match="is not empty"):
        ExportCommand(checkpoint, "dflash", str(out)).check()
    (out / "model.safetensors").unlink()
    with pytest.raises(SystemExit) as end:
        run_command("check", CheckCommand, run_check, [f"path={out}"])
    assert (
        end.value.code == 1 and capsys.readouterr().out.count("model.safetensors is missing") == 7
    )


def test_an_exports_refusals_are_those_of_engines_that_read_its_layout():
    verdicts = [
        EngineVerdict("first", []),
        EngineVerdict("second", ["no words"]),
        EngineVerdict("third", ["another layout"], reads_layout=False),
    ]
    assert format_engine_verdicts(verdicts).splitlines() == [
        "loads in    first",
        "second: would not load it, or would load it wrongly",
        "  - no words",
        "others      read other formats (choose with format=): third",
    ]
    assert format_engine_verdicts(verdicts[1:2]).splitlines()[0] == "loads in    no engine"


def test_export_options_are_checked():
    for options, word in (({"format": "onnx"}, "format=onnx"), ({"out": ""}, "out is empty")):
        with pytest.raises(ValueError, match=word):
            ExportCommand(**options).check()


FAKE_CONVERTER = """import sys
folder, out = sys.argv[1], sys.argv[sys.argv.index("--outfile") + 1]
if FAILS:
    sys.exit("NotImplementedError: BPE pre-tokenizer was not recognized")
open(out, "w").write(" ".join(sys.argv[1:]))
"""


def test_gguf_goes_through_llama_cpps_own_converter(tmp_path, embedded):
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), embedded)
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "drafter")
    converter = tmp_path / "convert_hf_to_gguf.py"
    out = tmp_path / "out"
    options = {
        "checkpoint": str(tmp_path / "drafter"),
        "format": "gguf",
        "converter": str(converter),
    }
    with pytest.raises(
        ValueError, match="llama.cpp's converter script, but converter=.* does not exist"
    ):
        run_export(ExportCommand(**options, out=str(out)))
    converter.write_text(FAKE_CONVERTER.replace("FAILS", "False"))
    run_export(ExportCommand(**options, out=str(out)))
    assert f"--target-model-dir {EMBEDDED_TARGET_FOLDER}" in (out / "drafter.gguf").read_text()
    assert "--spec-type draft-dflash --spec-draft-n-max" in (out / "README.md").read_text()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["DFlashDraftModel"]
    converter.write_text(FAKE_CONVERTER.replace("FAILS", "True"))
    with pytest.raises(ValueError, match="failed: NotImplementedError: BPE pre-tokenizer"):
        run_export(ExportCommand(**options, out=str(tmp_path / "again")))
    assert {path.name for path in tmp_path.iterdir()} == {
        "drafter",
        "out",
        converter.name,
    }  # and nothing of the failed


def test_a_format_that_does_not_exist_is_refused_with_those_that_do(tmp_path):
    """AngelSlim's folders are read, not written."""
    with pytest.raises(ValueError, match="format=angelslim: .*dflash.*dflash2.*gguf"):
        ExportCommand(checkpoint="embedded", format="angelslim", out=str(tmp_path / "out")).check()


def test_a_format_is_refused_before_anything_loads_and_those_that_fit_are_named(tmp_path):
    wrong = {"checkpoint": "embedded", "format": "dart", "out": str(tmp_path / "out")}
    with pytest.raises(ValueError, match="use format=dflash2 or speculators or gguf$"):
        run_export(ExportCommand(**wrong, target=TargetConfig(path="nobody/no-such-model")))


def test_angelslim_reads_its_two_classes_and_nobody_else_dflares_mixes(make_tiny, tmp_path):
    for fusion, name in ((None, "QwenDFlashDraftModel"), (True, "QwenDFlareDraftModel")):
        target, drafter = make_tiny(layer_fusion=fusion)
        save_drafter(drafter.config, drafter.state_dict(), tmp_path / name)
        config = json.loads((tmp_path / name / "config.json").read_text())
        config["architectures"] = [name]
        config["dflash_config"].pop("layer_fusion", None)
        (tmp_path / name / "config.json").write_text(json.dumps(config))
        assert torch.equal(
            draft_marginals(target, load_drafter(tmp_path / name)), draft_marginals(target, drafter)
        )
        assert [i for i, fits in enumerate(list_loading(tmp_path / name)) if fits] == [
            ANGELSLIM_INDEX,
            BLOCKDRAFT_INDEX,
        ]
    save_drafter(drafter.config, drafter.state_dict(), tmp_path / "ours")
    assert list_loading(tmp_path / "ours") == [False, False, False, False, False, False, True]
    assert torch.equal(
        draft_marginals(target, load_drafter(tmp_path / "ours")), draft_marginals(target, drafter)
    )
    for format in ("dflash", "speculators", "transformers"):
        with pytest.raises(ValueError, match="each of its layers reads its own mix"):
            export_drafter(drafter, format, target, tmp_path / format)


def test_gguf_refuses_selectors_that_llama_cpp_does_not_support(tmp_path):
    with pytest.raises(
        ValueError, match="chooses among 512 tokens, and llama.cpp supports at most 13"
    ):
        export_drafter(load_drafter("embedded"), "gguf", None, tmp_path)


def test_a_drafter_with_a_window_goes_out_to_whom_its_block_is_what_it_is_here(make_tiny, tmp_path):
    target, drafter = make_tiny(sliding_window=8)
    expected = draft_marginals(target, drafter)
    runners = {
        "dflash": [VLLM_INDEX, AUTHORS_INDEX, BLOCKDRAFT_INDEX],
        "speculators": [SPECULATORS_INDEX, BLOCKDRAFT_INDEX],
        "transformers": [TRANSFORMERS_INDEX, BLOCKDRAFT_INDEX],
    }
    for format, takers in runners.items():
        export_drafter(drafter, format, target, tmp_path / format)
        assert [i for i, fits in enumerate(list_loading(tmp_path / format)) if fits] == takers
        assert torch.equal(draft_marginals(target, load_drafter(tmp_path / format)), expected)
    causal = make_tiny(sliding_window=8, causal=True)[1]
    export_drafter(causal, "dflash", target, tmp_path / "causal")
    assert list_loading(tmp_path / "causal") == [True, True, False, True, False, False, True]
    causal.config.rope_parameters["rope_type"] = "llama3"
    with pytest.raises(ValueError, match="format=gguf does not .* Llama 3's scaling"):
        export_drafter(causal, "gguf", target, tmp_path / "gguf")
