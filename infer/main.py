"""`python infer/main.py --config-name COMMAND [overrides]`: all commands that train nothing."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from infer.cli.commands import (
    CheckCommand,
    CompareCommand,
    EvalCommand,
    ExportCommand,
    GenerateCommand,
    NgramCommand,
    RegenerateCommand,
    ServeCommand,
    run_name,
)
from infer.config import MASKED_METHODS, ChatConfig, TargetConfig
from infer.utils.entry import entry


def load(place: TargetConfig, checkpoint: str | None, method: str = "ddtree"):
    """Target and drafter, the drafter in the target's dtype. The drafter is looked at first: it is the cheaper one. An
    n-gram file is a drafter too: of its pairs. A masked diffusion model has none. Raises ValueError, before weights are
    loaded, where the method is for the other kind of model."""
    from infer import load_masked, load_target
    from infer.formats.checkpoint import open_drafter
    from infer.masked.model import is_masked
    from infer.targets.target import load_config

    if method in MASKED_METHODS:
        return load_masked(place.path, place.dtype, place.device, place.trust_remote_code), None
    if is_masked(place.path):
        raise ValueError(
            f"target.path={place.path}: a masked diffusion model has no drafter, and method={method} cannot decode it: "
            "use decoding.method=ssd"
        )
    drafter = None
    if checkpoint is not None:
        layers = load_config(place.path, place.trust_remote_code).get_text_config().num_hidden_layers
        drafter = open_drafter(checkpoint, layers)
    model = load_target(place.path, place.dtype, place.device, place.trust_remote_code)
    if drafter is None:
        return model, None
    drafter.check_target(model)
    return model, drafter.to(model.device, model.dtype)


def progress(done: int, total: int) -> None:
    print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)


def run_eval(config: EvalCommand) -> None:
    if config.suite.name is not None:
        return run_suite(config)
    from data.prompts import held_out_prompts
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.report import table, write_report
    from infer.masked.model import is_masked

    if is_masked(config.target.path):
        return run_eval_masked(config)
    target, drafter = load(config.target, config.checkpoint)
    options = config.evaluation
    prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)

    result = evaluate(target, drafter, prompts, options, progress)
    result |= {"step": None, "checkpoint": config.checkpoint, "drafter": config.checkpoint}
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))
    print(f"\nreport      {write_report(out, [result])}")


def run_eval_masked(config: EvalCommand) -> None:
    from data.prompts import held_out_prompts
    from infer.masked.evaluate import evaluate_masked, masked_options, table

    model, _ = load(config.target, None, "ssd")
    options = config.evaluation
    prompts = held_out_prompts(config.data, model.tokenizer, options.prompts, options.prompt_tokens)
    result = evaluate_masked(model, prompts, masked_options(options, config.masked), progress=progress)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "evaluation.json").write_text(json.dumps(result, indent=1) + "\n")
    print(table(result))


def run_suite(config: EvalCommand) -> None:
    from data.suites import load_suite
    from infer.evaluation.suite import drafter_digest, evaluate_suite
    from infer.evaluation.tables import suite_table
    from infer.utils.files import atomic_write

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    drafter_digest(config.checkpoint)  # is it there? Asked before anything is downloaded or loaded
    suite = load_suite(config.suite)
    target, drafter = load(config.target, config.checkpoint)
    options, out = config.evaluation, Path(config.out)
    result = evaluate_suite(target, drafter, config.checkpoint, suite, config.suite, options, out, say, progress)
    text = suite_table(result)
    atomic_write(out / "suite.md", text + "\n")
    print(f"{text}\n\ntable    {out / 'suite.md'}\nnumbers  {out / 'suite.json'}")


def run_compare(config: CompareCommand) -> None:
    from data.prompts import held_out_prompts
    from infer.evaluation.evaluate import evaluate
    from infer.evaluation.report import comparison, comparison_figure

    options, evaluations = config.evaluation, {}
    loaded = {run_name(checkpoint): load(config.target, checkpoint) for checkpoint in config.checkpoints}
    for name, (target, drafter) in loaded.items():
        print(f"{name}:", file=sys.stderr)
        prompts = held_out_prompts(config.data, target.tokenizer, options.prompts, options.prompt_tokens)
        evaluations[name] = evaluate(target, drafter, prompts, options, progress)
    out = Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(evaluations, indent=1) + "\n")
    some = next(iter(evaluations.values()))
    text = comparison(evaluations)
    (out / "comparison.md").write_text(f"{text}\n\n{some['device']}, {some['prompts']} prompts.\n")
    comparison_figure(evaluations).savefig(out / "comparison.png")
    print(f"{text}\n\ntable    {out / 'comparison.md'}\npicture  {out / 'comparison.png'}")


def run_ngram(config: NgramCommand) -> None:
    from data.packing import token_documents, tokenizer_digest
    from infer.ngrams.count import count_ngrams
    from infer.targets.target import load_config, load_tokenizer

    place = config.target
    tokenizer = load_tokenizer(place.path, place.trust_remote_code)
    theirs = load_config(place.path, place.trust_remote_code)
    vocabulary = max(theirs.get_text_config().vocab_size, len(tokenizer))
    order = config.order or min(6, 64 // vocabulary.bit_length())

    def counted(tokens: int) -> None:
        print(f"\r{tokens:,} tokens", end="", file=sys.stderr, flush=True)

    out = Path(config.out)
    documents = token_documents(config.data, tokenizer)
    digest = tokenizer_digest(tokenizer)
    model = count_ngrams(documents, vocabulary, order, out, digest, config.workers, config.chunk_tokens, counted)
    nodes = sum(model.nodes)
    print(
        f"\n{out}: {model.tokens:,} tokens, {nodes:,} n-grams of up to {order}, {model.size_bytes / 1e6:,.1f} MB "
        f"({model.size_bytes / nodes:.1f} bytes each); use it with continuity={out}"
    )


def run_generate(config: GenerateCommand) -> None:
    from infer import generate

    options = config.decoding
    target, drafter = load(config.target, config.checkpoint, options.method)
    answer = generate(target, drafter, config.prompt, options)
    stats = answer.stats
    print(config.prompt + answer.text)
    print(
        f"\n[{options.method}: {stats.tokens} tokens in {stats.rounds} rounds, τ {stats.tau:.2f}, "
        f"{stats.tokens_per_second:.0f} tokens/s, ended by {answer.finish_reason}]",
        file=sys.stderr,
    )


def run_serve(config: ServeCommand) -> None:
    from infer import open_engine
    from infer.api import positions_of
    from infer.serving.server import serve

    decoding, server = config.decoding, config.server
    target, drafter = load(config.target, config.checkpoint, decoding.method)
    spare = decoding.room(1) - 1  # an answer's last block is a whole one
    capacity = min(server.max_length, positions_of(target) - spare)
    engine = open_engine(target, drafter, decoding, capacity)
    print(
        f"{server.model_name or target.name} at http://{server.host}:{server.port}/v1: {decoding.method}, "
        f"{decoding.rows} texts at a time, {capacity} tokens each; talk to it with ./launch.sh chat",
        file=sys.stderr,
        flush=True,
    )
    serve(engine, server)


def run_regenerate(config: RegenerateCommand) -> None:
    from data.rows import questions
    from infer.api import encode
    from infer.serving.regenerate import Row, by_engine, by_server, options_of, regenerate
    from infer.targets.target import load_tokenizer

    place = config.target
    if config.server is None:
        method = config.decoding.method
        target, drafter = load(place, config.checkpoint if config.decoding.drafts else None, method)
        tokenizer = target.tokenizer
    else:  # the server has the model
        tokenizer = load_tokenizer(place.path, place.trust_remote_code)
    rows = []
    for index, row in enumerate(questions(config.data)):
        prompt = row["messages"] or row["prompt"]
        if not prompt:
            ids = tokenizer(row["text"])["input_ids"][: config.prompt_tokens]
            prompt = tokenizer.decode(ids, skip_special_tokens=True)
        rows.append(Row(index, prompt))
    if config.server is not None:
        answers = by_server(config.server, config.model, config.decoding, config.at_once)
    else:
        longest = max(len(encode(target, row.prompt)) for row in rows)
        answers = by_engine(target, drafter, config.decoding, longest + config.decoding.max_new_tokens)
    settings = {"target": place.path, "server": config.server, "data": asdict(config.data)}
    settings |= {"prompt_tokens": config.prompt_tokens} | options_of(config.decoding)

    def progress(done: int, total: int, failed: int) -> None:
        note = f", {failed} failed" if failed else ""
        print(f"\r{done}/{total} rows{note}", end="\n" if done == total else "", file=sys.stderr, flush=True)

    counts = regenerate(rows, answers, Path(config.out), settings, config.most_failures, progress)
    print(f"{config.out}: {counts['answers']} answers, {counts['failed']} rows failed")


def run_export(config: ExportCommand) -> None:
    from infer import load_drafter, load_target
    from infer.drafters.families import FORMATS
    from infer.evaluation.card import write_card
    from infer.formats.compatibility import check_folder
    from infer.formats.export import check_token, export_drafter, push
    from infer.targets.target import load_config, resolve_path

    if config.push_to_hub is not None:
        check_token()
    place, out, layers, target = config.target, Path(config.out), None, None
    if FORMATS[config.format]:
        layers = load_config(place.path, place.trust_remote_code).get_text_config().num_hidden_layers
    drafter = load_drafter(config.checkpoint, target_layers=layers)
    if FORMATS[config.format] or drafter.embed_tokens is not None or drafter.lm_head is not None:
        target = load_target(place.path, place.dtype, "cpu", place.trust_remote_code, ())  # its two ends
        drafter.check_target(target)
        target.name = config.base_model or resolve_path(place.path)
    export_drafter(drafter, config.format, target, out)
    write_card(config.checkpoint, out, config.license, config.base_model or config.target.path)
    for verdict in check_folder(out):
        print(verdict)
    print(f"\nexport      {out}")
    if config.push_to_hub is not None:
        print(f"uploaded    {push(out, config.push_to_hub)}")


def run_check(config: CheckCommand) -> None:
    from infer.formats.compatibility import check_folder

    verdicts = check_folder(config.path, config.target_layers)
    print("\n".join(map(str, verdicts)))
    if all(verdict.problems for verdict in verdicts):
        raise SystemExit(1)


def run_chat(config: ChatConfig) -> None:
    from infer.serving.chat import chat

    chat(config)


COMMANDS = {
    "eval": (EvalCommand, run_eval),
    "compare": (CompareCommand, run_compare),
    "ngram": (NgramCommand, run_ngram),
    "generate": (GenerateCommand, run_generate),
    "serve": (ServeCommand, run_serve),
    "chat": (ChatConfig, run_chat),
    "regenerate": (RegenerateCommand, run_regenerate),
    "export": (ExportCommand, run_export),
    "check": (CheckCommand, run_check),
}

if __name__ == "__main__":
    flag, name, *overrides = [*sys.argv[1:], "", ""][:2] + sys.argv[3:]
    if flag != "--config-name" or name not in COMMANDS:
        print(f"error: usage: infer/main.py --config-name {'|'.join(COMMANDS)} [overrides]", file=sys.stderr)
        raise SystemExit(2)
    sys.argv[1:] = overrides
    entry(name, *COMMANDS[name], overrides)
