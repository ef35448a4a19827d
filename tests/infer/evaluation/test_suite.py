"""`./launch.sh eval suite=...` from end to end: local copies of the public sets, a tiny target, a
complete table."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import infer.evaluation.suite
from data.suites import DDTREE_QUESTION_SETS, LoadedQuestionSet, SuiteConfig, build_user_turns
from infer import generate, load_drafter, load_target, save_drafter
from infer.cli.eval import EvalCommand, run as run_eval
from infer.config import DrafterConfig, EvaluationConfig, TargetConfig
from infer.drafters.build import create_drafter
from infer.evaluation.measurement import list_variants
from infer.evaluation.published import find_published_result
from infer.evaluation.suite import answer_questions, evaluate_suite


@pytest.fixture(scope="module")
def suite_folder(tmp_path_factory, shallow_target, random_qwen3):
    """A folder with a random target called Qwen3-4B, a drafter for it, and a question of every set,
    two of Alpaca's."""
    from infer.targets.target import Target

    folder = tmp_path_factory.mktemp("suite")
    model = random_qwen3(vocab_size=512, num_hidden_layers=4)
    model.save_pretrained(folder / "Qwen3-4B")
    shallow_target.tokenizer.save_pretrained(folder / "Qwen3-4B")
    target = Target(model, shallow_target.tokenizer)
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), target)
    drafter.initialize(target, torch.Generator().manual_seed(0), warm_start=True)
    save_drafter(drafter.config, drafter.state_dict(), folder / "checkpoint" / "drafter")
    for question_set in DDTREE_QUESTION_SETS:
        row = dict.fromkeys(question_set.columns, "What is it?")
        rows = [row | {question_set.columns[0]: "Say."}]
        if question_set.name == "mt-bench":
            rows = [{"prompt": ["Say.", "Say more."]}]
        if question_set.name == "alpaca":
            rows.append({"instruction": "Tell.", "input": ""})
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{question_set.name}.jsonl").write_text(lines)
    return folder


@pytest.fixture
def command(suite_folder, tmp_path):
    return EvalCommand(
        checkpoint=str(suite_folder / "checkpoint"),
        out=str(tmp_path / "out"),
        target=TargetConfig(path=str(suite_folder / "Qwen3-4B"), dtype="float32", device="cpu"),
        evaluation=EvaluationConfig(max_new_tokens=5, budgets=[3, 6]),
        suite=SuiteConfig("ddtree", str(suite_folder)),
    )


def parse_tables(text: str) -> list[list[list[str]]]:
    """The Markdown tables of a text, as cells."""
    blocks = [block for block in text.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.split("|")[1:-1]] for line in block.split("\n")]
        for block in blocks
    ]


def check_set(result: dict, row: list[str], method_cells: list[str]) -> None:
    """Check a set of suite.json against its rows in both tables."""
    name = result["set"]
    answers = 2 if name in ("mt-bench", "alpaca") else 1
    assert result["questions"] == (2 if name == "alpaca" else 1)
    assert result["answers"] == answers
    assert result["left_out"] == 0
    methods = {(method["name"], method["budget"]): method for method in result["result"]["methods"]}
    baselines = {("plain", 0), ("generate", 0)}
    drafting = {("chain", 3), ("ddtree", 3), ("ddtree", 6), ("n-grams alone", 6)}
    assert set(methods) == baselines | drafting
    for method in methods.values():
        if method["name"] != "generate":
            assert method["same"] == answers  # in float32, also of sampled answers
    assert row[1] == str(answers)
    assert row[-1] == f"{answers}/{answers}"

    paper = find_published_result("Qwen3-4B", result["temperature"], name)
    assert row[4] == f"{paper.chain_speedup:.2f}x"
    assert row[6] == f"{paper.chain_tau:.2f}"
    assert row[9] == f"{paper.ddtree_speedup:.2f}x"
    assert row[11] == f"{paper.ddtree_tau:.2f}"

    chain = methods["chain", 3]
    tau = f"{chain['tau_prompt_mean']:.2f}"
    speedup = f"{chain['decoding_speedup']:.2f}x"
    assert row[3] == speedup
    assert row[5] == tau
    assert method_cells[1] == f"{tau}, {speedup}"
    trees = [method for method in methods.values() if method["name"] == "ddtree"]
    best_tree = max(trees, key=lambda method: method["decoding_speedup"])
    assert row[7:9] == [str(best_tree["budget"]), f"{best_tree['decoding_speedup']:.2f}x"]


@pytest.mark.robustness
def test_the_table_is_complete_and_a_finished_set_is_not_decoded_again(
    command, capsys, monkeypatch
):
    command.check()
    run_eval(command)
    out = Path(command.out)
    text = (out / "suite.md").read_text()
    assert text in capsys.readouterr().out
    assert "arXiv:2604.12989" in text
    suite = json.loads((out / "suite.json").read_text())
    results = {(result["set"], result["temperature"]): result for result in suite["sets"]}
    titles = [*(question_set.title for question_set in DDTREE_QUESTION_SETS), "**mean**"]
    greedy_best, greedy_methods, sampled_best, sampled_methods = parse_tables(text)
    for temperature, best, all_methods in (
        (0.0, greedy_best, greedy_methods),
        (1.0, sampled_best, sampled_methods),
    ):
        assert len({len(row) for row in best}) == 1
        assert len({len(row) for row in all_methods}) == 1
        assert [row[0] for row in best[2:]] == [row[0] for row in all_methods[2:]] == titles
        assert all_methods[0] == ["τ, speedup", "chain", "DDTree 3", "DDTree 6", "n-grams alone 6"]
        chain_taus = []
        for question_set, row, cells in zip(
            DDTREE_QUESTION_SETS, best[2:], all_methods[2:], strict=False
        ):
            result = results[question_set.name, temperature]
            check_set(result, row, cells)
            chain_taus.append(result["result"]["methods"][2]["tau_prompt_mean"])
        assert best[-1][5] == f"{sum(chain_taus) / 10:.2f}"
    assert greedy_best[-1][4] == "4.27x"  # the paper's ten greedy speedups of the chain, averaged

    decoded = []
    decode = infer.evaluation.suite.measure_variants
    monkeypatch.setattr(
        infer.evaluation.suite, "measure_variants", lambda *a: decoded.append(a[3]) or decode(*a)
    )
    run_eval(command)
    assert not decoded
    assert (out / "suite.md").read_text() == text
    command.suite = replace(command.suite, sets=["gsm8k"])
    command.evaluation = replace(command.evaluation, max_new_tokens=6)
    message = r"gsm8k-0\.json was measured with another max_new_tokens: give another out="
    with pytest.raises(ValueError, match=message):
        run_eval(command)
    assert not decoded


def test_a_suite_respects_its_time_limit(command, monkeypatch):
    """No question begins after the time limit, and the table says so; a set that was cut is not
    finished."""
    command.suite = replace(command.suite, sets=["aime24", "alpaca"], temperatures=[0.0])
    command.evaluation = replace(command.evaluation, max_minutes=1e-6)
    run_eval(command)
    text = Path(command.out, "suite.md").read_text()
    assert "Alpaca: evaluation.max_minutes=1e-06 had time for 1 of 2 prompts" in text
    assert "AIME 2024: " not in text
    monkeypatch.setattr(infer.evaluation.suite, "measure_variants", None)
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
    decode = infer.evaluation.suite.measure_variants
    sizes = []

    def stopped(*arguments):
        sizes.append(len(arguments[3]))
        if len(sizes) == 2:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(infer.evaluation.suite, "measure_variants", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_eval(command)
    run_eval(command)
    assert len(sizes) == 3
    rows = parse_tables(Path(command.out, "suite.md").read_text())[0][2:]
    assert [row[0] for row in rows] == ["AIME 2024", "Alpaca", "**mean**"]


def test_another_drafter_under_the_same_name_is_noticed(command, suite_folder):
    command.suite = SuiteConfig("ddtree", str(suite_folder), ["aime24"], temperatures=[0.0])
    command.checkpoint = command.out + "-checkpoint"
    drafter = load_drafter(suite_folder / "checkpoint")
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
    raise AssertionError("the second drafter's results were taken for the first one's")


def test_turns_are_asked_with_the_models_own_answers(suite_folder):
    """Compared with chats that are continued here, one sequence at a time."""
    target = load_target(str(suite_folder / "Qwen3-4B"), dtype="float32", device="cpu")
    drafter = load_drafter(suite_folder / "checkpoint")
    chats = [
        build_user_turns(["One.", "Two.", "Three."]),
        build_user_turns(["Four."]),
        build_user_turns(["Five.", "Six."]),
    ]
    options = EvaluationConfig(max_new_tokens=7, budgets=[5])
    calls = []
    questions = LoadedQuestionSet("", "", chats)
    variants = list_variants(drafter, options)
    results, left_out = answer_questions(
        target, drafter, questions, False, variants, lambda *done: calls.append(done)
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
        assert sorted((text.prompt, text.ids) for text in measured.sequences) == sorted(expected)


def test_questions_that_do_not_fit_are_left_out_and_counted(suite_folder):
    target = load_target(str(suite_folder / "Qwen3-4B"), dtype="float32", device="cpu")
    drafter = load_drafter(suite_folder / "checkpoint")
    options = EvaluationConfig(max_new_tokens=6, budgets=[2])
    chats = [
        build_user_turns(["word " * 600]),
        build_user_turns(["Short.", "word " * 600, "Never asked."]),
        build_user_turns(["A.", "B.", "C."]),
    ]
    questions = LoadedQuestionSet("", "", chats)
    variants = list_variants(drafter, options)
    results, left_out = answer_questions(
        target, drafter, questions, False, variants, lambda done, total: None
    )
    assert left_out == 3 and len(results[0].sequences) == 1 + 3
    with pytest.raises(
        ValueError,
        match=r"Long: every question is too long for the target, which supports 512 tokens",
    ):
        evaluate_suite(
            target,
            drafter,
            str(suite_folder / "checkpoint"),
            [LoadedQuestionSet("long", "Long", chats[:1])],
            SuiteConfig("files", str(suite_folder), temperatures=[0.0]),
            options,
            suite_folder / "long",
        )


def test_a_target_without_a_template_reads_plain_text(suite_folder):
    target = load_target(str(suite_folder / "Qwen3-4B"), dtype="float32", device="cpu")
    target.tokenizer.chat_template = None
    messages = [{"role": "user", "content": "One."}, {"role": "assistant", "content": "Two."}]
    assert (
        target.tokenizer.decode(infer.evaluation.suite.encode_chat(target, messages, False))
        == "One.\n\nTwo.\n\n"
    )


def test_published_results_are_complete_and_only_for_their_models():
    for temperature in (0.0, 1.0):
        for question_set in DDTREE_QUESTION_SETS:
            for model in ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b-instruct"):
                paper = find_published_result(
                    f"Some/{model.upper()}", temperature, question_set.name
                )
                # "DDTree improves every entry in Table 1"
                assert 1 < paper.chain_speedup < paper.ddtree_speedup < paper.ddtree_tau < 16
                assert paper.chain_speedup < paper.chain_tau < paper.ddtree_tau
    assert find_published_result("Qwen/Qwen3-8B", 0.0, "math500").ddtree_tau == 10.73
    assert find_published_result("/models/Qwen3-8B/", 1.0, "mt-bench").ddtree_speedup == 3.75
    for target, temperature, name in (
        ("Qwen/Qwen3-8B-Base", 0.0, "gsm8k"),
        ("Qwen/Qwen3-8B", 0.6, "gsm8k"),
        ("Qwen/Qwen3-8B", 0.0, "qa"),
    ):
        assert find_published_result(target, temperature, name) is None


def test_there_is_no_column_of_the_paper_where_it_has_nothing(command, tmp_path):
    """Own questions, asked with prompt lookup, which has no weights."""
    (tmp_path / "questions").mkdir()
    for name in ("a", "b"):
        (tmp_path / "questions" / f"{name}.jsonl").write_text(
            json.dumps({"turns": ["Say."]}) + "\n"
        )
    command.suite = SuiteConfig("files", str(tmp_path / "questions"), temperatures=[0.0])
    command.checkpoint = "lookup"
    run_eval(command)
    text = Path(command.out, "suite.md").read_text()
    assert "arXiv" not in text
    best, _ = parse_tables(text)
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
    with pytest.raises(FileNotFoundError, match="nowhere is neither a folder nor an id"):
        run_eval(command)
