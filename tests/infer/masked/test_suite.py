"""Suites of masked diffusion models: the paper's table, ours beside it."""

import pytest

from data.suites import Questions, SuiteConfig, said
from infer.config import EvaluationConfig
from infer.evaluation.results import SuiteResult, read_result
from infer.masked.config import MaskedConfig
from infer.masked.evaluation import evaluation_options
from infer.masked.suite import TABLE, evaluate_masked_suite, masked_suite_table, published_ssd

SETS = ("gsm8k", "math500", "humaneval", "mbpp")  # the columns of the paper's table


def test_the_table_has_ours_and_the_papers(make_masked, tmp_path):
    model = make_masked()
    model.name = "GSAI-ML/LLaDA-8B-Instruct"
    words = {"__call__": lambda self, text: {"input_ids": [ord(c) % 60 for c in text]}, "decode": lambda *_, **__: ""}
    model.tokenizer = type("Words", (), words)()
    sets = [Questions(name, name.upper(), [said([f"Say {n}.", "Not asked."]) for n in range(5)]) for name in SETS]
    sets[0].chats.append(said(["word " * 100]))
    config = SuiteConfig("ddtree", temperatures=[0.0])
    decoding = evaluation_options(EvaluationConfig(max_new_tokens=8), MaskedConfig(block_length=4, cache="dual"))
    result = evaluate_masked_suite(model, sets, config, decoding, tmp_path)
    assert read_result(tmp_path / "suite.json", SuiteResult) == result
    assert [(one.questions, one.answers, one.left_out) for one in result.sets] == [(6, 5, 1), *[(5, 5, 0)] * 3]
    for one in result.sets:
        assert [method.draft_length for method in one.result.methods] == [None, 3, 4, 5]
        assert all(method.same == 5 and method.speedup_interval for method in one.result.methods)
    text = masked_suite_table(result)
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.split("\n") if line.startswith("| ")]
    assert [row[:2] for row in rows[2:]] == [["step by step", "-"]] + [
        row for n in "345" for row in (["self-speculation", n], ["the paper's", n])
    ]
    assert rows[4][2:4] == ["57.04 (2.12x)", "58.1%"] and len({len(row) for row in rows}) == 1
    saved = result.sets[0].result.step_reduction(result.sets[0].result.methods[1])
    assert rows[3][3] == f"{saved:.1%}" and "at least 100%" in text
    lines = []
    evaluate_masked_suite(model, sets, config, decoding, tmp_path, lines.append)
    assert len(lines) == 4 and all("measured before" in line for line in lines)
    with pytest.raises(ValueError, match="no question and 4096 new tokens fit"):
        decoding = evaluation_options(EvaluationConfig(max_new_tokens=4096), MaskedConfig(block_length=4))
        evaluate_masked_suite(model, sets[:1], config, decoding, tmp_path / "long")


def test_the_papers_figures_are_whole():
    models = {line.split(",")[0] for line in TABLE.read_text().splitlines()[1:]}
    assert len(models) == 5
    for model in models:
        for name in SETS:
            found = [published_ssd(f"org/{model.upper()}", length, name) for length in (3, 4, 5)]
            assert all(1.5 < one.speedup < 3.5 and 50 < one.percent_saved < 80 for one in found)
            plain = [one.tokens_per_second / one.speedup for one in found]
            assert max(plain) / min(plain) < 1.03  # all three over the same plain decoding
    assert published_ssd("Dream-org/Dream-v0-Instruct-7B", 5, "mbpp").speedup == 3.46
    assert published_ssd("Dream-org/Dream-v0-Instruct-7B", 2, "mbpp") is None
