"""What people type goes in as it is: prompts, paths, and the keys that they mistype; the rest is one sentence."""

import io
import json
import sys
from operator import attrgetter

import pytest

from infer.cli.chat import ChatCommand
from infer.cli.compare import CompareCommand
from infer.cli.eval import EvalCommand
from infer.cli.generate import GenerateCommand
from infer.cli.regenerate import RegenerateCommand
from infer.main import COMMANDS, main
from infer.utils.entry import entry
from infer.utils.overrides import composed, keys_of, typed
from train.config import TrainConfig

LINES = """\
def f(a, b):
It's fine
Wie heißt du?
"What?" she said
f(x)[0] = {1: 2}
a, b, c
key=value
${HOME}/bin and ${x:-1}
${prompt}
{a: {b: [1, 2
]][[
\\
C:\\new\\table
\\'
'
null
1e5
{"a": 1}
~/notes
# a comment
日本語で書いてください。
🙂👩‍👩‍👧
e\u0301 and \u00a0 and \u202e
@@property
\\${escaped}
--help"""
PROMPTS = [*LINES.split("\n"), "two\nlines\n", "@dataclass\nclass A:", "\ttab and trailing space  ", "a\r\nb"]
PATHS = [
    "größe.jsonl",
    "chats (1).jsonl",
    "a,b.jsonl",
    "[x].jsonl",
    "{x}.jsonl",
    "it's.jsonl",
    '"q".jsonl',
    "a=b;#1.jsonl",
]


LISTS = [
    (EvalCommand, "evaluation.budgets", "16,32", [16, 32]),
    (EvalCommand, "evaluation.budgets", "16, 32", [16, 32]),
    (EvalCommand, "evaluation.budgets", "16", [16]),
    (EvalCommand, "evaluation.budgets", "[16,32]", [16, 32]),
    (EvalCommand, "suite.temperatures", "0,0.5", [0.0, 0.5]),
    (RegenerateCommand, "questions.tokens", "4,9", [4, 9]),
    (TrainConfig, "drafter.target_layer_ids", "1,2", [1, 2]),
    (TrainConfig, "drafter.target_layer_ids", "null", None),
    (CompareCommand, "checkpoints", "runs/a", ["runs/a"]),
    (GenerateCommand, "decoding.stop", "${END}", ["${END}"]),
    (GenerateCommand, "decoding.stop", "it's {", ["it's {"]),
]


@pytest.mark.parametrize(("schema", "key", "value", "entries"), LISTS)
def test_a_list_may_be_without_its_brackets(schema, key, value, entries):
    name = "train" if schema is TrainConfig else schema.__name__.removesuffix("Command").lower()
    assert attrgetter(key)(composed(name, schema, [f"{key}={value}"])) == entries


@pytest.mark.parametrize("key, value", [("checkpoints", "a,b"), ("checkpoints", "a, b")])
def test_texts_with_a_comma_are_one_or_several(key, value):
    with pytest.raises(ValueError, match=rf"{key}={value}: a list of texts is written {key}=\[a,b\]"):
        composed("compare", CompareCommand, [f"{key}={value}"])


@pytest.mark.parametrize("schema, key", [(GenerateCommand, "prompt"), (ChatCommand, "system")])
def test_awkward_prompts_are_taken_as_they_are(schema, key, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    name = schema.__name__.removesuffix("Command").lower()
    for prompt in (*PROMPTS, "${oc.env:SECRET}", "x${oc.decode:${oc.env:SECRET}}"):
        assert typed(schema, set(), [f"{key}={prompt}"])[1][key] == prompt.replace("@@", "@")
    for prompt in ("${oc.env:SECRET} 'a', \n[", *PROMPTS[::9]):  # and on through Hydra
        assert getattr(composed(name, schema, [f"{key}={prompt}"]), key) == prompt


def test_awkward_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in PATHS:
        (tmp_path / path).touch()
        config = composed("eval", EvalCommand, ["data=jsonl", f"data.path=~/{path}", f"out={path}"])
        assert (config.data.path, config.out) == (f"{tmp_path}/{path}", path)
    assert composed("compare", CompareCommand, ["checkpoints=[a b, it's, größe]"]).checkpoints == [
        "a b",
        "it's",
        "größe",
    ]
    parts = [{"path": "a (1).jsonl"}, {"path": "größe"}]
    config = composed("eval", EvalCommand, ["data=mixture", f"data.parts={json.dumps(parts, ensure_ascii=False)}"])
    assert [part.path for part in config.data.parts] == ["a (1).jsonl", "größe"]


def test_what_is_no_text_is_of_its_keys_type():
    given = ["data=stdlib", "optim.betas=[0.9,0.95]", "drafter.init=null", "++seed=3", "optim.lr=1e-3", "name=007"]
    config = composed("train", TrainConfig, given)
    assert (config.data.source, list(config.optim.betas), config.drafter.init) == ("stdlib", [0.9, 0.95], None)
    assert (config.seed, config.optim.lr, config.name) == (3, 1e-3, "007")
    config = composed("eval", EvalCommand, ["target.chat_template_kwargs.enable_thinking=false"])
    assert config.target.chat_template_kwargs == {"enable_thinking": False}


def test_a_prompt_comes_from_a_file_or_from_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "a prompt.txt"
    file.write_text("def f():\n    '''ä'''\n", encoding="utf-8")
    assert composed("generate", GenerateCommand, [f"prompt=@{file}"]).prompt == "def f():\n    '''ä'''\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    assert composed("generate", GenerateCommand, ["prompt=-"]).prompt == "import os\n"
    for wrong in (f"@{tmp_path}", "@property"):
        with pytest.raises(ValueError, match="could not be read .*prompt=@@"):
            composed("generate", GenerateCommand, [f"prompt={wrong}"])


@pytest.mark.robustness
def test_awkward_prompts_and_paths_really_run(tmp_path, capsys):
    """All prompts through regenerate, one through generate, in a folder and under names as people give them."""
    folder = tmp_path / "größe (1), [a]"
    folder.mkdir()
    rows, out = folder / "it's {mine}.jsonl", folder / "answers, all.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in PROMPTS))
    main(["regenerate", "data=jsonl", f"data.path={rows}", f"out={out}", "decoding.max_new_tokens=2"])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == PROMPTS
    capsys.readouterr()
    main(["generate", "prompt=It's {a: [1, 2]}, ${x}\n", "decoding.max_new_tokens=3"])
    assert capsys.readouterr().out.startswith("It's {a: [1, 2]}, ${x}\n")


@pytest.mark.parametrize(
    "name, argument, says",
    [
        ("train", "+optim.lrr=1", "did you mean optim.lr?"),
        ("train", "prompts=3", "did you mean evaluation.prompts?"),
        ("generate", "temperature=1", "did you mean decoding.temperature?"),
        ("eval", "target.pth=x", "did you mean target.path?"),
        ("generate", "def f(x):", "for a text: prompt='def f(x):'"),
        ("train", "hydra.run.dir=x", "hydra.run.dir: no such key"),
        ("train", "+_target_=os.system", "_target_: no such key"),
        ("eval", "optim=laptop", "optim: no such key"),
        ("train", "target=nope", "target=nope: there is embedded, "),
        ("train", "+model=nope", "qwen3-4b"),
        ("train", "optim.lr=abc", "optim.lr: Value 'abc'"),
        ("train", "optim.lr=nan", "optim.lr=nan: a finite number"),
        ("train", "optim.lr=${oc.env:HOME}", "Value '${oc.env:HOME}'"),
        ("train", "seed=" + "9" * 30, "of at most 62 bits"),
        ("train", "seed=true", "seed: Value 'True'"),
        ("train", "optim.betas=[0.9", "expected"),
        ("train", "optim.betas=[0.9,1.0]", "optim.betas=[0.9, 1.0]"),
        ("train", "name=a\nb", "a plain folder name"),
        ("train", "name=" + "a" * 5000, "a plain folder name"),
        ("train", "name=../x", "name=../x"),
        ("train", "optim.lr=-1", "optim.lr=-1"),
        ("train", "drafter.block_size=1", "drafter.block_size=1"),
        ("train", "drafter.block_size=600", "drafter.block_size=600"),
        ("train", "data=jsonl", "data.path"),
        ("train", "deepspeed.offload=true", "deepspeed.stage"),
        ("train", "deepspeed.stage=1", "optim.name=muon"),
        ("train", "objective.divergence=l2", "objective.divergence=l2"),
        ("train", "evaluation.budgets=[]", "budgets"),
        ("train", "data.limit=-1", "data.limit=-1"),
        ("train", "anchors=5000", "anchors=5000: a row of data.length=256 tokens has room for 254 at most"),
        ("eval", "evaluation.temperature=1e-9", "evaluation.temperature"),
        ("generate", "target.device=gpu0!", "target.device=gpu0!"),
    ],
)
def test_what_is_wrong_is_one_sentence_that_names_it(name, argument, says):
    with pytest.raises(ValueError) as refusal:
        composed(name, COMMANDS[name].options_class(), [argument])
    assert says in str(refusal.value) and len(str(refusal.value)) < 500 and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_explains_every_key(name, capsys):
    """With its type, the default that the command really has, and its meaning."""
    schema = COMMANDS[name].options_class()
    entry(COMMANDS[name].conf or name, schema, lambda config: None, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    for key in keys_of(schema):
        [place] = [i for i, line in enumerate(lines) if line.startswith(f"  {key}=")]
        assert lines[place].endswith(")") and lines[place + 1].startswith("    ")
    if name == "train":
        entry("train", schema, lambda config: None, ["+model=qwen3-4b", "--help"])
        assert "  anchors=1536  (int)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["train", "features", "data", "regenerate", "ngram", "eval", "compare"])
def test_a_file_or_folder_is_the_data_of_every_command(name, tmp_path):
    """By data.path= alone, and by data=, whatever the command's own default is; also within a bundle of the hub's."""
    file, schema = tmp_path / "mine.jsonl", COMMANDS[name].options_class()
    file.write_text('{"text": "x"}\n')
    bundles = [[], ["+model=hf", "target.path=embedded", "data.length=2000"]] if name == "train" else [[]]
    for bundle in bundles:
        for given in (f"data.path={file}", f"data={file}", f"data={tmp_path}"):
            data = composed(name, schema, [*bundle, given]).data
            assert (data.source, data.path) == ("jsonl", given.partition("=")[2])
        for given in (f"data.path={file}l", f"data={file}l", "data=gone.jsonl"):
            with pytest.raises(ValueError, match=r"^data\.path=\S+: no such file or folder"):
                composed(name, schema, [*bundle, given])


def test_a_target_may_be_given_as_a_path_or_a_name_of_the_hub(tmp_path):
    for path in (str(tmp_path), "Qwen/Qwen3-4B", "model.gguf"):
        assert composed("generate", GenerateCommand, [f"target={path}"]).target.path == path
    assert composed("generate", GenerateCommand, ["target=qwen3-4b"]).target.path == "Qwen/Qwen3-4B"


def test_an_option_of_another_name_says_the_new_one():
    with pytest.raises(ValueError, match=r"data\.bad_rows was replaced by data\.max_invalid \(default 0\.05\)"):
        composed("train", TrainConfig, ["data.bad_rows=100"])


@pytest.fixture
def a_run(tmp_path):
    """A run's folder as training leaves it: its configuration, and a checkpoint that `best` points to."""
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "step-00000003" / "drafter").mkdir(parents=True)
    (run / "checkpoints" / "best").symlink_to("step-00000003")
    target = {"path": "/models/it's mine", "dtype": "bfloat16", "device": "cuda:7", "trust_remote_code": True}
    parts = [{"path": "chats (1).jsonl", "split": "train", "weight": 2.0}]
    data = {"source": "mixture", "path": None, "parts": parts, "length": 3072, "bad_rows": 100.0, "gone": 1}
    (run / "config.json").write_text(json.dumps({"target": target, "data": data}))
    return run


def test_commands_take_target_and_data_from_the_checkpoints_run(a_run):
    best = f"{a_run}/checkpoints/best"
    config = composed("eval", EvalCommand, [f"checkpoint={best}"])
    assert (config.target.path, config.target.dtype) == ("/models/it's mine", "bfloat16")
    assert (config.data.source, config.data.parts[0].weight, config.data.length) == ("mixture", 2.0, 3072)
    # the machine's own, and leave that only the user gives
    assert (config.target.device, config.target.trust_remote_code) == ("auto", False)
    for name in ("generate", "serve", "export"):
        schema = COMMANDS[name].options_class()
        assert composed(name, schema, [f"checkpoint={best}/drafter"]).target.path == "/models/it's mine"
    config = composed("compare", CompareCommand, [f"checkpoints=[{best}]"])
    assert (config.target.path, config.data.source) == ("/models/it's mine", "mixture")
    told = composed("eval", EvalCommand, [f"checkpoint={best}", "target.path=other", "data=stdlib"])
    assert (told.target.path, told.target.dtype, told.data.source) == ("other", "auto", "stdlib")
    assert composed("eval", EvalCommand, [f"checkpoint={best}", "target.dtype=float32"]).target.dtype == "float32"
    assert composed("generate", GenerateCommand, ["checkpoint=nowhere"]).target.path == "embedded"
