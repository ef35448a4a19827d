"""Put bugs that other trainers had into a copy of this repository, one at a time, and check that a
test fails.

    python tests/robustness/mutants.py [words of names]
    python tests/robustness/mutants.py --check     # only check that each one matches the code

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

MUTANTS_REPOSITORY = Path(__file__).resolve().parents[2]
BLOCKS_TESTS = "tests/train/test_blocks.py"
LOOP_TESTS = "tests/train/test_loop.py"
CHAT_TESTS = "tests/data/test_template.py"
TARGETS_TESTS = "tests/infer/targets/test_families.py"
LAYOUTS_TESTS = "tests/infer/formats/test_layouts.py"
DIGESTS_TESTS = "tests/infer/formats/test_integrity.py"
GUARDS_TESTS = "tests/train/test_guards.py"
FAULTS_TESTS = "tests/train/test_faults.py"
CONTINUITY_TESTS = "tests/infer/trees/test_continuity.py"
FAILURES_TESTS = "tests/infer/serving/test_failures.py"
ADMISSION_TESTS = "tests/infer/engine/test_admission.py"
SAMPLING_TESTS = "tests/infer/engine/test_sampling.py"
HF_TESTS = "tests/infer/serving/test_hf.py"
PROTOCOL_TESTS = "tests/infer/serving/test_protocol.py"
GUARD_TESTS = "tests/infer/serving/test_guard.py"
# (name, file, (old text, new text) ..., tests to run)
KNOWN_MUTANTS = [
    (
        "context leaks at the anchor",
        "infer/attention/masks.py",
        (
            "context_ends = block_start_positions[..., None].expand(-1, -1, block_size)",
            "context_ends = 1 + block_start_positions[..., None].expand(-1, -1, block_size)",
        ),
        BLOCKS_TESTS,
    ),
    (
        "context leaks after the anchor",
        "infer/attention/masks.py",
        (
            "context_ends = block_start_positions[..., None].expand(-1, -1, block_size)",
            "context_ends = 2 + block_start_positions[..., None].expand(-1, -1, block_size)",
        ),
        BLOCKS_TESTS,
    ),
    (
        "a block sees other blocks",
        "infer/attention/masks.py",
        ("block_starts = first_keys\n", "block_starts = first_keys * 0 + context_length\n"),
        BLOCKS_TESTS,
    ),
    (
        "a block sees other documents",
        "infer/attention/masks.py",
        (
            "context_starts = find_document_starts(documents)"
            ".gather(1, block_start_positions)[..., None]",
            "context_starts = 0 * block_start_positions[..., None]",
        ),
        BLOCKS_TESTS,
    ),
    (
        "the target sees other documents",
        "infer/attention/masks.py",
        ("    starts = find_document_starts(documents)\n", "    starts = 0 * documents\n"),
        BLOCKS_TESTS,
    ),
    (
        "tapped layers off by one",
        "infer/targets/target.py",
        ("partial(store_output, layer_id)", "partial(store_output, layer_id + 1)"),
        BLOCKS_TESTS,
    ),
    (
        "teacher rows off by one",
        "train/blocks.py",
        ("* length + clamped_positions - 1", "* length + clamped_positions"),
        BLOCKS_TESTS,
    ),
    (
        "labels off by one",
        "train/blocks.py",
        (
            "labels=gather_tokens(ids, clamped_positions)",
            "labels=gather_tokens(ids, clamped_positions - 1)",
        ),
        BLOCKS_TESTS,
    ),
    (
        "positions of a block off by one",
        "infer/drafters/dflash/model.py",
        (
            "positions.gather(1, anchors)[..., None] + offsets",
            "positions.gather(1, anchors)[..., None] + offsets + 1",
        ),
        BLOCKS_TESTS,
    ),
    (
        "the embedding taken for the head",
        "infer/targets/target.py",
        (
            "return cast(torch.Tensor, self.head_module.weight)",
            "return cast(torch.Tensor, self.embedding.weight)",
        ),
        BLOCKS_TESTS,
    ),
    (
        "padding sees nothing, and -inf makes it NaN",
        "infer/attention/masks.py",
        ("(indices + 1).expand_as(starts)", "torch.where(documents < 0, 0, indices + 1)"),
        ("torch.finfo(dtype).min", 'float("-inf")'),
        BLOCKS_TESTS,
    ),
    (
        "slots without an anchor carry loss",
        "train/blocks.py",
        (
            "supervised = valid[..., None] & (positions < length)",
            "supervised = (positions < length)",
        ),
        BLOCKS_TESTS,
    ),
    (
        "a batch without anchors divides by zero",
        "train/step.py",
        (".clamp(min=1e-6)", ""),
        LOOP_TESTS + " -k no_anchor",
    ),
    (
        "gradients depend on the number of processes",
        "train/step.py",
        ("world_size * len(micro_batches) / total_weight", "len(micro_batches) / total_weight"),
        LOOP_TESTS + " -k how_a_step",
    ),
    (
        "each process divides by its own weights",
        "train/step.py",
        ("    dist.all_reduce(supervised_counts)\n", ""),
        LOOP_TESTS + " -k how_a_step",
    ),
    (
        "a template that rewrites history goes unnoticed",
        "data/template.py",
        ('raise ExcludedExample(ANSWER_CHANGED_EXCLUSION_REASON, f"message {index}")', "pass"),
        CHAT_TESTS,
    ),
    (
        "only the last answer carries loss",
        "data/template.py",
        ("for span in spans:", "for span in spans[-1:]:"),
        CHAT_TESTS,
    ),
    (
        "questions carry loss",
        "data/template.py",
        ("return LossSpan(start, end, answer)", "return LossSpan(0, end, answer)"),
        CHAT_TESTS,
    ),
    (
        "resuming drops the precision of the weights",
        "train/engine.py",
        ("dtype = torch.float32 if", "dtype = torch.bfloat16 if"),
        FAULTS_TESTS + " -k stopped_and_killed",
    ),
    (
        "resuming drops the optimiser's moments",
        "train/run/prepare.py",
        ("        restore_optimizer_state(drafter, engine, state)\n", "        pass\n"),
        FAULTS_TESTS + " -k stopped_and_killed",
    ),
    (
        "DART: a mask sees the masks behind it",
        "infer/drafters/dart/model.py",
        ("attention_patterns = [CAUSAL_PATTERN]", "attention_patterns = [(False, None)]"),
        BLOCKS_TESTS,
    ),
    (
        "DART: an item holds its own token",
        "infer/drafters/dart/model.py",
        ("ids.roll(-1, dims=1)", "ids"),
        BLOCKS_TESTS,
    ),
    (
        "DART: the last position is forgotten",
        "infer/drafters/dart/model.py",
        ("state.pending_features[:rows] = last_features\n", "pass\n"),
        BLOCKS_TESTS,
    ),
    (
        "DART: the head's gradient knows no weights",
        "train/objective.py",
        ("drafted.hidden[rows].to(dtype) * weights", "drafted.hidden[rows].to(dtype)"),
        "tests/train/test_objective.py",
    ),
    (
        "the shortest context has the last word",
        "infer/ngrams/model.py",
        (
            "for k in range(len(suffix_nodes)):\n        child_nodes",
            "for k in range(len(suffix_nodes) - 1, -1, -1):\n        child_nodes",
        ),
        CONTINUITY_TESTS,
    ),
    (
        "continuity: texts that ended are gone on with",
        "infer/trees/continuity.py",
        ("DART_END_TOKEN_SCORE_PENALTY if is_end[level, i] else 0.0", "0.0"),
        CONTINUITY_TESTS,
    ),
    (
        "continuity: unseen tokens have their unigrams",
        "infer/trees/continuity.py",
        ("unigrams = np.zeros(num_candidates)", "unigrams = np.full(num_candidates, 0.01)"),
        CONTINUITY_TESTS,
    ),
    (
        "a path's probability is not normalised",
        "infer/ngrams/rescoring.py",
        ("norm = highest + np.log(rescored_total) - log_drafter_total", "norm = 0.0"),
        CONTINUITY_TESTS,
    ),
    (
        "a window is one position too long",
        "infer/attention/masks.py",
        ("return positions - window + 1", "return positions - window"),
        TARGETS_TESTS,
    ),
    (
        "windows count places in the cache",
        "infer/attention/masks.py",
        (
            "(positions[:, None] >= first",
            "(cached_lengths[:, None, None] + torch.arange(new_key_mask.shape[-1]) >= first",
        ),
        TARGETS_TESTS,
    ),
    (
        "all kinds of layers get one mask",
        "infer/targets/target.py",
        ("if len(additive_masks) == 1:", "if True:"),
        TARGETS_TESTS,
    ),
    (
        "logits are not capped",
        "infer/targets/target.py",
        ("return self.logit_scale(", "return ("),
        TARGETS_TESTS,
    ),
    (
        "the cap has no slope",
        "train/objective.py",
        ("logit_gradient.mul_(logit_scale_derivative)", "pass"),
        "tests/train/test_objective.py -k scaled_logits",
    ),
    (
        "a drafter starts as a layer that looks alike",
        "infer/drafters/warm_start.py",
        ("return bool(difference < allowed", "return True or bool(difference < allowed"),
        TARGETS_TESTS,
    ),
    (
        "padding behind a row's text is looked at",
        "infer/attention/masks.py",
        (
            "cached_lengths[:, None].expand_as(first_positions)",
            "cached_lengths.max().expand_as(first_positions)",
        ),
        TARGETS_TESTS,
    ),
    (
        "a step that is not finite is taken",
        "train/engine.py",
        ("if not torch.isfinite(norm):", "if False:"),
        GUARDS_TESTS,
    ),
    (
        "a sliding drafter sees too far",
        "infer/attention/masks.py",
        (
            "context_starts = torch.maximum(context_starts, context_ends + offsets - window + 1)",
            "pass",
        ),
        BLOCKS_TESTS,
    ),
    (
        "speculators' layers are counted from 0",
        "infer/drafters/config_keys.py",
        ("[layer - first_layer_id for layer in layer_ids]", "layer_ids"),
        LAYOUTS_TESTS,
    ),
    (
        "a draft vocabulary's rows are tokens",
        "infer/drafters/base.py",
        ("tokens = self.d2t + torch.arange(", "tokens = torch.arange("),
        LAYOUTS_TESTS,
    ),
    (
        "a flipped weight is believed",
        "infer/formats/folders.py",
        ("saved != digest_tensors", "False and saved != digest_tensors"),
        DIGESTS_TESTS,
    ),
    (
        "old caches stay while new ones come",
        "infer/engine/runner.py",
        ("self.batch_state: BatchState = None", ""),
        ("self.graphs: CudaGraphs = None", ""),
        ("self.sampling_buffers: SamplingBuffers = None", ""),
        ("self.prefix_cache: PrefixCache | None = None", ""),
        FAILURES_TESTS + " -k old_caches",
    ),
    (
        "tokens that cannot be sent end the engine",
        "infer/serving/worker.py",
        ('log.exception("new tokens could not be sent")', "raise"),
        FAILURES_TESTS + " -k 'any_step and send'",
    ),
    (
        "an engine that is lost leaves the process",
        "infer/serving/worker.py",
        ("            self.on_failure()", "            pass"),
        FAILURES_TESTS + " -k engine_that_is_lost",
    ),
    (
        "a sampled round adjusts all nodes at once",
        "infer/engine/sampling.py",
        (
            "for chunk in iterate_chunks(logits.shape[1], logits[:, 0].numel(), logits.device):",
            "for chunk in [slice(0, logits.shape[1])]:",
        ),
        SAMPLING_TESTS + " -k little_more -m robustness",
    ),
    (
        "all prompts are computed before the next round",
        "infer/engine/scheduler.py",
        ("if running and self.max_batched_positions is not None:", "if False:"),
        ADMISSION_TESTS + " -k few_positions",
    ),
    (
        "contexts cost nothing",
        "infer/engine/scheduler.py",
        ("return 1 + round(2 * relative_length) / 2", "return 1"),
        ADMISSION_TESTS,
    ),
    (
        "texts of one call share their noise",
        "infer/api.py",
        ("derive_seed(options.seed, i) for", "options.seed for"),
        "tests/infer/engine/test_decode.py -k different_seeds",
    ),
    (
        "regenerated rows share their noise",
        "infer/serving/regeneration_task.py",
        ("seed=derive_seed(example_seed, turn)", "seed=options.seed"),
        "tests/infer/serving/test_regenerate.py -k independent_seeds",
    ),
    (
        "a processor of a batch judges a row alone",
        "infer/serving/hf.py",
        ("if isinstance(processor, PrefixConstrainedLogitsProcessor):", "if False:"),
        ("if isinstance(processor, RepetitionPenaltyLogitsProcessor):", "if False:"),
        HF_TESTS + " -k padded_batch",
    ),
    (
        "processors see prefixes behind the end",
        "infer/engine/verification.py",
        ("if depth == 0 or not ends_at_last_token(output_ids, sequence, target):", "if True:"),
        SAMPLING_TESTS + " -k after_the_end",
    ),
    (
        "threads share a pass's hooks",
        "infer/targets/target.py",
        ("return MODEL_LOCKS.setdefault(model, threading.RLock())", "return threading.RLock()"),
        TARGETS_TESTS + " -k threads_share",
    ),
    (
        "hooks stay behind",
        "infer/targets/target.py",
        ("            hook.remove()", "            pass"),
        TARGETS_TESTS + " -k no_hooks",
    ),
    (
        "byte tokens are given away at once",
        "infer/engine/detokenize.py",
        ("if BYTE_TOKEN_PATTERN.fullmatch(token):", "if False:"),
        "tests/infer/engine/test_detokenize.py",
    ),
    (
        "tokens that do not exist are decoded",
        "infer/engine/sequence.py",
        ("if not 0 <= id < vocab_size:", "if False:"),
        SAMPLING_TESTS + " -k does_not_exist",
    ),
    (
        "requests' unknown fields are ignored",
        "infer/serving/messages.py",
        ('extra="forbid"', 'extra="ignore"'),
        PROTOCOL_TESTS,
    ),
    (
        "any name resolves to the local server",
        "infer/serving/guard.py",
        (
            "if self.requires_local_host and host and not is_loopback(parse_hostname(host)):",
            "if False:",
        ),
        GUARD_TESTS + " -k local_names",
    ),
    (
        "JetSpec's causal heads are read as bidirectional",
        "infer/drafters/key_rules.py",
        (
            'CAUSAL_KEYS = ("is_causal", "causal", "causal_head")',
            'CAUSAL_KEYS = ("is_causal", "causal")',
        ),
        LAYOUTS_TESTS,
    ),
    (
        "a drafter's unknown keys are ignored",
        "infer/drafters/config_keys.py",
        ("            self.report_unknown_key(key, values[key])", "            pass"),
        LAYOUTS_TESTS + " -k unknown_key",
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
        ("if status.st_size > max_bytes:", "if False:"),
        LAYOUTS_TESTS + " -k never_end",
    ),
    (
        "the walk goes on behind what was refused",
        "infer/engine/verification.py",
        ("accepted = (match[:, None] | ~ancestors).all(-1)", "accepted = match"),
        "tests/infer/engine/test_verify.py",
    ),
    (
        "a row moves into another hole than is said",
        "infer/engine/scheduler.py",
        ("order.insert(row, order.pop())", "order.insert(row, order.pop(0))"),
        ADMISSION_TESTS,
    ),
    (
        "a captured round keeps what other texts asked",
        "infer/engine/runner.py",
        (
            "if kind != SamplingKind() and self.buffered_sequences != current:",
            "if not self.buffered_sequences:",
        ),
        "tests/infer/engine/test_capture.py",
    ),
    (
        "a prefix is one block longer than what is kept",
        "infer/engine/runner.py",
        (
            "sequence.cached_length = PREFIX_CACHE_BLOCK_TOKENS * len(sequence.prefix_blocks)",
            "sequence.cached_length = PREFIX_CACHE_BLOCK_TOKENS * len(sequence.prefix_blocks) + 1",
        ),
        "tests/infer/engine/test_prefix_cache.py",
    ),
    (
        "what a row did not verify is accepted",
        "infer/trees/tree.py",
        ("tokens=tree.tokens.where(node_mask, -1), node_mask=node_mask", "node_mask=node_mask"),
        "tests/infer/int8_cpu/test_int8.py",
    ),
    (
        "all drafts count as kept",
        "infer/engine/budget.py",
        (
            "np.bincount(accepted_bins, minlength=ACCEPTANCE_BINS)",
            "np.bincount(bins[is_verified], minlength=ACCEPTANCE_BINS)",
        ),
        "tests/infer/engine/test_engine.py",
    ),
    (
        "of equal prefixes the deepest goes first",
        "infer/kernels/cpu_search.py",
        (
            "entry_score[n] == entry_score[best] and node_depth[n] < node_depth[best]",
            "entry_score[n] == entry_score[best] and node_depth[n] > node_depth[best]",
        ),
        "tests/infer/trees/test_conditional.py tests/infer/trees/test_continuity.py",
    ),
    (
        "states of recurrent layers stay where the row was",
        "infer/targets/recurrent.py",
        ("states[destination] = states[source]", "states[source] = states[destination]"),
        "tests/infer/targets/test_recurrent.py",
    ),
    (
        "a moved row has the length of the row before",
        "infer/attention/kv_cache.py",
        ("in (self.device_lengths, self.evicted_counts)", "in (self.evicted_counts,)"),
        "tests/infer/engine/test_decode.py",
    ),
    (
        "a moved row remembers nothing of what it forgot",
        "infer/attention/kv_cache.py",
        ("in (self.device_lengths, self.evicted_counts)", "in (self.device_lengths,)"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "positions forget what their row forgot",
        "infer/attention/kv_cache.py",
        ("return indices + self.evicted_counts[:num_rows, None]", "return indices"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "a sliding draft reads a column too few",
        "infer/attention/kv_cache.py",
        ("min_length - self.sliding_window + 1)", "min_length - self.sliding_window + 2)"),
        "tests/infer/drafters/test_window.py",
    ),
    (
        "gates of a warm start are all open",
        "infer/drafters/warm_start.py",
        ('weights["self_attn.o_proj.weight"] * gates', 'weights["self_attn.o_proj.weight"]'),
        "tests/infer/drafters/test_warm_start.py",
    ),
    (
        "nothing is ever disturbed",
        "infer/evaluation/measurement.py",
        (
            "MIN_TIME_RATIO_TO_REMEASURE * statistics.median(seconds_per_token)",
            "MIN_TIME_RATIO_TO_REMEASURE * max(seconds_per_token)",
        ),
        "tests/infer/evaluation/test_evaluate.py",
    ),
]


def find_misfits(mutant: tuple) -> list[str]:
    """Return a message for each old text that the file lacks, and for a missing test file."""
    name, file, *changes, tests = mutant
    path = MUTANTS_REPOSITORY / file
    if not path.is_file():
        return [f"{name}: there is no {file} any more"]
    misfits = [
        f"{name}: {file} has no {old!r} any more"
        for old, _ in changes
        if old not in path.read_text()
    ]
    test_file = tests.split()[0]
    return (
        misfits
        if (MUTANTS_REPOSITORY / test_file).is_file()
        else [*misfits, f"{name}: there is no {test_file} any more"]
    )


def find_failing_test(mutant: tuple) -> str | None:
    """Return the first test that fails with the bug, or None.

    Raises SystemExit if the bug no longer matches the code.
    """
    name, file, *changes, tests = mutant
    if misfits := find_misfits(mutant):
        raise SystemExit(
            "\n".join([*misfits, "update the list KNOWN_MUTANTS in tests/robustness/mutants.py"])
        )
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        listed = subprocess.run(
            ["git", "ls-files"], cwd=MUTANTS_REPOSITORY, capture_output=True, text=True, check=True
        ).stdout
        for path in listed.splitlines():
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(MUTANTS_REPOSITORY / path, copy / path)
        source = (copy / file).read_text()
        for old, new in changes:
            source = source.replace(old, new)
        (copy / file).write_text(source)
        command = f"{sys.executable} -m pytest -x -q -p no:cacheprovider -m '' {tests}"
        environment = {
            key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
        }
        environment["PYTHONPATH"] = str(copy)
        process = subprocess.run(
            command, shell=True, cwd=copy, env=environment, capture_output=True, text=True
        )
        match = re.search(r"^(?:FAILED|ERROR) \S+::(\S+)", process.stdout, flags=re.MULTILINE)
        return match[1] if process.returncode == 1 and match else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("words", nargs="*", help="only bugs whose names have all of these words")
    parser.add_argument(
        "--check", action="store_true", help="only list bugs that no longer match the code"
    )
    args = parser.parse_args()
    selected = [mutant for mutant in KNOWN_MUTANTS if all(word in mutant[0] for word in args.words)]
    if args.check:
        misfits = [misfit for mutant in selected for misfit in find_misfits(mutant)]
        print("\n".join(misfits) or f"all {len(selected)} fit")
        raise SystemExit(bool(misfits))
    missed = 0
    for mutant in selected:
        start_time = time.perf_counter()
        test = find_failing_test(mutant)
        missed += test is None
        print(
            f"{mutant[0]:<50} {test or 'NOT NOTICED':<70}"
            f"{time.perf_counter() - start_time:>5.0f} s",
            flush=True,
        )
    raise SystemExit(min(missed, 1))


if __name__ == "__main__":
    main()
