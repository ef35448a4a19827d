"""A round on a GPU against what its memory allows, with random weights: no model needs to be downloaded.

    python benchmarks/gpu_round.py                  # Qwen3-4B's shape, bf16; needs a CUDA device
    python benchmarks/gpu_round.py --tiny           # the same steps with a tiny model, anywhere: does the script work?

Prints the copy bandwidth, the time that reading the target's weights once takes at it, a plain round and a DDTree
round, eager and compiled; whether a round synchronises with the host more than once; and tokens a second with a
scripted drafter, which does the real drafter's work but then guesses the true text with the given skill.
"""

import argparse
import statistics
import time
import warnings

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from infer import DFlash, Engine, Target
from infer.config import DrafterConfig, EngineConfig, TextOptions
from infer.evaluation.evaluate import describe_device, synchronised_clock, tau

SHAPES = {  # the published configuration of Qwen3-4B, and something that any machine runs
    "qwen3-4b": {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "tiny": {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
}


class ScriptedDrafter:
    """Drafts with real passes of random weights, then puts the true next token of position t first with probability
    `skill`, among the next `near` ones with probability (1 - skill) / 2, and leaves it to chance otherwise."""

    def __init__(self, drafter: DFlash, truth: list[int], skill: float, near: int = 4) -> None:
        self.drafter, self.block_size, self.layer_ids = drafter, drafter.block_size, drafter.layer_ids
        device = drafter.norm.weight.device
        self.truth = torch.tensor(truth + [0] * self.block_size, device=device)
        generator = torch.Generator().manual_seed(0)
        dice = torch.rand(len(self.truth), generator=generator)
        height = torch.where(dice < skill, 12.0, torch.where(dice < (1 + skill) / 2, 6.0, 0.0))
        self.height = height.to(device)
        vocabulary = drafter.config.vocab_size
        self.rivals = torch.randint(vocabulary, (len(self.truth), near), generator=generator).to(device)

    def state(self, rows: int, capacity: int, static: bool = False):
        return self.drafter.state(rows, capacity, static)

    def update_context(self, *arguments) -> None:
        self.drafter.update_context(*arguments)

    def draft(self, target: Target, bonus: torch.Tensor, state) -> torch.Tensor:
        scores = self.drafter.draft(target, bonus, state) * 0.01  # (1, L, V)
        ahead = state.cache.ends[:1] + 1 + torch.arange(self.block_size - 1, device=bonus.device)
        scores = scores.scatter(2, self.rivals[ahead][None], 7.0)
        return scores.scatter_add(2, self.truth[ahead][None, :, None], self.height[ahead][None, :, None]).log_softmax(
            -1
        )


def bandwidth(device: torch.device, size: int) -> float:
    """Bytes a second that a copy moves, reading and writing counted."""
    source = torch.zeros(size // 4, device=device)
    sink, clock = torch.empty_like(source), synchronised_clock(device)
    seconds = []
    for _ in range(20):
        mark = clock()
        sink.copy_(source)
        seconds.append(clock() - mark)
    return 2 * size / statistics.median(seconds)


def decoded(engine: Engine, prompt: list[int], tokens: int) -> tuple[float, object]:
    """Seconds a round, the median, and the text."""
    text = engine.submit(prompt, TextOptions(max_new_tokens=tokens, ignore_eos=True))
    clock, seconds = engine.clock, []
    engine.step()
    while engine.busy:
        mark = clock()
        engine.step()
        seconds.append(clock() - mark)
    return statistics.median(seconds), text


def synchronisations(engine: Engine, prompt: list[int]) -> list[str]:
    """What torch reports as host synchronisation during one round in the middle of a text."""
    engine.clock = time.perf_counter
    engine.submit(prompt, TextOptions(max_new_tokens=200, ignore_eos=True))
    for _ in range(4):
        engine.step()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return [f"{warning.filename}:{warning.lineno}" for warning in caught if "synchroniz" in str(warning.message)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--budget", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--skill", type=float, default=0.83, help="0.83: a chain of 15 accepts 6 tokens a round")
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    if not cuda and not args.tiny:
        raise SystemExit("no CUDA device here; --tiny runs the same steps with a tiny model on the CPU")
    device, dtype = (torch.device("cuda"), torch.bfloat16) if cuda else (torch.device("cpu"), torch.float32)

    torch.manual_seed(0)
    config = Qwen3Config(**SHAPES["tiny" if args.tiny else "qwen3-4b"], tie_word_embeddings=True, eos_token_id=None)
    config._attn_implementation = "sdpa"
    with torch.device(device):
        target = Target(Qwen3ForCausalLM(config).to(dtype))
        drafter = DFlash(DFlash.config_for(DrafterConfig(layers=5, block_size=16, mask_token_id=1), target)).to(dtype)
    prompt = torch.randint(2, 500, (128,)).tolist()
    clock = synchronised_clock(device)
    weights = sum(parameter.nbytes for parameter in target.model.parameters())
    speed = bandwidth(device, 2**24 if args.tiny else 2**30)
    floor = weights / speed
    print(f"{describe_device(device)}, {str(dtype).removeprefix('torch.')}, {weights / 1e9:.2f} GB of weights")
    print(f"copies at {speed / 1e9:.0f} GB/s: reading the weights once takes {1000 * floor:.2f} ms")

    def engine(drafter, method: str, compile: bool) -> Engine:
        options = EngineConfig(method, args.budget, rows=1, compile=compile)
        return Engine(target, drafter, options, len(prompt) + 200 + args.tokens, clock)

    print(f"\n{'':<28}{'ms a round':>12}{'times reading':>15}{'times plain':>13}{'τ':>7}{'tokens/s':>10}{'same':>6}")
    for compile in (False, True) if cuda else (False,):
        name = "compiled" if compile else "eager"
        plain_engine = engine(None, "plain", compile)
        decoded(plain_engine, prompt, 16)  # warms up, compiles
        plain, text = decoded(plain_engine, prompt, args.tokens)
        print(f"{'plain, ' + name:<28}{1000 * plain:>12.2f}{plain / floor:>15.2f}{1:>13.2f}{1:>7.2f}{1 / plain:>10.0f}")
        scripted = ScriptedDrafter(drafter, prompt + text.ids, args.skill)
        for method in ("chain", "ddtree"):
            tree_engine = engine(scripted, method, compile)
            decoded(tree_engine, prompt, 64)
            seconds, tree_text = decoded(tree_engine, prompt, args.tokens)
            length = tau([tree_text])
            label = f"{method}{f' {args.budget}' if method == 'ddtree' else ''}, {name}"
            same = "yes" if tree_text.ids == text.ids else "NO"  # bf16: other shapes round differently, ties flip
            print(
                f"{label:<28}{1000 * seconds:>12.2f}{seconds / floor:>15.2f}{seconds / plain:>13.2f}"
                f"{length:>7.2f}{length / seconds:>10.0f}{same:>6}"
            )
        if cuda:
            where = synchronisations(engine(scripted, "ddtree", compile), prompt)
            print(f"  synchronisations in one {name} DDTree round: {len(where)} {where}")


if __name__ == "__main__":
    main()
