"""Masked diffusion decoding: step by step, and by self speculative decoding (SSD), which writes the same text sooner.

A text is a prompt and masks. A step computes what stands at the masks and writes one token: the one that the model is
surest of, among the masks of the first unfinished block (SSD section 3.1, LLaDA's low-confidence remasking). A round of
SSD computes several states of the text in one pass, and takes as many steps as it finds computed (Algorithm 1).
Step by step is the round that computes the text as it is and nothing else: one loop for both.

N states, T positions of a row, P positions of a window, V vocabulary.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from infer.api import Prompt, check_length, encode, is_prompt
from infer.config import MaskedOptions
from infer.habits import Habits
from infer.masked import MaskedModel
from infer.masked_pass import DualCache, Rows
from infer.sampling import gumbel_noise
from infer.selfdraft import LONGEST, Guesses, State, Write, pick, read, walk


@dataclass
class MaskedStats:
    """What one text took. `passes` of the model, each over one or more states; `steps` is what step-by-step decoding
    takes, one pass a token."""

    steps: int
    passes: int = 0
    full: int = 0  # passes over the whole row
    states: int = 0  # computed, all passes together
    histogram: list[int] = field(default_factory=lambda: [0] * (LONGEST + 1))  # [i]: passes with i accepted drafts
    valid: int = 0  # tokens before the first end token
    seconds: float = 0.0

    def note(self, states: Sequence[State], written: int, full: bool) -> None:
        """Counts a round."""
        self.passes += 1
        self.full += full
        self.states += len(states)
        self.histogram[written - 1] += 1

    @property
    def step_reduction(self) -> float:
        """The share of forward passes saved against step by step (the paper's Step↓)."""
        return 1 - self.passes / self.steps

    @property
    def tokens_per_second(self) -> float:
        """Valid tokens a second, as the paper counts them."""
        return self.valid / self.seconds if self.seconds else 0.0


@dataclass(frozen=True)
class Filled:
    """A text that a masked model wrote. `writes` are its steps: (position in the answer, token), in order."""

    text: str | None  # up to the first end token; None when the model has no tokenizer
    ids: list[int]  # all `length` of them
    prompt_ids: list[int]
    writes: list[Write]
    stats: MaskedStats
    trace: list[Guesses]  # if asked for: what each round left to draft from


def generate_masked(
    model: MaskedModel,
    prompts: Prompt | Sequence[Prompt],
    options: MaskedOptions | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Filled]:
    """Continues one prompt or many (a string, token ids, or chat messages), one after the other, by `options.length`
    tokens each. The text is step-by-step decoding's, write for write, whatever method, draft length, order and nodes.

    Raises ValueError for options or prompts that make no sense, and for a cache with a model that takes none.
    """
    options = options or MaskedOptions()
    options.check()
    rows = [encode(model, prompt) for prompt in ([prompts] if is_prompt(prompts) else prompts)]
    for ids in rows:
        if not ids:
            raise ValueError("every prompt needs at least one token")
        check_length(model, len(ids) + options.length)
    return [fill(model, ids, options, clock) for ids in rows]


@torch.inference_mode()
def fill(
    model: MaskedModel,
    prompt: list[int],
    options: MaskedOptions,
    clock: Callable[[], float] = time.perf_counter,
    ranks: int = 2,
    trace: bool = False,
) -> Filled:
    """One text from a prompt's token ids. `ranks` likeliest tokens of every position are looked at; `trace` keeps what
    every round left to draft from."""
    began, start = clock(), len(prompt)
    stats, writes, said = MaskedStats(options.length), [], []
    ids = torch.tensor(prompt + [model.mask_token_id] * options.length, device=model.device)  # (T,)
    masked = list(range(start, len(ids)))
    passes = (Rows if options.cache == "none" else DualCache)(model, options, ids)
    habits = Habits(dict(enumerate(prompt)))
    guesses: Guesses = {}  # the newest of every position: where drafts come from

    def guess(logits: torch.Tensor, window: list[int]) -> list[Guesses]:
        noise = None
        if options.temperature > 0:
            seed, places = (torch.tensor(values, device=model.device) for values in ([options.seed], [window]))
            noise = gumbel_noise(seed, places, logits.shape[-1])
        return read(logits, options.temperature, noise, ranks, window)

    while masked:
        plan = passes.plan(masked, start)
        states = [frozenset()]
        if options.method == "ssd":
            states = pick(guesses, plan, options.order, options.draft_length, options.nodes, habits)
        done = passes.run(states, plan)
        found = guess(done.logits, done.window)
        walked = walk(states, found, plan)
        if done.ahead is not None:
            guesses.update(guess(done.ahead, done.ahead_window)[0])
        guesses.update(found[walked.last])  # for free: the last write was chosen by them

        written = [position for position, _ in walked.writes]
        ids[torch.tensor(written, device=ids.device)] = torch.tensor([token for _, token in walked.writes]).to(ids)
        masked = [position for position in masked if position not in written]
        passes.wrote(len(written))
        habits.wrote(walked.writes)
        writes += [(position - start, token) for position, token in walked.writes]
        stats.note(states, len(written), done.full)
        if trace:
            said.append(dict(guesses))
    answer = ids[start:].tolist()
    stats.valid = next((at for at, token in enumerate(answer) if token in model.end_ids), len(answer))
    stats.seconds = clock() - began
    tokenizer = model.tokenizer
    text = None if tokenizer is None else tokenizer.decode(answer[: stats.valid], skip_special_tokens=True)
    return Filled(text, answer, prompt, writes, stats, said)
