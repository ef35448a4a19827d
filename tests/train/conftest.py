"""Small training runs in the process of the test, which can replace functions of the run."""

import os
import signal

import pytest

from data.rows import EMBEDDED_TARGET_ANSWERS_FILE

SMALL_RUN_OPTIONS = [
    "data=jsonl",
    f"data.path={EMBEDDED_TARGET_ANSWERS_FILE}",
    "data.length=64",
    "data.max_examples=12",
    "anchors_per_sequence=4",
    "optim.batch_size=2",
    "optim.name=adamw",
    "head=none",
    "drafter.layers=1",
    "evaluation.prompts=1",
    "evaluation.max_prompt_tokens=8",
    "evaluation.max_new_tokens=4",
    "evaluation.budgets=[4]",
    "evaluation.external_prompts=0",
    "evaluation.sampling_temperature=null",
    "checkpoints=1",
]

EVALUATION_PROMPTS: dict[str, list] = {}  # by the arguments of `select_evaluation_prompts`


@pytest.fixture(scope="session")
def small_options(shallow) -> list[str]:
    """The overrides of a run of a few seconds."""
    return [*SMALL_RUN_OPTIONS, f"target.path={shallow}"]


@pytest.fixture
def small(tmp_path, small_options):
    """A function (*overrides) that returns the configuration of a run of a few seconds, in
    `tmp_path/small`."""
    from infer.utils.hydra_app import compose_checked_options
    from train.config import TrainConfig

    options = [*small_options, "count_ngrams=false", "name=small", f"runs_dir={tmp_path}"]
    return lambda *overrides: compose_checked_options("train", TrainConfig, [*options, *overrides])


@pytest.fixture
def run_here(monkeypatch):
    """`train.loop.train`, which also returns the run's folder after a signal stopped the run.

    Environment and signal handlers are restored after the test. The process group stays, because
    DeepSpeed cannot create a second one. Held-out prompts are read once.
    """
    import train.run.evaluation as run_evaluation
    from train.loop import train
    from train.run.folder import run_folder

    original_evaluation_prompts = run_evaluation.select_evaluation_prompts

    def cached_prompts(data, tokenizer, *sizes):
        key = repr((data, *sizes))
        if key not in EVALUATION_PROMPTS:
            EVALUATION_PROMPTS[key] = original_evaluation_prompts(data, tokenizer, *sizes)
        return EVALUATION_PROMPTS[key]

    monkeypatch.setattr(run_evaluation, "select_evaluation_prompts", cached_prompts)
    environment = dict(os.environ)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }

    def train_and_return(config):
        try:
            return train(config)
        except SystemExit as error:  # saved after a signal
            if error.code:
                raise
            return run_folder(config)

    yield train_and_return
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(environment)
