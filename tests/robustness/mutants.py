"""Puts the bugs that other trainers had into a copy of this repository, one at a time, and shows
that a test notices.

    python tests/robustness/mutants.py [words of names]
    python tests/robustness/mutants.py --check          only whether each one still fits the code

Each line: the bug, the test that failed first, seconds. A bug that no test notices is reported, and
the exit code is 1.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
BLOCKS = "tests/train/test_blocks.py"
LOOP = "tests/train/test_loop.py"
CHAT = "tests/data/test_template.py"
TARGETS = "tests/infer/targets/test_families.py"
LAYOUTS = "tests/infer/formats/test_layouts.py"
DIGESTS = "tests/infer/formats/test_integrity.py"
GUARDS = "tests/train/test_guards.py"
FAULTS = "tests/train/test_faults.py"
CONTINUITY = "tests/infer/trees/test_continuity.py"
FAILURES = "tests/infer/serving/test_failures.py"
ADMISSION = "tests/infer/engine/test_admission.py"
SAMPLING = "tests/infer/engine/test_sampling.py"
HF = "tests/infer/serving/test_hf.py"
PROTOCOL = "tests/infer/serving/test_protocol.py"
GUARD = "tests/infer/serving/test_guard.py"
# name, file, (what is there, what is put there) ..., tests to run
MUTANTS = [
    (
        "context leaks at the anchor",
        "infer/attention/masks.py",
        (
            "ends = starts[..., None].expand(-1, -1, width)",
            "ends = 1 + starts[..., None].expand(-1, -1, width)",
        ),
        BLOCKS,
    ),
    (
        "context leaks after the anchor",
        "infer/attention/masks.py",
        (
            "ends = starts[..., None].expand(-1, -1, width)",
            "ends = 2 + starts[..., None].expand(-1, -1, width)",
        ),
        BLOCKS,
    ),
    (
        "a block sees other blocks",
        "infer/attention/masks.py",
        ("first, last = own, own + (", "first, last = own * 0 + length, own + ("),
        BLOCKS,
    ),
    (
        "a block sees other documents",
        "infer/attention/masks.py",
        (
            "begins = opens(documents).gather(1, starts)[..., None]",
            "begins = 0 * starts[..., None]",
        ),
        BLOCKS,
    ),
    (
        "the target sees other documents",
        "infer/attention/masks.py",
        ("begins, places = opens(documents), ", "begins, places = 0 * documents, "),
        BLOCKS,
    ),
    (
        "tapped layers off by one",
        "infer/targets/target.py",
        ("partial(keep, i)", "partial(keep, i + 1)"),
        BLOCKS,
    ),
    (
        "teacher rows off by one",
        "train/blocks.py",
        ("* length + safe - 1", "* length + safe"),
        BLOCKS,
    ),
    (
        "labels off by one",
        "train/blocks.py",
        ("labels=at(ids, safe)", "labels=at(ids, safe - 1)"),
        BLOCKS,
    ),
    (
        "positions of a block off by one",
        "infer/drafters/dflash/model.py",
        (
            "(positions.gather(1, anchors)[..., None] + steps)",
            "(positions.gather(1, anchors)[..., None] + steps + 1)",
        ),
        BLOCKS,
    ),
    (
        "the embedding taken for the head",
        "infer/targets/target.py",
        (
            "return self.model.get_output_embeddings().weight",
            "return self.model.get_input_embeddings().weight",
        ),
        BLOCKS,
    ),
    (
        "padding sees nothing, and -inf makes it NaN",
        "infer/attention/masks.py",
        ("(places + 1).expand_as(begins)", "torch.where(documents < 0, 0, places + 1)"),
        ("torch.finfo(dtype).min", 'float("-inf")'),
        BLOCKS,
    ),
    (
        "slots without an anchor carry loss",
        "train/blocks.py",
        ("supervised = valid[..., None] & (ahead < length)", "supervised = (ahead < length)"),
        BLOCKS,
    ),
    (
        "a batch without anchors divides by zero",
        "train/step.py",
        (".clamp(min=1e-6)", ""),
        LOOP + " -k no_anchor",
    ),
    (
        "gradients depend on the number of processes",
        "train/step.py",
        ("loss * (world * len(micro) / total)", "loss * (len(micro) / total)"),
        LOOP + " -k how_a_step",
    ),
    (
        "each process divides by its own weights",
        "train/step.py",
        ("    dist.all_reduce(supervised)\n", ""),
        LOOP + " -k how_a_step",
    ),
    (
        "a template that rewrites history goes unnoticed",
        "data/template.py",
        ('raise ExcludedExample(NOT_SHOWN, f"message {i}")', "pass"),
        CHAT,
    ),
    (
        "only the last answer carries loss",
        "data/template.py",
        ("for piece in pieces:", "for piece in pieces[-1:]:"),
        CHAT,
    ),
    (
        "questions carry loss",
        "data/template.py",
        ("return Learnt(start, end, answer)", "return Learnt(0, end, answer)"),
        CHAT,
    ),
    (
        "resuming drops the precision of the weights",
        "train/engine.py",
        ("name: torch.float32 if", "name: torch.bfloat16 if"),
        FAULTS + " -k stopped_and_killed",
    ),
    (
        "resuming drops the optimiser's moments",
        "train/run/prepare.py",
        ("        restore(drafter, engine, state)\n", "        pass\n"),
        FAULTS + " -k stopped_and_killed",
    ),
    (
        "DART: a mask sees the masks behind it",
        "infer/drafters/dart/model.py",
        ("attention_patterns = [(True, None)]", "attention_patterns = [(False, None)]"),
        BLOCKS,
    ),
    (
        "DART: an item holds its own token",
        "infer/drafters/dart/model.py",
        ("ids.roll(-1, dims=1)", "ids"),
        BLOCKS,
    ),
    (
        "DART: the last position is forgotten",
        "infer/drafters/dart/model.py",
        ("state.pending[:rows] = ends\n", "pass\n"),
        BLOCKS,
    ),
    (
        "DART: the head's gradient knows no weights",
        "train/objective.py",
        ("drafted.hidden[chunk].to(dtype) * weights", "drafted.hidden[chunk].to(dtype)"),
        "tests/train/test_objective.py",
    ),
    (
        "the shortest context has the last word",
        "infer/ngrams/model.py",
        (
            "for k in range(len(suffixes)):  # a",
            "for k in range(len(suffixes) - 1, -1, -1):  # the",
        ),
        CONTINUITY,
    ),
    (
        "continuity: texts that ended are gone on with",
        "infer/trees/continuity.py",
        ("(ENDED if ends[level, i] else 0.0)", "0.0"),
        CONTINUITY,
    ),
    (
        "continuity: unseen tokens have their unigrams",
        "infer/trees/continuity.py",
        ("np.empty(ranks), np.zeros(ranks)\n", "np.empty(ranks), np.full(ranks, 0.01)\n"),
        CONTINUITY,
    ),
    (
        "a path's probability is not normalised",
        "infer/ngrams/factor.py",
        (
            "norm = highest + np.log(judged) - (min(np.log(drafted), 0.0) if drafted > 0 else LOWEST)",
            "norm = 0.0",
        ),
        CONTINUITY,
    ),
    (
        "a window is one position too long",
        "infer/attention/masks.py",
        ("else positions - width + 1", "else positions - width"),
        TARGETS,
    ),
    (
        "windows count places in the cache",
        "infer/attention/masks.py",
        (
            "(positions[:, None] >= near",
            "(ends[:, None, None] + torch.arange(inside.shape[-1]) >= near",
        ),
        TARGETS,
    ),
    (
        "all kinds of layers get one mask",
        "infer/targets/target.py",
        (
            "attention_mask=found if len(found) > 1 else found.popitem()[1]",
            "attention_mask=found.popitem()[1]",
        ),
        TARGETS,
    ),
    (
        "logits are not capped",
        "infer/targets/target.py",
        ("return self.scale(", "return ("),
        TARGETS,
    ),
    (
        "the cap has no slope",
        "train/objective.py",
        ("delta.mul_(slope)", "pass"),
        "tests/train/test_objective.py -k scaled_logits",
    ),
    (
        "a drafter starts as a layer that looks alike",
        "infer/drafters/warm.py",
        ("return bool((found - expected)", "return True or bool((found - expected)"),
        TARGETS,
    ),
    (
        "padding behind a row's text is looked at",
        "infer/attention/masks.py",
        ("ends[:, None].expand_as(near)", "ends.max().expand_as(near)"),
        TARGETS,
    ),
    (
        "a step that is not finite is taken",
        "train/engine.py",
        ("if not torch.isfinite(norm):", "if False:"),
        GUARDS,
    ),
    (
        "a sliding drafter sees too far",
        "infer/attention/masks.py",
        ("begins = torch.maximum(begins, ends + steps - window + 1)", "pass"),
        BLOCKS,
    ),
    (
        "speculators' layers are counted from 0",
        "infer/drafters/config_keys.py",
        ("[i - first for i in ids]", "ids"),
        LAYOUTS,
    ),
    (
        "a draft vocabulary's rows are tokens",
        "infer/drafters/base.py",
        ("Vocabulary(self.d2t + ", "Vocabulary("),
        LAYOUTS,
    ),
    (
        "a flipped weight is believed",
        "infer/formats/folders.py",
        ("saved != tensor_digest", "False and saved != tensor_digest"),
        DIGESTS,
    ),
    (
        "old caches stay while new ones come",
        "infer/engine/runner.py",
        ("self.memory = self.prompts = self.graphs = self.columns = self.prefixes = None\n", ""),
        FAILURES + " -k old_caches",
    ),
    (
        "a text that cannot be told ends the engine",
        "infer/serving/server.py",
        ('log.exception("a text could not be told")', "raise"),
        FAILURES + " -k 'any_step and tell'",
    ),
    (
        "an engine that is lost leaves the process",
        "infer/serving/server.py",
        ("            self.on_failure()", "            pass"),
        FAILURES + " -k engine_that_is_lost",
    ),
    (
        "a sampled round adjusts all nodes at once",
        "infer/engine/sampling.py",
        (
            "for part in slabs(logits.shape[1], logits[:, 0].numel(), logits.device):",
            "for part in [slice(0, logits.shape[1])]:",
        ),
        SAMPLING + " -k little_more -m robustness",
    ),
    (
        "all prompts are computed before the next round",
        "infer/engine/scheduler.py",
        ("if writing and self.positions is not None:", "if False:"),
        ADMISSION + " -k few_positions",
    ),
    (
        "contexts cost nothing",
        "infer/engine/scheduler.py",
        ("return 1 + round(2 * context / self.runner.target.context_reach) / 2", "return 1"),
        ADMISSION,
    ),
    (
        "texts of one call share their noise",
        "infer/api.py",
        ("derived_seed(options.seed, i) for", "options.seed for"),
        "tests/infer/engine/test_decode.py -k seeds_of_their_own",
    ),
    (
        "regenerated rows share their noise",
        "infer/serving/dialogue.py",
        ("seed=derived_seed(derived_seed(options.seed, row.index), turn)", "seed=options.seed"),
        "tests/infer/serving/test_regenerate.py -k independent_seeds",
    ),
    (
        "a processor of a batch judges a row alone",
        "infer/serving/hf.py",
        ("if not isinstance(processor, BY_ROW):", "if True:"),
        HF + " -k padded_batch",
    ),
    (
        "processors see prefixes behind the end",
        "infer/engine/choices.py",
        (
            "if token is None or text_end(ids, len(ids) - 1, text.options, target) is None:",
            "if True:",
        ),
        SAMPLING + " -k behind_the_end",
    ),
    (
        "threads share a pass's hooks",
        "infer/targets/target.py",
        ("return LOCKS.setdefault(model, threading.RLock())", "return threading.RLock()"),
        TARGETS + " -k threads_share",
    ),
    (
        "hooks stay behind",
        "infer/targets/target.py",
        ("            hook.remove()", "            pass"),
        TARGETS + " -k no_hooks",
    ),
    (
        "byte tokens are given away at once",
        "infer/engine/words.py",
        ('not BYTE.fullmatch(tokenizer.convert_ids_to_tokens(id) or "") and ', ""),
        "tests/infer/engine/test_words.py",
    ),
    (
        "tokens that do not exist are decoded",
        "infer/engine/sequence.py",
        ("if not 0 <= id < vocabulary]", "if False]"),
        SAMPLING + " -k does_not_exist",
    ),
    (
        "requests' unknown fields are ignored",
        "infer/serving/protocol.py",
        ('extra="forbid"', 'extra="ignore"'),
        PROTOCOL,
    ),
    (
        "any name resolves to the local server",
        "infer/serving/guard.py",
        ("if self.local and host and not loopback(hostname(host)):", "if False:"),
        GUARD + " -k names_only",
    ),
    (
        "JetSpec's causal heads are read as bidirectional",
        "infer/drafters/config_keys.py",
        ('CAUSAL = ("is_causal", "causal", "causal_head")', 'CAUSAL = ("is_causal", "causal")'),
        LAYOUTS,
    ),
    (
        "a drafter's unknown keys are ignored",
        "infer/drafters/config_keys.py",
        ("            self.judge_unknown(key, found[key])", "            pass"),
        LAYOUTS + " -k unknown_key",
    ),
    (
        "any model may be the card's base",
        "infer/formats/export.py",
        ("    if wrong:\n        raise", "    if False:\n        raise"),
        "tests/infer/formats/test_export.py -k base_model",
    ),
    (
        "a config.json of any size is read",
        "infer/utils/files.py",
        ("if status.st_size > most:", "if False:"),
        LAYOUTS + " -k never_end",
    ),
    (
        "the walk goes on behind what was refused",
        "infer/engine/choices.py",
        ("reached = (match[:, None] | ~ancestors).all(-1)", "reached = match"),
        "tests/infer/engine/test_verify.py",
    ),
    (
        "a row moves into another hole than is said",
        "infer/engine/scheduler.py",
        ("order.insert(hole, order.pop())", "order.insert(hole, order.pop(0))"),
        ADMISSION,
    ),
    (
        "a captured round keeps what other texts asked",
        "infer/engine/runner.py",
        (
            "if kind != Kind() and self.noted != [(text, len(text.ids)) for text in texts]:",
            "if not self.noted:",
        ),
        "tests/infer/engine/test_capture.py",
    ),
    (
        "a prefix is one block longer than what is kept",
        "infer/engine/runner.py",
        (
            "text.reused = BLOCK * len(text.kept)",
            "text.reused = BLOCK * len(text.kept) + bool(text.kept)",
        ),
        "tests/infer/engine/test_prefixes.py",
    ),
    (
        "what a row did not verify is accepted",
        "infer/trees/tree.py",
        ("tokens=cut.tokens.where(real, -1), real=real", "real=real"),
        "tests/infer/int8_cpu/test_int8.py",
    ),
    (
        "all drafts count as kept",
        "infer/engine/budget.py",
        (
            "np.bincount(accepted, minlength=ACCEPTANCE_BINS)",
            "np.bincount(bins[verified], minlength=ACCEPTANCE_BINS)",
        ),
        "tests/infer/engine/test_engine.py",
    ),
    (
        "of equal prefixes the deepest goes first",
        "infer/kernels/cpu_search.py",
        (
            "key[n] == key[best] and depth[n] < depth[best]",
            "key[n] == key[best] and depth[n] > depth[best]",
        ),
        "tests/infer/trees/test_conditional.py tests/infer/trees/test_continuity.py",
    ),
    (
        "states of recurrent layers stay where the row was",
        "infer/targets/recurrent.py",
        ("kept[to] = kept[source]", "kept[source] = kept[to]"),
        "tests/infer/targets/test_recurrent.py",
    ),
    (
        "a moved row has the length of the row before",
        "infer/attention/kv_cache.py",
        ("in (self.ends, self.forgotten)", "in (self.forgotten,)"),
        "tests/infer/engine/test_decode.py",
    ),
    (
        "a moved row remembers nothing of what it forgot",
        "infer/attention/kv_cache.py",
        ("in (self.ends, self.forgotten)", "in (self.ends,)"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "positions forget what their row forgot",
        "infer/attention/kv_cache.py",
        ("else places + self.forgotten[:rows, None]", "else places"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "a sliding draft reads a column too few",
        "infer/attention/kv_cache.py",
        ("shortest - self.reach + 1)", "shortest - self.reach + 2)"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "gates of a warm start are all open",
        "infer/drafters/warm.py",
        (" * openness(layer, target)}", "}"),
        "tests/infer/drafters/test_warm.py",
    ),
    (
        "nothing is ever disturbed",
        "infer/evaluation/measuring.py",
        ("DISTURBED * statistics.median(paces)", "DISTURBED * max(paces)"),
        "tests/infer/evaluation/test_evaluate.py",
    ),
]


def misfits(mutant: tuple) -> list[str]:
    """Return a sentence for each part of a mutant that no longer fits: a text its file lacks, a
    missing test file."""
    name, file, *changes, tests = mutant
    path = REPO / file
    if not path.is_file():
        return [f"{name}: there is no {file} any more"]
    faults = [
        f"{name}: {file} has no {old!r} any more"
        for old, _ in changes
        if old not in path.read_text()
    ]
    test_file = tests.split()[0]
    return (
        faults
        if (REPO / test_file).is_file()
        else [*faults, f"{name}: there is no {test_file} any more"]
    )


def notice(mutant: tuple) -> str | None:
    """Return the first test that fails with the bug in place, or None. Raises SystemExit if the bug
    no longer fits."""
    name, file, *changes, tests = mutant
    if faults := misfits(mutant):
        raise SystemExit("\n".join([*faults, "mend the list MUTANTS"]))
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        listed = subprocess.run(
            ["git", "ls-files"], cwd=REPO, capture_output=True, text=True, check=True
        ).stdout
        for path in listed.splitlines():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPO / path, copy / path)
        source = (copy / file).read_text()
        for old, new in changes:
            source = source.replace(old, new)
        (copy / file).write_text(source)
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m '' {tests}"
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
        }
        environment["PYTHONPATH"] = str(copy)
        done = subprocess.run(
            command, shell=True, cwd=copy, env=environment, capture_output=True, text=True
        )
        found = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", done.stdout, flags=re.MULTILINE)
        return found[1] if done.returncode == 1 and found else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only bugs whose names have all of these words")
    parser.add_argument(
        "--check", action="store_true", help="say which ones no longer fit the code, run nothing"
    )
    args = parser.parse_args()
    chosen = [mutant for mutant in MUTANTS if all(word in mutant[0] for word in args.words)]
    if args.check:
        faults = [fault for mutant in chosen for fault in misfits(mutant)]
        print("\n".join(faults) or f"all {len(chosen)} fit")
        raise SystemExit(bool(faults))
    missed = 0
    for mutant in chosen:
        began = time.perf_counter()
        test = notice(mutant)
        missed += test is None
        print(
            f"{mutant[0]:<50} {test or 'NOT NOTICED':<70}{time.perf_counter() - began:>5.0f} s",
            flush=True,
        )
    raise SystemExit(min(missed, 1))


if __name__ == "__main__":
    main()
