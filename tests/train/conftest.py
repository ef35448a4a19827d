"""Small runs within the test's own process: what a test breaks by hand, they meet."""

import os
import signal

import pytest

from data.rows import ANSWERS

SMALL = [
    "data=jsonl",
    f"data.path={ANSWERS}",
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

PROMPTS: dict[str, list] = {}  # held-out ones, by what they follow from


@pytest.fixture(scope="session")
def small_options(shallow) -> list[str]:
    """The overrides of a run of seconds, for a test that starts a process of its own."""
    return [*SMALL, f"target.path={shallow}"]


@pytest.fixture
def small(tmp_path, small_options):
    """(overrides) -> the configuration of a run of seconds, `tmp_path/small`."""
    from infer.utils.hydra_app import compose_options as composed
    from train.config import TrainConfig

    own = [*small_options, "count_ngrams=false", "name=small", f"runs_dir={tmp_path}"]
    return lambda *overrides: composed("train", TrainConfig, [*own, *overrides])


@pytest.fixture
def run_here(monkeypatch):
    """`train.loop.train`, which returns the run's folder also where a signal ended it, and leaves
    environment and signals to the next test as they were; the process group stays, DeepSpeed can
    found none anew. Held-out prompts are read once."""
    import train.run.evaluation as hooks
    from train.loop import train
    from train.run.folder import run_folder

    plain = hooks.evaluation_prompts

    def prompts(data, tokenizer, *sizes):
        key = repr((data, *sizes))
        if key not in PROMPTS:
            PROMPTS[key] = plain(data, tokenizer, *sizes)
        return PROMPTS[key]

    monkeypatch.setattr(hooks, "evaluation_prompts", prompts)

    before = dict(os.environ)
    handlers = {
        number: signal.getsignal(number)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    }

    def train_and_return(config):
        try:
            return train(config)
        except SystemExit as end:  # stopped by a signal, and saved
            if end.code:
                raise
            return run_folder(config)

    yield train_and_return
    for number, handler in handlers.items():
        signal.signal(number, handler)
    os.environ.clear()
    os.environ.update(before)
