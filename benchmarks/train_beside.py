"""A training step beside others' on a CPU: CPU seconds and peak memory.

    python benchmarks/train_beside.py earlier <tree of an earlier version>
    python benchmarks/train_beside.py specforge <tree of sgl-project/SpecForge>
    python benchmarks/train_beside.py speculators <folder that has the package>

earlier: the whole step, target's pass and AdamW included, at four shapes. specforge: its OnlineDFlashModel and our
drafter of the same sizes on the same features, cross-entropy, forward and backward. speculators: its KL on the logits
of the same states through the same head, beside our objective, forward and backward to the states.

Every measurement has a process of its own, the ways by turns, one thread; CPU seconds are those of the process, the
least over steps and turns (whatever else runs only adds). Memory: the most in use above what there was before the
models, with freed memory given back at once.
"""

import argparse
import json
import sys
import time
import types
from pathlib import Path

from again import run_again

SHAPES = {
    "laptop": {
        "hidden": 192,
        "vocabulary": 512,
        "layers": 24,
        "length": 256,
        "anchors": 40,
        "block": 8,
        "head_dim": 32,
    },
    "train.txt": {"hidden": 256, "vocabulary": 32_000, "layers": 8, "length": 512, "anchors": 64, "block": 16},
    "vocabulary": {"hidden": 128, "vocabulary": 151_936, "layers": 4, "length": 256, "anchors": 32, "block": 16},
    "long": {"hidden": 256, "vocabulary": 4_096, "layers": 8, "length": 2048, "anchors": 128, "block": 16},
}
DEFAULTS = {"intermediate": None, "heads": None, "kv_heads": None, "head_dim": 64, "drafter_layers": 2, "batch": 1}
DEFAULTS |= {"chunk_rows": 256, "recompute": False, "compile": False, "device": "cpu", "threads": 1, "way": "ours"}
HERE = Path(__file__).resolve().parent


def measure(way: str, place: str, shape: str, steps: int, precision: str) -> dict:
    """Return the least CPU seconds of a step, and the peak in GB, of one way in this process."""
    tree = Path(place) if way == "earlier" else HERE.parent
    sys.path[:0] = [str(tree)]
    scripts = tree / "benchmarks"
    if (scripts / "train_step.py").exists():
        sys.path.insert(1, str(scripts))
        import train_step as script
    else:  # the file's name was a package's
        import importlib.util

        found = importlib.util.spec_from_file_location("train_step", scripts / "train.py")
        script = importlib.util.module_from_spec(found)
        found.loader.exec_module(script)
    import torch

    torch.set_num_threads(1)
    options = {"hidden": 64, "vocabulary": 100, "length": 32, "anchors": 4, "layers": 4, "block": 8} | DEFAULTS
    options["precision"] = precision
    tiny, real = (argparse.Namespace(**options | more) for more in ({"head_dim": 32}, SHAPES[shape]))
    step_of = {"earlier": whole_step, "ours": whole_step, "specforge": specforge, "ours on features": ours_on_features}
    step_of |= {"speculators": speculators, "our objective": our_objective}
    step_of[way](script, tiny, place)()  # libraries' own buffers and code are in memory now, and not counted
    memory, seconds, values = script.Memory("cpu"), [], []
    step = step_of[way](script, real, place)
    for _ in range(steps + 1):
        began = time.process_time()
        values.append(step())
        seconds.append(time.process_time() - began)
    return {"seconds": min(seconds[1:]), "gb": memory.peak() / 1e9, "values": values}


def whole_step(script, args, place):
    """Target's pass, drafter, objective, backward, AdamW."""
    target, drafter, rows, config = script.build(args)
    optimizer, count = script.make_optimizer(drafter, script.OptimConfig()), iter(range(100))

    def step() -> float:
        blocks = script.draw_blocks(rows, config, next(count))
        loss = script.block_loss(drafter, target, rows, blocks, config).loss
        (loss / blocks.supervised.sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def ours_on_features(script, args, place):
    """Our drafter and cross-entropy on given features."""
    target, drafter, rows, config = script.build(args)
    config.objective.divergence = "cross_entropy"
    features = script.draw_features(target, drafter, args)
    count = iter(range(100))

    def step() -> float:
        blocks = script.draw_blocks(rows, config, next(count))
        drafted = script.draft_states(drafter, target, rows, blocks, features)
        loss = script.score(drafter, drafted, target, rows, blocks, features, config).loss
        loss.backward()
        drafter.zero_grad()
        return loss.item()

    return step


def specforge(script, args, place):
    """SpecForge's model of the same sizes on the same features."""
    import torch

    for name in ("", ".core", ".modeling", ".modeling.draft", ".algorithms", ".algorithms.common"):
        package = types.ModuleType(f"specforge{name}")
        package.__path__ = [str(Path(place, "specforge", *name.split(".")[1:]))]
        sys.modules.setdefault(package.__name__, package)
    from specforge.algorithms.common.dflash_family_model import OnlineDFlashModel
    from specforge.modeling.draft.dflash import DFlashDraftModel

    args.precision = "float32"
    target, drafter, rows, _ = script.build(args)
    features = script.draw_features(target, drafter, args)
    drafter.config._attn_implementation = "sdpa"
    theirs = DFlashDraftModel(drafter.config)
    head = target.model.get_output_embeddings()
    online = OnlineDFlashModel(
        theirs, head, target.embedding, args.vocabulary - 1, args.block, "sdpa", args.anchors, loss_decay_gamma=7.0
    )
    mask = torch.ones_like(rows["ids"], dtype=torch.float32)

    def step() -> float:
        loss, *_ = online(rows["ids"], features.context, mask)
        loss.backward()
        online.zero_grad()
        return loss.item()

    return step


def states_of(script, args):
    """States of drafter and target, (rows, D), and the head (V, D)."""
    import torch

    torch.manual_seed(0)
    rows = args.anchors * (args.block - 1)
    drafted, teacher = torch.randn(2, rows, args.hidden)
    return drafted, teacher, torch.randn(args.vocabulary, args.hidden) * args.hidden**-0.5


def our_objective(script, args, place):
    """Our KL, forward and backward."""
    import torch

    from train.engine import target_dtype
    from train.objective import divergence

    config = script.TrainConfig()
    config.optim.precision = args.precision
    kind = target_dtype(config, torch.device("cpu"))
    drafted, teacher, head = (part.to(kind) for part in states_of(script, args))
    drafted.requires_grad_()
    which = torch.arange(len(drafted))[:, None]

    def step() -> float:
        drafted.grad = None
        loss = divergence(
            drafted, teacher, which, which, torch.ones(len(drafted), 1), head, script.ObjectiveConfig()
        ).loss
        loss.backward()
        return loss.item()

    return step


def speculators(script, args, place):
    """speculators' KL of the same, forward and backward."""
    sys.path.append(place)
    from speculators.losses.eager import kl_div_loss

    drafted, teacher, head = states_of(script, args)
    drafted.requires_grad_()

    def step() -> float:
        drafted.grad = None
        loss = kl_div_loss((drafted @ head.T)[None], (teacher @ head.T)[None]).sum()
        loss.backward()
        return loss.item()

    return step


def process(way: str, args, shape: str, steps: int, environment: dict[str, str]) -> dict:
    """Measure one way in a process of its own."""
    more = ["--way", way, "--shapes", shape, "--steps", str(steps), "--precision", args.precision]
    return run_again([__file__, args.other, args.place, *more], environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", choices=["earlier", "specforge", "speculators"])
    parser.add_argument("place")
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--precision", default="auto", help="of our products: auto, float32; the others' are float32")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.way, args.place, args.shapes[0], args.steps, args.precision)))
        return
    ours = {"earlier": "ours", "specforge": "ours on features", "speculators": "our objective"}[args.other]
    lean = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    print(f"{'shape':<12}{'CPU s, ' + args.other:>20}{'ours':>9}{'ratio':>8}{'GB':>9}{'ours':>8}{'ratio':>8}")
    for shape in args.shapes:
        best = {}
        for way in (args.other, ours) * args.turns:
            found = process(way, args, shape, args.steps, {})["seconds"]
            best[way] = min(found, best.get(way, found))
        peaks = {way: process(way, args, shape, 1, lean)["gb"] for way in (args.other, ours)}
        line = f"{shape:<12}{best[args.other]:>20.3f}{best[ours]:>9.3f}{best[ours] / best[args.other]:>8.2f}"
        print(line + f"{peaks[args.other]:>9.3f}{peaks[ours]:>8.3f}{peaks[ours] / peaks[args.other]:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
