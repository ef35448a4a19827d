"""`./launch.sh eval suite=...` from end to end: local copies of the public sets, a tiny target, a
complete table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infer.evaluation.suite
from data.suites import SETS, Questions, SuiteConfig, said
from infer import generate, load_drafter, load_target, save_drafter
from infer.cli.eval import EvalCommand, run as run_eval
from infer.config import DrafterConfig, EvaluationConfig, TargetConfig
from infer.drafters.base import new_drafter
from infer.evaluation.measuring import variants
from infer.evaluation.published import published
from infer.evaluation.suite import ask, evaluate_suite


@pytest.fixture(scope="module")
def place(tmp_path_factory, shallow_target, random_qwen3):
    """A folder with a random target called Qwen3-4B, a drafter for it, and a question of every set,
    two of Alpaca's."""
    from infer.targets.target import Target

    folder = tmp_path_factory.mktemp("suite")
    model = random_qwen3(vocab_size=512, num_hidden_layers=4)
    model.save_pretrained(folder / "Qwen3-4B")
    shallow_target.tokenizer.save_pretrained(folder / "Qwen3-4B")
    target = Target(model, shallow_target.tokenizer)
    drafter = new_drafter(DrafterConfig(layers=1, block_size=4), target)
    drafter.initialize(target, torch.Generator().manual_seed(0), warm=True)
    save_drafter(drafter.config, drafter.state_dict(), folder / "checkpoint" / "drafter")
    for one in SETS:
        row = dict.fromkeys(one.columns, "What is it?")
        rows = [row | {one.columns[0]: "Say."}]
        if one.name == "mt-bench":
            rows = [{"prompt": ["Say.", "Say more."]}]
        if one.name == "alpaca":
            rows.append({"instruction": "Tell.", "input": ""})
        (folder / f"{one.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def command(place, tmp_path):
    return EvalCommand(
        checkpoint=str(place / "checkpoint"),
        out=str(tmp_path / "out"),
        target=TargetConfig(path=str(place / "Qwen3-4B"), dtype="float32", device="cpu"),
        evaluation=EvaluationConfig(max_new_tokens=5, budgets=[3, 6]),
        suite=SuiteConfig("ddtree", str(place)),
    )


def tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, as cells."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.split("\n")]
        for block in blocks
    ]


@pytest.mark.robustness
def test_the_table_is_complete_and_a_finished_set_is_not_decoded_again(
    command, capsys, monkeypatch
):
    command.check()
    run_eval(command)
    out = Path(command.out)
    text = (out / "suite.md").read_text()
    assert text in capsys.readouterr().out
    suite = json.loads((out / "suite.json").read_text())
    measured = {(one["set"], one["temperature"]): one for one in suite["sets"]}
    titles = [one.title for one in SETS]
    found = tables(text)
    assert len(found) == 4 and "arXiv:2604.12989" in text  # two for each temperature
    for temperature, best, every in ((0.0, *found[:2]), (1.0, *found[2:])):
        assert len({len(row) for row in best}) == len({len(row) for row in every}) == 1
        assert (
            [row[0] for row in best[2:]] == [row[0] for row in every[2:]] == [*titles, "**mean**"]
        )
        assert every[0] == ["τ, speedup", "chain", "DDTree 3", "DDTree 6", "n-grams alone 6"]
        for one, row, methods in zip(SETS, best[2:], every[2:], strict=False):
            entry = measured[one.name, temperature]
            answers = 2 if one.name in ("mt-bench", "alpaca") else 1
            assert (entry["questions"], entry["answers"]) == (1 + (one.name == "alpaca"), answers)
            assert entry["left_out"] == 0
            lines = {(m["name"], m["budget"]): m for m in entry["result"]["methods"]}
            trees = {("ddtree", 3), ("ddtree", 6), ("n-grams alone", 6)}
            assert set(lines) == {("plain", 0), ("generate", 0), ("chain", 3)} | trees
            assert all(
                m["same"] == answers for m in lines.values() if m["name"] != "generate"
            )  # float32: sampled too
            assert row[1] == str(answers) and row[-1] == f"{answers}/{answers}"
            paper = published("Qwen3-4B", temperature, one.name)
            assert row[4] == f"{paper.chain_speedup:.2f}x" and row[6] == f"{paper.chain_tau:.2f}"
            assert row[9] == f"{paper.ddtree_speedup:.2f}x" and row[11] == f"{paper.ddtree_tau:.2f}"
            chain = lines["chain", 3]
            assert row[3] == f"{chain['decoding_speedup']:.2f}x"
            assert row[5] == f"{chain['tau_prompt_mean']:.2f}"
            best_tree = max(
                (m for m in lines.values() if m["name"] == "ddtree"),
                key=lambda m: m["decoding_speedup"],
            )
            assert row[7:9] == [str(best_tree["budget"]), f"{best_tree['decoding_speedup']:.2f}x"]
            assert methods[1] == f"{chain['tau_prompt_mean']:.2f}, {chain['decoding_speedup']:.2f}x"
        mean = (
            sum(
                measured[one.name, temperature]["result"]["methods"][2]["tau_prompt_mean"]
                for one in SETS
            )
            / 10
        )
        assert best[-1][5] == f"{mean:.2f}"
    assert found[0][-1][4] == "4.27x"  # the paper's ten greedy speedups of the chain, averaged

    decoded = []
    decode = infer.evaluation.suite.measure
    monkeypatch.setattr(
        infer.evaluation.suite, "measure", lambda *a: decoded.append(a[3]) or decode(*a)
    )
    run_eval(command)
    assert not decoded and (out / "suite.md").read_text() == text
    with pytest.raises(
        ValueError,
        match=r"gsm8k-0\.json was measured with another max_new_tokens: give another out=",
    ):
        run_eval(
            replace(
                command,
                suite=replace(command.suite, sets=["gsm8k"]),
                evaluation=replace(command.evaluation, max_new_tokens=6),
            )
        )
    assert not decoded


def test_a_suite_keeps_to_its_minutes(command, monkeypatch):
    """No question begins when the time is over, and the table says so; a set that was cut is no
    finished one."""
    command.suite = replace(command.suite, sets=["aime24", "alpaca"], temperatures=[0.0])
    command.evaluation = replace(command.evaluation, max_minutes=1e-6)
    run_eval(command)
    text = Path(command.out, "suite.md").read_text()
    assert "Alpaca: evaluation.max_minutes=1e-06 had time for 1 of 2 prompts" in text
    assert "AIME 2024: " not in text
    monkeypatch.setattr(infer.evaluation.suite, "measure", None)
    run_eval(command)  # as it was
    command.evaluation = replace(command.evaluation, max_minutes=None)
    with pytest.raises(
        ValueError, match=r"alpaca-0\.json was measured with another max_minutes: give another out="
    ):
        run_eval(command)


def test_prompts_of_the_embedded_target_are_for_it_alone(command):
    command.suite = SuiteConfig()
    command.checkpoint = "nowhere"
    with pytest.raises(
        ValueError, match=r"data\.path=<your files>, .*suite=files with suite\.folder="
    ):
        run_eval(command)


def test_a_stopped_suite_goes_on_with_the_next_set(command, monkeypatch):
    command.suite = replace(command.suite, sets=["aime24", "alpaca"], temperatures=[0.0])
    decode = infer.evaluation.suite.measure
    sizes = []

    def stopped(*arguments):
        sizes.append(len(arguments[3]))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(infer.evaluation.suite, "measure", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_eval(command)
    run_eval(command)
    assert len(sizes) == 3
    rows = tables(Path(command.out, "suite.md").read_text())[0][2:]
    assert [row[0] for row in rows] == ["AIME 2024", "Alpaca", "**mean**"]


def test_another_drafter_under_the_same_name_is_noticed(command, place):
    command.suite = SuiteConfig("ddtree", str(place), ["aime24"], temperatures=[0.0])
    command.checkpoint = command.out + "-checkpoint"
    drafter = load_drafter(place / "checkpoint")
    for _ in range(2):
        weights = drafter.state_dict()
        save_drafter(drafter.config, weights, Path(command.checkpoint))
        last = weights["norm.weight"]
        try:
            run_eval(command)
        except ValueError as error:
            assert "another drafter" in str(error)
            return
        last += 1
    raise AssertionError("the second drafter's figures were taken for the first one's")


def test_turns_are_asked_with_the_models_own_answers(place):
    """Against chats made by hand, one text at a time."""
    target = load_target(str(place / "Qwen3-4B"), dtype="float32", device="cpu")
    drafter = load_drafter(place / "checkpoint")
    chats = [said(["One.", "Two.", "Three."]), said(["Four."]), said(["Five.", "Six."])]
    options = EvaluationConfig(max_new_tokens=7, budgets=[5])
    calls = []
    questions = Questions("", "", chats)
    methods = variants(drafter, options)
    results, left_out = ask(
        target, drafter, questions, False, methods, lambda *done: calls.append(done)
    )
    expected = []
    for chat in chats:
        messages = []
        for turn in chat:
            messages += turn
            answer = generate(target, None, messages, method="plain", max_new_tokens=7)
            expected.append((answer.prompt_ids, answer.ids))
            messages.append({"role": "assistant", "content": answer.text})
    assert left_out == 0 and calls == [(1, 3), (2, 3), (3, 3), (1, 2), (2, 2), (1, 1)]
    for measured in results:
        assert sorted((text.prompt, text.ids) for text in measured.texts) == sorted(expected)


def test_questions_that_do_not_fit_are_left_out_and_counted(place):
    target = load_target(str(place / "Qwen3-4B"), dtype="float32", device="cpu")
    drafter = load_drafter(place / "checkpoint")
    options = EvaluationConfig(max_new_tokens=6, budgets=[2])
    chats = [
        said(["word " * 600]),
        said(["Short.", "word " * 600, "Never asked."]),
        said(["A.", "B.", "C."]),
    ]
    questions = Questions("", "", chats)
    methods = variants(drafter, options)
    results, left_out = ask(target, drafter, questions, False, methods, lambda done, total: None)
    assert left_out == 3 and len(results[0].texts) == 1 + 3
    with pytest.raises(
        ValueError, match=r"Long: no question and 6 new tokens fit into the target's 512 positions"
    ):
        evaluate_suite(
            target,
            drafter,
            str(place / "checkpoint"),
            [Questions("long", "Long", chats[:1])],
            SuiteConfig("files", str(place), temperatures=[0.0]),
            options,
            place / "long",
        )


def test_a_target_without_a_template_reads_plain_text(place):
    target = load_target(str(place / "Qwen3-4B"), dtype="float32", device="cpu")
    target.tokenizer.chat_template = None
    messages = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert (
        target.tokenizer.decode(infer.evaluation.suite.prompt_ids(target, messages, False))
        == "One.\n\nTwo.\n\n"
    )


def test_published_figures_are_whole_and_only_for_their_models():
    for temperature in (0.0, 1.0):
        for one in SETS:
            for model in ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b-instruct"):
                theirs = published(f"Some/{model.upper()}", temperature, one.name)
                # "DDTree improves every entry in Table 1"
                assert 1 < theirs.chain_speedup < theirs.ddtree_speedup < theirs.ddtree_tau < 16
                assert theirs.chain_speedup < theirs.chain_tau < theirs.ddtree_tau
    assert published("Qwen/Qwen3-8B", 0.0, "math500").ddtree_tau == 10.73
    assert published("/models/Qwen3-8B/", 1.0, "mt-bench").ddtree_speedup == 3.75
    for target, temperature, name in (
        ("Qwen/Qwen3-8B-Base", 0.0, "gsm8k"),
        ("Qwen/Qwen3-8B", 0.6, "gsm8k"),
        ("Qwen/Qwen3-8B", 0.0, "qa"),
    ):
        assert published(target, temperature, name) is None


def test_there_is_no_column_of_the_paper_where_it_has_nothing(command, tmp_path):
    """Own questions, asked with prompt lookup, which has no weights."""
    (tmp_path / "own").mkdir()
    for name in ("a", "b"):
        (tmp_path / "own" / f"{name}.jsonl").write_text(json.dumps({"turns": ["Say."]}) + "\n")
    command.suite = SuiteConfig("files", str(tmp_path / "own"), temperatures=[0.0])
    command.checkpoint = "lookup"
    run_eval(command)
    text = Path(command.out, "suite.md").read_text()
    assert "arXiv" not in text
    best, _ = tables(text)
    assert [row[0] for row in best[2:]] == ["a", "b", "**mean**"]
    heads = [
        "set",
        "answers",
        "plain tokens/s",
        "chain speedup",
        "chain τ",
        "DDTree nodes",
        "DDTree speedup",
    ]
    assert best[0] == [*heads, "DDTree τ", "same"]
    assert all(len(row) == len(best[0]) and "-" not in row for row in best[2:])


def test_a_missing_drafter_is_said_before_anything_is_read(command):
    command.checkpoint = "nowhere"
    command.suite.folder = "nowhere either"
    with pytest.raises(FileNotFoundError, match="nowhere is no folder, and no name"):
        run_eval(command)
