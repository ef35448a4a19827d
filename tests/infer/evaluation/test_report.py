"""Evaluation and its report: numbers that add up, pictures that are pictures, a page that needs no
network."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from data.prompts import Prompt
from infer.config import DrafterConfig, EvaluationConfig
from infer.drafters.build import create_drafter
from infer.evaluation import report
from infer.evaluation.charts import build_budget_charts, build_tau_chart
from infer.evaluation.evaluate import evaluate
from infer.evaluation.report import RunDescription, write_report
from infer.evaluation.results import (
    Evaluation,
    ExampleNode,
    ExampleRound,
    MethodResult,
    TextSample,
    read_result,
    to_json,
    write_result,
)
from infer.evaluation.tables import format_evaluation, format_findings, list_findings

REPORT_TEMPLATE = (Path(report.__file__).parent / "report.html.j2").read_text()


def make_evaluation(step: int, speedup: float = 1.4, identical: bool = True) -> Evaluation:
    methods = [
        MethodResult(
            name=name,
            budget=budget,
            tau=tau + step / 1000 * (budget > 0),
            tau_prompt_mean=tau,
            rounds=321,
            tokens=500,
            seconds=4.0,
            tokens_per_second=123.4,
            speedup=1.0 if name == "plain" else speedup,
            histogram=[321] if name == "plain" else [100, 100, 121, 0, 0, 0, 0, 0],
            identical=identical or name != "ddtree",
        )
        for name, budget, tau in (
            ("plain", 0, 1.0),
            ("chain", 7, 1.8),
            ("ddtree", 16, 2.2),
            ("ddtree", 64, 2.7),
        )
    ]
    return Evaluation(
        step=step,
        checkpoint=f"runs/x/step-{step}",
        target="embedded",
        device="CPU, 2 threads",
        dtype="float32",
        prompts=16,
        max_new_tokens=128,
        temperature=0.0,
        block_size=8,
        methods=methods,
        samples=[
            TextSample(
                "<script>alert(1)</script>",
                "a < b&;",
                [2],
                [["a < b", "accepted"], ["<c>", "rejected"], ["&", "corrected"], [";", "bonus"]],
            )
        ],
        example=ExampleRound(
            "def f",
            [
                ExampleNode("(", 0, 1.0, True),
                ExampleNode("<x", 0, 0.6, False),
                ExampleNode("a", 0, 0.3, True),
            ],
            "&",
        ),
    )


class ParsedPage(HTMLParser):
    """The open tags, links and tag names of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open = []
        self.sources = []
        self.tags = set()
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.sources += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img", "br", "link"):  # SVG closes its own
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_report_is_one_page_with_pictures_and_no_network(tmp_path):
    run = RunDescription(
        "./launch.sh drafter=dart",
        {"optim": {"lr": 0.004}},
        "stdlib",
        [(i, 9 / i) for i in range(1, 400)],
        251,
    )
    page = write_report(
        tmp_path,
        [make_evaluation(300), make_evaluation(100), make_evaluation(200)],
        ["An <odd> note."],
        run,
    )
    text = page.read_text()
    parsed = ParsedPage(text)
    assert parsed.open == []
    assert parsed.sources == [] and not parsed.tags & {"script", "img", "iframe", "link"}
    assert text.count("<svg") - text.count('aria-hidden="true"') == text.count(
        'role="img" aria-label="'
    ) + text.count('role="img" class="tree"')
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in text
    for expected in (
        "drafter=dart",
        "optim.lr",
        "0.004",
        "stdlib",
        ">4 min<",
        "CPU, 2 threads",
        "An &lt;odd&gt; note.",
    ):
        assert expected in text
    for title in (
        "τ during training",
        "Loss during training",
        "speedup over the baseline, by node budget",
    ):
        assert f"<figcaption>{title}" in text
    assert "http" not in text
    assert "&lt;script&gt;alert(1)" in text
    assert "runs/x/step-300" in text  # the best of the three in detail
    assert (
        "τ during training"
        not in write_report(tmp_path / "alone", [make_evaluation(0)]).read_text()
    )


def test_no_difference_is_in_colour_alone(tmp_path):
    """Kinds of tokens differ by marks and underlines too, and lines of charts by dashes."""
    text = write_report(tmp_path, [make_evaluation(1), make_evaluation(2)]).read_text()
    assert (
        '<del class="rejected">&lt;c&gt;</del>' in text
        and '<span class="corrected">&amp;</span>' in text
    )
    for kind, style in (("accepted", "underline"), ("corrected", "italic"), ("bonus", "700")):
        rule = rf"\.{kind}[^{{]*{{[^}}]*{style}"
        assert re.search(rule, REPORT_TEMPLATE), kind
    for sign, kind in (("✓ a", "accepted"), ("✗ &lt;x", "rejected"), ("+ &amp;", "added")):
        assert f'class="{kind} token">{sign}</text>' in text
    assert "A draft tree of 2 tokens after &#39;(&#39;. Accepted tokens: &#39;a&#39;." in text
    # a label is on the side of its line that the line does not come from
    assert re.findall(
        r'<text x="(\d+)"( text-anchor="end")? y="\d+" class="share">(\S+)<', text
    ) == [("37", ' text-anchor="end"', "60%"), ("119", "", "30%")]
    chart = re.search(r"<figure>.*?</figure>", text, re.DOTALL)[0]
    dashes = [
        re.search('stroke-dasharray="([^"]*)"', line)
        for line in re.findall("<polyline[^>]*>", chart)
    ]
    assert len({dash and dash[1] for dash in dashes}) == len(dashes) == 3


def test_table_holds_the_numbers():
    cells = [
        cell.strip() for cell in format_evaluation(make_evaluation(0)).splitlines()[5].split("|")
    ]
    assert cells[1:-1] == ["DDTree 64", "2.70", "123.4", "1.40x", "yes"]
    assert format_evaluation(make_evaluation(0, identical=False)).splitlines()[5].endswith(" NO |")


def test_the_headline_says_tau_then_this_machine_then_gpus():
    """Engines verify chains: their τ is the first sentence, even if n-grams are faster."""
    methods = {method.label: method for method in make_evaluation(0).methods}
    with_ngrams = replace(methods["DDTree 64"], name="ddtree+ngrams", tau=3.1, speedup=1.9)
    ngrams_alone = replace(with_ngrams, name="n-grams alone", tau=3.0, speedup=0.8)
    all_methods = [*methods.values(), with_ngrams, ngrams_alone]
    result = replace(make_evaluation(0), methods=all_methods, prompts=1)
    tau, machine, meaning, outputs = list_findings(result)
    assert tau == (
        "A pass of the target adds τ = 1.80 tokens on average with a chain of 7 drafted tokens and "
        "2.20 with DDTree 16 (a tree of 16 drafted tokens); without a drafter it adds 1 token, and "
        "τ does not depend on the machine."
    )
    assert "at most 1.80 times as fast" in meaning and "a pass over 16 tokens" in meaning
    assert machine == (
        "On this machine (CPU, 2 threads) the chain is 1.40 times as fast as plain decoding "
        "(without a drafter), DDTree 16 is 1.40 times as fast, DDTree + n-grams 64 is 1.90 times "
        "as fast, n-grams alone 64 is 0.80 times as fast (slower); a round with DDTree 16 "
        "(drafting and one pass of the target) takes 1.6 times as long as a pass without a "
        "drafter, so 2.20 tokens per round give a speedup of 1.40."
    )
    assert outputs == "On the one prompt the output of every method equals that of plain decoding."
    assert format_findings(result) == " ".join(list_findings(result))
    assert result.best_drafter_method == with_ngrams


@pytest.mark.parametrize(
    "fields, title",
    [
        ({}, "A drafter (step 300) for embedded, CPU, 2 threads"),
        (
            {"drafter": "mine", "date": "2026-11-28"},
            "Drafter mine (step 300) for embedded, 2026-11-28, CPU, 2 threads",
        ),
        ({"drafter": "runs/mine", "step": None}, "Drafter runs/mine for embedded, CPU, 2 threads"),
    ],
)
def test_a_reports_title_names_drafter_target_day_and_machine(tmp_path, fields, title):
    text = write_report(tmp_path, [replace(make_evaluation(300), **fields)]).read_text()
    assert f"<title>{title}</title>" in text and f"<h1>{title}</h1>" in text
    lead = re.search('<p class="lead">(.*)</p>', text)[1]
    assert lead.count(". ") == 2 and lead.endswith("."), "three sentences"


@pytest.mark.parametrize("rounds, has_error_bars", [(49, False), (50, True)])
def test_error_bars_need_enough_rounds(rounds, has_error_bars):
    evaluation = make_evaluation(0)
    methods = [
        replace(method, rounds=rounds, tau_interval=[1.0, 3.0], speedup_interval=[1.0, 2.0])
        for method in evaluation.methods
    ]
    evaluation = replace(evaluation, methods=methods)
    charts = [*build_budget_charts({"": evaluation}), build_tau_chart([evaluation])]
    for chart in charts:
        intervals = [interval for line in chart.lines for interval in line.intervals]
        assert intervals and all((each is not None) == has_error_bars for each in intervals)


def test_the_headline_reports_slowdowns_and_wrong_outputs():
    assert "1.40 times as fast" in format_findings(make_evaluation(0))
    assert "equals that of plain decoding" in format_findings(make_evaluation(0))
    assert "0.80 times as fast (slower)" in format_findings(make_evaluation(0, speedup=0.8))
    wrong = format_findings(make_evaluation(0, identical=False))
    assert "DDTree 16, DDTree 64 differ" in wrong
    assert "exactly" not in wrong


def check_samples(result: Evaluation) -> None:
    """Check that pieces add up to the completions, and that the example is a tree with one accepted
    path."""
    sample, _ = result.samples
    assert "".join(text for text, kind in sample.pieces if kind != "rejected") == sample.completion
    assert any(kind == "rejected" for _, kind in sample.pieces)
    assert sum(sample.accepted) == 9

    nodes = result.example.nodes
    assert nodes[0].parent == 0
    assert nodes[0].accepted
    assert 1 < len(nodes) <= 9
    for i, node in enumerate(nodes[1:], 1):
        assert node.parent < i
        assert 0 < node.probability <= 1.0001
    accepted_parents = [node.parent for node in nodes[1:] if node.accepted]
    assert all(nodes[parent].accepted for parent in accepted_parents)
    assert len(set(accepted_parents)) == len(accepted_parents)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_evaluation_adds_up(shallow_target, temperature):
    drafter = create_drafter(DrafterConfig(layers=1, block_size=4), shallow_target)
    drafter.init_weights(torch.Generator().manual_seed(0))
    ids = [
        shallow_target.tokenizer(text)["input_ids"]
        for text in ("The path of ", "class Reader:\n    ")
    ]
    prompts = [
        Prompt(ids[0], "heads"),
        Prompt(ids[1], "bodies"),
        Prompt(ids[1], "prose", "outside"),
    ]
    config = EvaluationConfig(
        max_new_tokens=9, budgets=[2, 30], temperature=temperature, sampling_temperature=0.7
    )
    calls = []
    result = evaluate(
        shallow_target, drafter, prompts, config, lambda done, total: calls.append((done, total))
    )
    total = 3 if temperature else 4
    assert calls == [(done, total) for done in range(1, total + 1)]
    other_names = ["outside"] if temperature else ["outside", "temperature 0.7"]
    assert [each.prompt_set_name for each in result.other_evaluations] == other_names
    assert result.same_output
    assert [(method.name, method.budget) for method in result.methods] == [
        ("plain", 0),
        ("generate", 0),
        ("chain", 3),
        ("ddtree", 2),
        ("ddtree", 30),
        ("n-grams alone", 30),
    ]
    assert result.methods[1].identical is (None if temperature else True)
    assert (
        result.fastest_baseline.name in ("plain", "generate")
        and result.fastest_baseline.speedup == 1
    )
    for method in result.methods:
        assert [prompt.kind for prompt in method.prompts] == ["heads", "bodies"]
        assert method.tokens == 18
        assert sum(method.histogram) == method.rounds
        assert method.tau == pytest.approx(16 / method.rounds)
    assert result.methods[0].tau == result.methods[1].tau == 1
    replayed = result.tree_study.results if result.tree_study else ()
    replayed_taus = {
        (each.method, each.nodes): each.tau for each in replayed if each.ranking == "drafter"
    }
    assert bool(replayed) == (temperature == 0)
    for method in result.methods:
        assert method.tau == replayed_taus.get((method.name, method.budget), method.tau)
    assert ("| replayed" in format_evaluation(result)) == (temperature == 0)
    assert "redacted" not in json.dumps(to_json(result))
    check_samples(result)


def test_an_evaluation_is_read_as_it_was_written(tmp_path):
    """Fields that are None are left out, unknown keys are ignored, and a file with other content is
    refused by name."""
    for evaluation in (make_evaluation(3), replace(make_evaluation(0), step=None)):
        write_result(tmp_path / "evaluation.json", evaluation)
        assert read_result(tmp_path / "evaluation.json", Evaluation) == evaluation
        data = json.loads((tmp_path / "evaluation.json").read_text())
        assert data == to_json(evaluation) and "step" in data
        assert "ties" not in data["methods"][0] and "masked" not in data
        (tmp_path / "evaluation.json").write_text(json.dumps(data | {"newer": 1}))
        assert read_result(tmp_path / "evaluation.json", Evaluation) == evaluation
    (tmp_path / "evaluation.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"evaluation\.json does not contain a result of the type Evaluation \(.*target",
    ):
        read_result(tmp_path / "evaluation.json", Evaluation)


def test_an_evaluation_of_an_earlier_commit_is_read(tmp_path):
    """The keys of evaluation.json as commit 8ca1fa3 wrote them, and more keys of ad9898d."""
    method = {
        "name": "plain",
        "budget": 0,
        "tau": 1.0,
        "tau_prompt_mean": 1.0,
        "rounds": 3,
        "tokens": 4,
    }
    method |= {"seconds": 0.5, "tokens_per_second": 8.0, "speedup": 1.0, "histogram": [3]}
    method |= {"identical": True}
    prompt = {
        "number": 0,
        "kind": "a",
        "batch": 0,
        "tokens": 4,
        "rounds": 3,
        "seconds": [0.9, 0.5],
        "looped": 0,
    }
    newer = {
        "limit": 2.0,
        "again": 1,
        "stage_seconds": {"prefill": 0.1},
        "prompts": [prompt],
        "tau_interval": [1, 1],
    }
    data = {
        "target": "embedded",
        "device": "CPU",
        "dtype": "float32",
        "prompts": 1,
        "rows": 1,
        "prompt_tokens": 96,
    }
    data |= {"max_new_tokens": 128, "temperature": 0.0, "block_size": 8, "accuracy": [0.5, 0.25]}
    data |= {
        "methods": [
            method,
            method | {"name": "ddtree", "budget": 4, "ties": 1, "defects": 0} | newer,
        ]
    }
    data |= {
        "samples": [
            {"prompt": "a", "completion": "bc", "accepted": [1, 1], "pieces": [["b", "bonus"]]}
        ]
    }
    for step in (1275, None):
        (tmp_path / "old.json").write_text(
            json.dumps(data | {"step": step, "checkpoint": "step-1", "drafter": "x"})
        )
        evaluation = read_result(tmp_path / "old.json", Evaluation)
        assert (evaluation.step, evaluation.methods[1].label) == (step, "DDTree 4")
        assert evaluation.methods[1].prompts[0].seconds == [0.9, 0.5]
        written = to_json(evaluation)
        assert written["samples"] == data["samples"] and written["methods"][0] == method
        assert "DDTree 4" in write_report(tmp_path, [evaluation]).read_text()
