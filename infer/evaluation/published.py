"""The figures of papers, to show beside ours, number for number: Table 1 of DDTree's, Table 1 of SSD's."""

from typing import NamedTuple

CITATION = (
    "Accelerating Speculative Decoding with Block Diffusion Draft Trees, arXiv:2604.12989, Table 1: 8 H200 GPUs, "
    "bfloat16, block size 16, at most 2,048 new tokens; DDTree with the best budget of 16 to 1,024 nodes"
)
METHODS = ("plain", "chain", "ddtree")  # rows of our table of tree methods that it measured
MODELS = ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b-instruct")  # each with its public DFlash drafter

# A line a set; for each of the three models: DFlash's speedup and τ, then DFlash + DDTree's.
GREEDY = """
aime24         5.56 7.54 7.27 10.37   5.38 7.46 7.35 10.42   3.95 5.16 5.93  7.87
aime25         5.33 7.37 7.23 10.23   5.32 7.39 6.99  9.86   3.98 5.13 5.88  7.63
alpaca         2.03 3.11 3.32  5.35   2.07 3.12 3.36  5.09   1.53 2.22 2.46  3.55
gsm8k          4.77 6.51 6.58  9.33   4.78 6.57 6.75  9.54   4.00 5.18 5.83  7.55
humaneval      4.81 6.62 6.81  9.44   4.84 6.61 6.90  9.67   6.09 8.02 8.22 10.72
livecodebench  4.97 7.02 6.78  9.79   5.02 7.22 7.10 10.28   4.72 6.32 6.54  8.63
math500        5.54 7.72 7.50 10.71   5.56 7.79 7.52 10.73   4.29 5.58 6.21  8.10
mbpp           4.38 6.10 6.42  9.16   4.33 5.99 6.39  9.07   5.61 7.19 7.68  9.94
mt-bench       2.64 4.38 4.18  6.70   2.56 4.28 4.10  6.58   2.04 3.52 3.27  5.36
swe-bench      2.70 3.66 4.25  5.99   2.65 3.60 4.23  5.91   2.77 3.61 4.38  5.71
"""
SAMPLED = """
aime24         3.50 5.01 5.31  7.82   3.46 4.98 5.36  7.79   3.12 4.23 4.94  7.32
aime25         3.38 4.79 5.08  7.22   3.36 4.79 5.25  7.71   3.17 4.26 4.98  6.62
alpaca         1.97 2.96 3.23  4.97   1.95 2.94 3.20  4.89   1.51 2.14 2.43  3.51
gsm8k          4.35 5.99 6.17  8.87   4.33 5.93 6.27  8.95   3.94 5.08 5.66  7.38
humaneval      4.34 5.97 6.43  9.18   4.00 5.48 6.09  8.59   5.64 7.60 7.88 10.42
livecodebench  4.53 6.53 6.44  9.44   4.52 6.61 6.46  9.53   3.77 5.57 5.47  7.79
math500        4.65 6.60 6.60  9.61   4.56 6.46 6.59  9.54   4.01 5.32 5.91  7.76
mbpp           4.03 5.56 6.09  8.72   3.83 5.30 5.87  8.34   5.47 7.03 7.55  9.76
mt-bench       2.46 4.05 3.91  6.27   2.30 3.77 3.75  6.02   1.96 3.43 3.10  5.14
swe-bench      2.29 3.07 3.71  5.20   2.10 2.82 3.47  4.86   2.42 3.16 3.80  4.96
"""
TABLES = {0.0: GREEDY, 1.0: SAMPLED}


class Published(NamedTuple):
    """One row of the paper's table for one model."""

    chain_speedup: float
    chain_tau: float
    ddtree_speedup: float
    ddtree_tau: float


def published(target: str, temperature: float, name: str) -> Published | None:
    """Return the paper's figures for a target (a hub id or a folder that ends in the model's name), a temperature and a
    set; None where the paper has none."""
    model = target.rstrip("/").rpartition("/")[2].lower()
    for line in TABLES.get(temperature, "").split("\n"):
        found, *numbers = line.split() or [""]
        if found == name and model in MODELS:
            first = 4 * MODELS.index(model)
            return Published(*map(float, numbers[first : first + 4]))
    return None


SSD_CITATION = (
    "Self Speculative Decoding for Diffusion Large Language Models, arXiv:2510.04147, Table 1: A100 80GB, dual cache, "
    "256 tokens, blocks of 8, GSM8K and MATH a tenth of each, zero-shot by lm-eval's prompts"
)
SSD_SETS = ("gsm8k", "math500", "humaneval", "mbpp")  # its columns; MATH stands beside MATH-500
# A line a model and draft length; for each of the four sets: tokens a second, speedup, per cent of the steps saved.
SSD_TABLE = """
llada-8b-base         3  28.73 1.92 52.9  52.35 1.99 55.1  18.28 2.20 57.3  10.17 1.77 56.7
llada-8b-base         4  30.47 2.03 55.6  53.61 2.04 58.2  18.01 2.17 60.4  10.31 1.78 60.0
llada-8b-base         5  30.39 2.03 56.8  52.54 1.99 59.7  17.56 2.12 61.6   9.86 1.72 61.5
llada-8b-instruct     3  57.04 2.12 58.1  56.52 2.07 54.0  53.28 2.04 57.7  30.21 1.78 59.8
llada-8b-instruct     4  60.07 2.23 61.3  58.98 2.16 57.2  55.28 2.12 60.7  31.15 1.83 63.0
llada-8b-instruct     5  60.39 2.24 63.2  57.99 2.12 58.9  54.14 2.11 62.5  30.33 1.79 65.2
llada-1.5             3  57.48 2.17 58.0  57.26 2.07 56.1  55.51 2.04 57.7  33.32 1.79 59.1
llada-1.5             4  61.43 2.32 61.1  59.01 2.13 59.1  58.18 2.13 60.7  33.68 1.81 62.3
llada-1.5             5  60.72 2.29 63.1  58.29 2.11 60.8  57.41 2.11 62.4  32.84 1.77 64.6
dream-v0-base-7b      3  28.78 2.17 52.8  54.42 2.02 55.2  21.66 1.72 53.3  14.03 2.36 61.4
dream-v0-base-7b      4  30.16 2.27 55.4  57.16 2.12 58.1  19.28 1.53 56.3  15.02 2.53 64.7
dream-v0-base-7b      5  30.25 2.28 56.6  58.65 2.18 59.8  22.54 1.79 57.7  14.70 2.47 66.5
dream-v0-instruct-7b  3  32.80 2.27 60.7  56.33 2.11 56.6  36.49 2.09 59.8  18.61 2.92 70.3
dream-v0-instruct-7b  4  35.13 2.43 64.2  58.47 2.19 59.6  39.18 2.24 63.4  21.20 3.33 74.6
dream-v0-instruct-7b  5  36.63 2.54 66.4  60.02 2.25 61.4  39.61 2.26 65.3  22.07 3.46 77.4
"""


class PublishedSSD(NamedTuple):
    """One cell of SSD's table: a model, a draft length, a set."""

    tokens_per_second: float
    speedup: float
    step_reduction: float


def published_ssd(model: str, draft_length: object, name: str) -> PublishedSSD | None:
    """Return the paper's figures for a masked model (a hub id or a folder that is called so); None where it has
    none."""
    known = model.rstrip("/").rpartition("/")[2].lower()
    for line in SSD_TABLE.strip().split("\n"):
        found, length, *numbers = line.split()
        if (found, length) == (known, str(draft_length)) and name in SSD_SETS:
            first = 3 * SSD_SETS.index(name)
            rate, speedup, share = map(float, numbers[first : first + 3])
            return PublishedSSD(rate, speedup, share / 100)
    return None
