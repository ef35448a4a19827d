"""Record the CUDA graphs of common decoding rounds before the first request arrives."""

from collections.abc import Callable

from infer.config import SamplingOptions
from infer.engine.engine import Engine
from infer.engine.runner import Runner

# Rounds of greedy sequences and of sampled sequences have different graphs.
WARM_UP_TEMPERATURES = (0.0, 1.0)
WARM_UP_PROMPT_TOKENS = 8
# The first round with a graph's key compiles kernels, the second records the graph.
MIN_ROUNDS_PER_GRAPH = 3


def record_common_rounds(engine: Engine, report: Callable[[str], None]) -> None:
    """Decode short sequences of arbitrary tokens, so that the rounds of the first requests are
    replayed as CUDA graphs and compile no kernels. Do nothing if the engine uses no CUDA graphs.

    There is a graph for each power of two of sequences, up to `max_num_seqs`. With
    `budget="auto"`, rounds with other numbers of nodes are recorded later, when they first occur.

    report: called with a description of the next step, for a progress line
    """
    runner = engine.runner
    if not isinstance(runner, Runner) or not runner.uses_cuda_graphs:
        return
    max_new_tokens = MIN_ROUNDS_PER_GRAPH * (runner.draft_length + 1) + 1
    prompt_length = min(WARM_UP_PROMPT_TOKENS, engine.capacity - max_new_tokens)
    if prompt_length < 1:
        return
    largest = engine.options.max_num_seqs
    row_counts = [1 << i for i in range(largest.bit_length()) if 1 << i < largest] + [largest]
    for rows in row_counts:
        report(f"recording CUDA graphs for {rows} of up to {largest} sequences")
        for temperature in WARM_UP_TEMPERATURES:
            options = SamplingOptions(
                max_new_tokens=max_new_tokens, temperature=temperature, ignore_eos=True
            )
            for row in range(rows):
                prompt = [(row + i) % engine.target.vocab_size for i in range(prompt_length)]
                engine.submit(prompt, options)
            while engine.has_unfinished_sequences:
                engine.step()
