"""The command `eval`: measures the speedup of a drafter or of a masked diffusion model.

A drafter is measured on held-out prompts or on a suite of question sets. A running server is
measured on a suite of question sets.
"""

import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from pkgutil import resolve_name
from typing import ClassVar, cast

from data.rows import DataConfig, refuse_embedded_answers
from data.suites import SuiteConfig
from infer.cli.models import CommandWithDrafter, MaskedConfig, load_target_and_drafter
from infer.config import EvaluationConfig
from infer.evaluation.tables import format_findings
from infer.targets.masked_models import MASKED_DIFFUSION_TARGET_KIND, is_masked_diffusion
from infer.utils.checks import require_http_address
from infer.utils.progress import Progress


@dataclass
class CommandWithData(CommandWithDrafter):
    """Options of a command that decodes prompts from held-out examples of a data set.

    data: see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    """

    OPTION_SECTIONS_TAKEN_FROM_RUN: ClassVar[tuple[str, ...]] = ("target", "data")
    data: DataConfig = field(default_factory=DataConfig, kw_only=True)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig, kw_only=True)


@dataclass
class EvalCommand(CommandWithData):
    """Evaluate a drafter on held-out prompts, as training does at a checkpoint, or on a suite of
    question sets. If the target is a masked diffusion model, measure that model's speedup. With
    url, measure a running server.

    checkpoint: a drafter folder, a training checkpoint, or the name of a target whose drafter this
        repository contains (embedded, smollm2). lookup means prompt lookup, which drafts the
        continuation of an earlier n-gram of the sequence. The default is the drafter in the
        target's folder
    out: folder for the report and the results as JSON
    target: see TargetConfig in infer/config.py
    drafter: see DrafterLoadConfig in infer/config.py
    data: held-out prompts, see DataConfig in data/rows.py
    evaluation: see EvaluationConfig in infer/config.py
    suite: question sets that are used instead of data, see SuiteConfig in data/suites.py. The
        options of evaluation apply to them, except evaluation.prompts,
        evaluation.external_prompts and evaluation.max_prompt_tokens
    masked: only if the target is a masked diffusion model, see MaskedConfig in
        infer/masked/config.py
    url: address of a running server of vLLM, SGLang, llama.cpp or of this project, which is
        measured on the question sets of suite. The options checkpoint, target, drafter, data and
        masked then have no effect, because no model is loaded. null means that no server is
        measured
    baseline: only with url: address of a server of the same model without a drafter, to compute the
        speedup
    served_model: only with url: name of the model on the server. null means the server's first
        model. From the baseline, the model of the same name is requested, or else its first model
    concurrency: only with url: numbers of requests at a time; every question set is measured with
        each of them
    """

    checkpoint: str = "${target.path}"
    out: str = "runs/evaluation"
    suite: SuiteConfig = field(default_factory=SuiteConfig)
    masked: MaskedConfig = field(default_factory=MaskedConfig)
    url: str | None = None
    baseline: str | None = None
    served_model: str | None = None
    concurrency: list[int] = field(default_factory=lambda: [1])

    def check(self) -> None:
        """Raise ValueError for invalid options."""
        super().check()
        require_http_address(self, "url", "baseline")
        if self.url is None:
            for name in ("baseline", "served_model"):
                value = getattr(self, name)
                if value is not None:
                    raise ValueError(
                        f"{name}={value} needs a server: add url=<the address of a server>"
                    )
            return
        if self.suite.name is None:
            raise ValueError(
                f"url={self.url}: a server is measured on question sets; add suite=ddtree, "
                "suite=speed_bench, or suite=files with suite.folder=<your question sets>"
            )
        if self.baseline == self.url:
            raise ValueError(
                f"baseline={self.baseline} is the address of url; give the address of a second "
                "server, which serves the same model without a drafter"
            )
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(
                f"concurrency={list(self.concurrency)}: give one or more numbers of requests at a "
                "time, each at least 1, such as concurrency=[1,8,32]"
            )


def run(config: EvalCommand) -> None:
    """Evaluate the drafter or the masked diffusion model. Write the results, and print a table.

    A report is also written for a drafter.
    """
    if config.url is not None:
        run_served(config)
        return
    if config.suite.name is not None:
        run_suite(config)
        return
    from data.prompts import describe_prompt_shortage, select_evaluation_prompts
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.report import RunDescription, write_report
    from infer.evaluation.results import write_result
    from infer.evaluation.tables import format_evaluation
    from infer.utils.errors import redacted_command_line
    from infer.utils.redact import redact

    options = config.evaluation
    out = Path(config.out)
    masked = is_masked_diffusion(config.target.path)
    if not masked:
        refuse_embedded_answers(
            config.data, config.target.path, ", or suite=files with suite.folder=<question sets>"
        )
    target, drafter = load_target_and_drafter(config.target, config.checkpoint, config.drafter)
    outside = 0 if masked else options.external_prompts
    prompts = select_evaluation_prompts(
        config.data, target.tokenizer, options.prompts, options.max_prompt_tokens, outside
    )
    held_out_count = sum(prompt.report_group is None for prompt in prompts)
    warning = describe_prompt_shortage(held_out_count, options.prompts)
    if warning:
        print(warning, file=sys.stderr)
    progress = Progress("evaluating", "prompts", minutes=options.max_minutes)
    if masked:
        prompt_ids = [prompt.ids for prompt in prompts]
        result = resolve_name(MASKED_DIFFUSION_TARGET_KIND.evaluate)(
            target, prompt_ids, options, config.masked, progress
        )
    else:
        result = evaluate(target, drafter, prompts, options, progress)
        result = replace(result, checkpoint=config.checkpoint, drafter=config.checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "evaluation.json", result)
    print(format_evaluation(result))
    if not masked:
        data_name = config.data.source
        if config.data.path:
            data_name += f" {config.data.path}"
        settings = cast(dict[str, object], redact(asdict(config)))
        facts = RunDescription(redacted_command_line(), settings, data_name)
        report_path = write_report(out, [result], run=facts)
        print(f"\n{format_findings(result)}\n\nreport      {report_path}")


def run_suite(config: EvalCommand) -> None:
    """Measure a drafter on a suite of question sets. Write the results and print a table."""
    from data.suites import load_suite
    from infer.evaluation.published import format_suite
    from infer.evaluation.suite import drafter_digest, evaluate_suite
    from infer.utils.files import atomic_write

    out = Path(config.out)
    progress = Progress("asking", "questions")
    if is_masked_diffusion(config.target.path):
        raise ValueError(
            f"suite={config.suite.name} works with causal targets only, and "
            f"target.path={config.target.path} is a masked diffusion model: evaluate it on "
            "prompts with data=jsonl"
        )
    # The returned digest is not used. The call raises an error if the checkpoint is missing, before
    # question sets are downloaded and models are loaded.
    drafter_digest(config.checkpoint)
    suite = load_suite(config.suite)
    target, drafter = load_target_and_drafter(config.target, config.checkpoint, config.drafter)
    result = evaluate_suite(
        target,
        drafter,
        config.checkpoint,
        suite,
        config.suite,
        config.evaluation,
        out,
        progress.print_line,
        progress,
    )
    table = format_suite(result)
    atomic_write(out / "suite.md", table + "\n")
    print(f"{table}\n\ntable    {out / 'suite.md'}\nresults  {out / 'suite.json'}")


def run_served(config: EvalCommand) -> None:
    """Measure a running server on a suite of question sets. Write the results and print a table.

    If the server fails or the user presses Ctrl-C, the results until then are written and printed.
    Raises RunAborted or KeyboardInterrupt after that.
    """
    from data.suites import load_suite
    from infer.evaluation.results import SuiteResult, read_result, write_result
    from infer.evaluation.served import INTERRUPTED_BY_USER, measure_servers
    from infer.evaluation.served_results import format_served
    from infer.evaluation.server_requests import (
        RequestRefused,
        ServerFailure,
        connect_to_server,
    )
    from infer.utils.errors import RunAborted
    from infer.utils.files import atomic_write

    assert config.url is not None
    out = Path(config.out)
    thinking = config.suite.thinking
    servers = [connect_to_server("url", config.url, config.served_model, None, thinking)]
    if config.baseline is not None:
        # The baseline may serve the same model under another name.
        model = servers[0].model
        servers.append(connect_to_server("baseline", config.baseline, None, model, thinking))
    question_sets = load_suite(config.suite)
    progress = Progress("asking", "questions", minutes=config.evaluation.max_minutes)
    try:
        result = measure_servers(
            servers,
            question_sets,
            config.suite,
            config.evaluation,
            config.concurrency,
            progress.print_line,
            progress,
        )
    except RequestRefused as error:
        raise ValueError(str(error)) from error
    except ServerFailure as error:
        raise RunAborted(f"{error}; start the server again, and repeat the command") from error
    if not result.sets:
        raise KeyboardInterrupt("nothing was measured")

    evaluated_sets = []
    if (out / "suite.json").exists():
        evaluated_sets = read_result(out / "suite.json", SuiteResult).sets
    out.mkdir(parents=True, exist_ok=True)
    write_result(out / "served.json", result)
    table = format_served(result, evaluated_sets)
    atomic_write(out / "served.md", table + "\n")
    progress.end_open_line()
    print(f"{table}\n\ntable    {out / 'served.md'}\nresults  {out / 'served.json'}")
    if result.interruption == INTERRUPTED_BY_USER:
        raise KeyboardInterrupt(f"what was measured before is in {out / 'served.json'}")
    if result.interruption is not None:
        raise RunAborted(
            f"{result.interruption}; what was measured before is in {out / 'served.json'}"
        )
