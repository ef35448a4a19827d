"""What people type goes in as it is: prompts, paths, and the keys that they mistype."""

import io
import json
import sys

import pytest

from infer import save_drafter
from infer.cli.chat import ChatCommand
from infer.cli.compare import CompareCommand
from infer.cli.eval import EvalCommand
from infer.cli.generate import GenerateCommand
from infer.cli.regenerate import RegenerateCommand
from infer.main import COMMANDS, main
from infer.utils.entry import composed, entry
from infer.utils.overrides import free_texts, hydra_overrides, keys_of, quote, readable, unquote
from train.config import TrainConfig

LINES = """\
def f(a, b):
It's fine
Wie heißt du?
"What?" she said
say "it's"
f(x)[0] = {1: 2}
a, b, c
key=value
${HOME}/bin and ${x:-1}
$PATH
${prompt}
{a: {b: [1, 2
]][[
((
\\
C:\\new\\table
\\'
'
"
null
true
1e5
[1, 2]
{"a": 1}
~/notes
~
???
# a comment
100 % of it
a;b|c&d > e
日本語で書いてください。
مرحبا بالعالم
🙂👩‍👩‍👧
e\u0301 and \u00a0 and \u202e
@@property
<|im_start|>user
\\${escaped}
--help
choice(1,2)"""
PROMPTS = [*LINES.split("\n"), "two\nlines\n", "@dataclass\nclass A:", "\ttab and trailing space  ", "a\r\nb"]
PATHS = [
    *("größe.jsonl", "chats (1).jsonl", "a b.jsonl", "a,b.jsonl", "a=b.jsonl", "[x].jsonl", "{x}.jsonl", "it's.jsonl"),
    *('"q".jsonl', "$HOME.jsonl", "日本.jsonl", "a;b&c.jsonl", "100%.jsonl", "#1.jsonl", "back\\slash.jsonl", "-x.txt"),
]


@pytest.mark.parametrize("schema, key", [(GenerateCommand, "prompt"), (ChatCommand, "system")])
def test_awkward_prompts_are_taken_as_they_are(schema, key):
    assert len(PROMPTS) >= 40
    for prompt in PROMPTS:
        assert free_texts(schema, [f"{key}={prompt}"]) == {key: prompt.replace("@@", "@")}
    name = schema.__name__.removesuffix("Command").lower()
    for prompt in ("${x} 'a', \n[", *PROMPTS[::20]):  # and on through Hydra
        assert getattr(composed(name, schema, [f"{key}={prompt}"]), key) == prompt
    assert getattr(composed(name, schema, [f"{key}='a \\'b\\''"]), key) == "a 'b'"  # Hydra's own quoting still goes


def test_awkward_paths_are_taken_as_they_are(tmp_path, monkeypatch):
    from hydra.core.override_parser.overrides_parser import OverridesParser

    assert len(PATHS) >= 15
    parser = OverridesParser.create()
    for schema, key in [(GenerateCommand, "checkpoint"), (EvalCommand, "data.path"), (RegenerateCommand, "out")]:
        for path in PATHS:
            assert parser.parse_overrides(hydra_overrides(schema, [f"{key}={path}"]))[0].value() == path
    monkeypatch.setenv("HOME", str(tmp_path))
    name = PATHS[8] + "; ".join(PATHS[:3])
    (tmp_path / name).write_text("{}\n")
    given = ["data=jsonl", f"data.path=~/{name}", f"out={name}", f"checkpoint=~/{name}"]
    for command, schema in (("eval", EvalCommand), ("regenerate", RegenerateCommand)):
        config = composed(command, schema, given)
        assert (config.data.path, config.out, config.checkpoint) == (f"{tmp_path}/{name}", name, f"{tmp_path}/{name}")
    paths = ["~/a b", "it's", "größe"]
    config = composed("compare", CompareCommand, [f"checkpoints=[{','.join(paths)}]"])
    assert config.checkpoints == [f"{tmp_path}/a b", "it's", "größe"]
    parts = [{"path": "~/a (1).jsonl"}, {"path": "größe"}]
    config = composed("eval", EvalCommand, ["data=mixture", f"data.parts={json.dumps(parts, ensure_ascii=False)}"])
    assert [part.path for part in config.data.parts] == [f"{tmp_path}/a (1).jsonl", "größe"]


def test_what_is_hydras_stays_hydras():
    config = composed("train", TrainConfig, ["data=stdlib", "optim.betas=[0.9,0.95]", "drafter.init=null", "seed=3"])
    assert (config.data.source, list(config.optim.betas), config.drafter.init) == ("stdlib", [0.9, 0.95], None)
    assert composed("train", TrainConfig, ["name=007"]).name == "007"
    for text in PROMPTS:
        assert unquote(quote(text)) == text and readable(f"x={quote(text)}")


def test_a_prompt_comes_from_a_file_or_from_standard_input(tmp_path, monkeypatch):
    file = tmp_path / "a prompt.txt"
    file.write_text("def f():\n    '''ä'''\n", encoding="utf-8")
    assert composed("generate", GenerateCommand, [f"prompt=@{file}"]).prompt == "def f():\n    '''ä'''\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO("import os\n"))
    assert composed("generate", GenerateCommand, ["prompt=-"]).prompt == "import os\n"
    for wrong in (f"@{tmp_path}", f"@{tmp_path}/missing", "@property"):
        with pytest.raises(ValueError, match="could not be read .*prompt=@@"):
            composed("generate", GenerateCommand, [f"prompt={wrong}"])


def test_awkward_prompts_and_paths_really_run(tmp_path, embedded, make_drafter_folder, capsys, monkeypatch):
    """All prompts through regenerate, some through generate, in a folder and under names as people give them."""
    folder = tmp_path / "größe (1), [a]"
    folder.mkdir()
    rows = folder / "it's {mine}.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}, ensure_ascii=False) + "\n" for prompt in PROMPTS))
    out = folder / "answers, all.jsonl"
    main(["regenerate", "data=jsonl", f"data.path={rows}", f"out={out}", "decoding.max_new_tokens=2"])
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [answer["prompt"] for answer in answers] == PROMPTS
    drafter = make_drafter_folder(folder / "my drafter")
    for prompt in ("It's {a: [1, 2]}, ${x}\n", "Wie heißt du? 日本"):
        capsys.readouterr()
        main(["generate", f"checkpoint={drafter}", f"prompt={prompt}", "decoding.max_new_tokens=3"])
        assert capsys.readouterr().out.startswith(prompt)
    questions = folder / "questions"
    questions.mkdir()
    (questions / "some, (two).jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS[:2]))
    small = ["evaluation.max_new_tokens=2", "evaluation.budgets=[4]"]
    main(["eval", "suite=files", f"suite.folder={questions}", f"checkpoint={drafter}", f"out={folder / 'e'}", *small])
    assert (folder / "e" / "suite.md").is_file()


@pytest.fixture
def make_drafter_folder(embedded):
    """(folder) -> the folder, with an untrained drafter of the embedded target in it."""
    import torch

    from infer.config import DrafterConfig
    from infer.drafters.base import new_drafter

    def make(folder):
        drafter = new_drafter(DrafterConfig(layers=1, block_size=4), embedded)
        drafter.initialize(embedded, torch.Generator().manual_seed(0), warm=True)
        save_drafter(drafter.config, drafter.state_dict(), folder)
        return folder

    return make


@pytest.mark.parametrize(
    "name, argument, says",
    [
        ("train", "optim.lrr=1", "did you mean optim.lr?"),
        ("train", "prompts=3", "did you mean evaluation.prompts?"),
        ("generate", "temperature=1", "did you mean decoding.temperature?"),
        ("generate", "promt=x", "did you mean prompt?"),
        ("eval", "target.pth=x", "did you mean target.path?"),
        ("train", "model=hf", "write +model=hf"),
        ("generate", "def f(x):", "for a text: prompt='def f(x):'"),
    ],
)
def test_a_mistyped_key_is_answered_with_the_nearest(name, argument, says):
    with pytest.raises(ValueError) as refusal:
        composed(name, COMMANDS[name].options_class(), [argument])
    assert says in str(refusal.value)


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_explains_every_key(name, capsys):
    """With its type, the default that the command really has, and its meaning."""
    schema = COMMANDS[name].options_class()
    entry(COMMANDS[name].conf or name, schema, lambda config: None, ["--help"])
    lines = capsys.readouterr().out.splitlines()
    for key in keys_of(schema):
        [place] = [i for i, line in enumerate(lines) if line.startswith(f"  {key.name}=")]
        assert lines[place].endswith(")") and lines[place + 1].startswith("      ")
    if name == "train":
        entry("train", schema, lambda config: None, ["+model=qwen3-4b", "--help"])
        assert "  anchors=1536  (whole number)" in capsys.readouterr().out


@pytest.fixture
def a_run(tmp_path):
    """A run's folder as training leaves it: its configuration, and a checkpoint that `best` points to."""
    run = tmp_path / "runs" / "mine"
    (run / "checkpoints" / "step-00000003" / "drafter").mkdir(parents=True)
    (run / "checkpoints" / "best").symlink_to("step-00000003")
    rows = tmp_path / "chats (1).jsonl"
    rows.write_text("{}\n")
    target = {"path": "/models/it's mine", "dtype": "bfloat16", "device": "cuda:7", "trust_remote_code": True}
    parts = [{"path": str(rows), "split": "train", "weight": 2.0}]
    data = {"source": "mixture", "path": None, "parts": parts, "length": 3072, "num_proc": 8}
    (run / "config.json").write_text(json.dumps({"target": target, "data": data}))
    return run


def test_commands_take_target_and_data_from_the_checkpoints_run(a_run, capsys):
    best = f"{a_run}/checkpoints/best"
    config = composed("eval", EvalCommand, [f"checkpoint={best}"])
    assert (config.target.path, config.target.dtype) == ("/models/it's mine", "bfloat16")
    assert (config.data.source, config.data.parts[0].weight, config.data.length) == ("mixture", 2.0, 3072)
    # the machine's own, and leave that only the user gives
    assert (config.target.device, config.target.trust_remote_code, config.data.num_proc) == ("auto", False, None)
    for name in ("generate", "serve", "export"):
        schema = COMMANDS[name].options_class()
        assert composed(name, schema, [f"checkpoint={best}/drafter"]).target.path == "/models/it's mine"
    config = composed("compare", CompareCommand, [f"checkpoints=[{best}]"])
    assert (config.target.path, config.data.source) == ("/models/it's mine", "mixture")
    told = composed("eval", EvalCommand, [f"checkpoint={best}", "target.path=other", "data=stdlib"])
    assert (told.target.path, told.target.dtype, told.data.source) == ("other", "auto", "stdlib")
    assert composed("eval", EvalCommand, [f"checkpoint={best}", "target.dtype=float32"]).target.dtype == "float32"
    assert composed("generate", GenerateCommand, ["checkpoint=nowhere"]).target.path == "embedded"
