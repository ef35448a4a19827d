"""Conditional heads on one backbone, of several seeds, trained for the same time: tokens a round, and calibration.

    python benchmarks/heads.py prepare               # the backbone, what is learnt from, the target's texts
    python benchmarks/heads.py frozen --seeds 0 1 2  # each head on the frozen backbone; "none": the backbone itself
    python benchmarks/heads.py joint --seeds 0 1 2   # then head and backbone together, as many seconds more
    python benchmarks/heads.py report                # tables
    python benchmarks/heads.py cost                  # milliseconds a round
    python benchmarks/heads.py build                 # microseconds to build a tree from a table

Greedy decoding is lossless, so that the target's own text is known before anything is drafted: a drafter's rounds
begin at places of that text, and what a round commits depends on nothing else. So all places of a text are drafted at
once, from features of the target that are computed once for all drafters; every budget reads the same trees, since the
first n nodes are the tree of budget n; and τ is exactly what decoding gives (`--check`). What is measured already is
left out, so that the work can be done in pieces. Seconds are processor time of the one thread that trains, and all
drafters have as many: where a head is trained on the frozen backbone, the one without a head trains its backbone on.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.packing import batch, packed_rows
from data.prompts import evaluation_prompts
from data.rows import DataConfig
from infer import Engine, load_target
from infer.api import decode
from infer.config import DecodeOptions, DrafterConfig, EngineConfig, HeadConfig, TextOptions
from infer.drafters.base import Block
from infer.engine.loops import LONGEST_PERIOD
from infer.engine.sampling import condition_on_noise, derived_seed, judge_on_noise, round_noise
from infer.evaluation.evaluate import tau
from infer.evaluation.ruler import interval, pooled
from infer.formats.checkpoint import load_drafter, save_drafter
from infer.ngrams.model import NGram
from infer.targets.target import Features
from infer.trees.chain import chain
from infer.trees.conditional import best_first, by_depth
from infer.trees.continuity import guided_ddtree
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, Proposal
from train.batches import draw_blocks, seeded
from train.blocks import Blocks, lay_out
from train.config import ObjectiveConfig, OptimConfig, TrainConfig
from train.loop import draft_states, score
from train.optim import learning_rate, make_optimizer, set_rate
from train.run.initial import initial_drafter, resolve_init

HEADS = {
    "none": HeadConfig(),
    "vanilla": HeadConfig("markov", rank=64, confidence=True),
    "gated": HeadConfig("markov", kind="gated", rank=64),
    "rnn": HeadConfig("markov", kind="rnn", rank=64),
    "selector": HeadConfig("selector", rank=64),
    "selector16": HeadConfig("selector", rank=64, top_k=16),
    "selector256": HeadConfig("selector", rank=256),
    "gated256": HeadConfig("markov", kind="gated", rank=256),
    "swiglu": HeadConfig("swiglu"),
    "gru": HeadConfig("gru", rank=64, hidden=64),
}
BUDGETS = (8, 16, 32, 64)
FIRST_ORDER = ("vanilla", "gated", "selector", "selector256", "gated256", "swiglu")
CACHED = 120  # blocks a row whose states a frozen drafter keeps; a step draws as many as it takes
EDGES = (0, 0.003, 0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8, 0.95, 1.000001)  # of probabilities, in the reliability table


@dataclass(frozen=True)
class Setting:
    """How trees are built, and which of the target's texts they are for."""

    candidates: int = 32
    temperature: float = 0.0
    steered: bool = True  # sampled texts: the drafter sees the noise that the target draws with
    continuity: bool = False


@dataclass(frozen=True)
class Text:
    """What the target wrote behind a prompt, on its own."""

    ids: list[int]
    prompt: int  # tokens of the prompt; a round's bonus token stands there or further on
    outside: bool
    seed: int
    context: torch.Tensor  # (T, F) features of the tapped layers


@dataclass(frozen=True)
class Taught:
    """A step's packed row, its blocks, what the target says, and the frozen drafter's states."""

    rows: dict[str, torch.Tensor]
    blocks: Blocks
    features: Features
    drafted: torch.Tensor | None = None  # (N * L, D)


def configured(init: Path, head: HeadConfig, joint: bool, seed: int) -> TrainConfig:
    """Return the configuration of a run with a head; joint ones are the default run's, with its weights."""
    config = TrainConfig(
        seed=seed,
        train="all" if joint else "head",
        anchors=40,
        drafter=DrafterConfig(init=str(init), head=head),
        objective=ObjectiveConfig(gamma=0.6 if joint else 1.0),
        optim=OptimConfig(name="muon", lr=2e-3 if joint else 1e-2, batch=1, steps=1000),
    )
    return replace(config, drafter=resolve_init(config.drafter, config.target))


def prepare(arguments: argparse.Namespace) -> None:
    """Write what all later stages share: texts, features of training rows, and the backbone."""
    target = load_target("embedded")
    data = DataConfig(source="embedded", length=256)
    start = load_drafter(arguments.checkpoint, torch.float32, target_layers=target.config.num_hidden_layers)
    layers = start.layer_ids
    arguments.folder.mkdir(parents=True, exist_ok=True)
    prompts = evaluation_prompts(data, target.tokenizer, arguments.prompts, 96, arguments.outside)
    for temperature in (0.0, 0.7, 1.0):
        options = DecodeOptions(
            arguments.tokens, temperature, method="plain", positions=None, loop_period=LONGEST_PERIOD
        )
        done, texts = decode(target, None, [prompt.ids for prompt in prompts], options), []
        for number, (text, prompt) in enumerate(zip(done, prompts, strict=True)):
            ids = text.prompt + text.ids
            context = features_of(target, torch.tensor([ids]), layers).context[0]
            seed = derived_seed(0, number)
            texts.append(asdict(Text(ids, len(text.prompt), prompt.beside is not None, seed, context)))
        torch.save(texts, arguments.folder / f"texts-{temperature}.pt")
    dataset, stored = packed_rows(data, target.tokenizer, target.tokenizer_digest), []
    for first in range(0, arguments.rows, 8):
        rows = batch(dataset, first, 8, 0)
        found = target.packed_features(rows["ids"], rows["positions"], rows["documents"], layers)
        for i in range(8):
            one = {name: column[i : i + 1].clone() for name, column in rows.items()}
            stored.append((one, found.context[i : i + 1].clone(), found.last[i : i + 1].clone()))
    torch.save(stored, arguments.folder / "rows.pt")
    if start.head_row is not None:
        weights = {k: v for k, v in start.state_dict().items() if not k.startswith(start.head_row.attribute)}
        keys = {*start.head_row.load().own_config(start.head_options()), start.head_row.key}
        start.config.dflash_config = {k: v for k, v in start.own.items() if k not in keys}
        save_drafter(start.config, weights, arguments.folder / "backbone")
        # marginals that were trained beside a head are not the best there are: the same backbone, trained without
        config = configured(arguments.folder / "backbone", HEADS["none"], True, 0)
        drafter, steps = learn(config, target, stored, {}, arguments.backbone_seconds)
        save_drafter(drafter.config, drafter.state_dict(), arguments.folder / "backbone")
        print(f"backbone: {steps} steps without a head", flush=True)
    else:
        save_drafter(start.config, start.state_dict(), arguments.folder / "backbone")


def features_of(target, ids: torch.Tensor, layers: tuple[int, ...]) -> Features:
    """Return the features of one document each, ids (B, T)."""
    positions = torch.arange(ids.shape[1])[None].expand_as(ids)
    return target.packed_features(ids, positions, torch.zeros_like(ids), layers)


def learn(config: TrainConfig, target, stored: list, cache: dict, seconds: float):
    """Return a drafter that was trained for so many seconds of processor time, and the steps that it took. A frozen
    drafter's states are computed once for all heads and seeds, by whether they stand before the last norm: `cache`."""
    drafter, joint = initial_drafter(config, target), config.train == "all"
    if not joint and drafter.conditional_head.raw not in cache:
        cache[drafter.conditional_head.raw] = states_of(drafter, config, target, stored)
    optimizer, steps, began = make_optimizer(drafter, config.optim), 0, time.process_time()
    order = torch.randperm(len(stored), generator=seeded(config.seed, "order")).tolist()
    while (spent := time.process_time() - began) < seconds:
        set_rate(optimizer, learning_rate(config.optim, int(1000 * spent / seconds), 1000))
        number, steps = order[steps % len(order)], steps + 1
        if joint:
            rows, context, last = stored[number]
            one = Taught(rows, draw_blocks(rows, config, steps), Features(context, last))
        else:
            drawn = seeded(config.seed, steps, number)
            one = some_of(cache[drafter.conditional_head.raw][number], config.anchors, drawn)
        if not one.blocks.supervised.any():  # a row of short texts has no room for an anchor
            continue
        drafted = draft_states(drafter, target, one.rows, one.blocks, one.features) if joint else one.drafted
        found = score(drafter, drafted, target, one.rows, one.blocks, one.features, config)
        optimizer.zero_grad()
        (found.loss / one.blocks.supervised.sum()).backward()
        torch.nn.utils.clip_grad_norm_([p for p in drafter.parameters() if p.requires_grad], 1.0)
        optimizer.step()
    return drafter.eval().requires_grad_(False), steps


@torch.no_grad()
def states_of(drafter, config: TrainConfig, target, stored: list) -> list[Taught]:
    """Return every row with as many blocks as are kept, and the drafter's states."""
    found = []
    for i, (rows, context, last) in enumerate(stored):
        one = Taught(rows, draw_blocks(rows, replace(config, anchors=CACHED), i), Features(context, last))
        drafted = draft_states(drafter, target, one.rows, one.blocks, one.features)
        found.append(replace(one, drafted=drafted))
    return found


def some_of(one: Taught, count: int, generator: torch.Generator) -> Taught:
    """Return a row with `count` of its blocks."""
    picked = torch.randperm(CACHED, generator=generator)[:count]
    drafted = one.drafted.unflatten(0, (CACHED, -1))[picked].flatten(0, 1)
    return replace(one, blocks=Blocks(*(part[:, picked] for part in vars(one.blocks).values())), drafted=drafted)


@dataclass(frozen=True)
class Places:
    """What a drafter proposes at every place of an answer: P places."""

    proposal: Proposal  # rows are places
    truth: torch.Tensor  # (P, L) the tokens that follow, -1 behind the text's end


def places(drafter, target, text: Text, setting: Setting, ngram: NGram | None) -> Places:
    """Draft at all places of an answer at once, as training does."""
    ids = torch.tensor([text.ids])
    anchors = torch.arange(text.prompt, len(text.ids) - 1)[None]
    rows = {"ids": ids, "positions": torch.arange(ids.shape[1])[None], "documents": torch.zeros_like(ids)}
    blocks = lay_out(rows | {"loss": torch.ones_like(ids, dtype=torch.bool)}, anchors, anchors >= 0, drafter.block_size)
    features = Features(text.context[None], text.context[None])
    states = draft_states(drafter, target, rows, blocks, features).unflatten(0, (-1, drafter.block_size - 1))
    block, bonus = Block(drafter.marginals(target, drafter.unconditioned(states)), states), ids[0, anchors[0]]
    options = [DecodeOptions(temperature=setting.temperature, seed=text.seed)] * len(bonus)
    noise = round_noise(options, anchors[0], drafter.block_size, block.marginals.shape[-1]) if setting.steered else None
    steps = None
    if drafter.conditioned:
        judge = judge_on_noise(options, noise, None)
        steps = drafter.conditional_draft(target, bonus, block, judge, setting.candidates)
    marginals = condition_on_noise(block.marginals, options, noise, None)
    contexts = [text.ids[: place + 1] for place in anchors[0].tolist()] if ngram else ()
    proposal = Proposal(bonus, marginals, max(BUDGETS), ngram, contexts, steps=steps)
    return Places(proposal, torch.where(blocks.supervised, blocks.labels, -1)[0])


def numbers_on_path(tree: DraftTree, truth: torch.Tensor) -> torch.Tensor:
    """Return the number of the node at every depth of the true path, (P, L), a large one where there is none: at most n
    means that a tree of n nodes has it."""
    node, found = torch.zeros(len(truth), 1, dtype=torch.long), []
    for depth in range(truth.shape[1]):
        hit = (tree.parents == node) & (tree.depths == depth + 1) & (tree.tokens == truth[:, depth, None])
        node = torch.where(hit.any(1, keepdim=True), hit.long().argmax(1, keepdim=True), 1 << 30)
        found.append(node)
    return torch.cat(found, 1)


def rounds_of(numbers: torch.Tensor, budget: int) -> list[int]:
    """Return the places where rounds with trees of `budget` nodes begin, from the first on."""
    lengths, place, found = (1 + (numbers <= budget).sum(1)).tolist(), 0, []
    while place < len(lengths):
        found.append(place)
        place += lengths[place]
    return found


def measure(drafter, target, texts: list[Text], setting: Setting, ngram: NGram | None, reliability=None) -> dict:
    """Return how many rounds every text takes, by budget; count into `reliability` how often nodes are accepted."""
    found: dict[str, list[int]] = {}
    for text in texts:
        drafted = places(drafter, target, text, setting, ngram)
        tree = (guided_ddtree if ngram else ddtree)(drafted.proposal)
        numbers = numbers_on_path(tree, drafted.truth)
        for budget in BUDGETS:
            found.setdefault(str(budget), []).append(len(rounds_of(numbers, budget)))
        if reliability is not None:
            begins = rounds_of(numbers, max(BUDGETS))
            nodes = torch.arange(tree.budget + 1)[:, None]
            hits = (numbers[:, None] == nodes).any(-1)[begins, 1:]  # (rounds, nodes)
            reliability.add("nodes", tree.log_probs[begins, 1:].exp(), hits)
        if ngram is None:
            line = chain(drafted.proposal)
            numbers = numbers_on_path(line, drafted.truth)
            begins = rounds_of(numbers, line.budget)
            found.setdefault("chain", []).append(len(begins))
            if reliability is not None:
                hits = (numbers < 1 << 30)[begins]
                reliability.add("chain", line.log_probs[begins, 1:].exp(), hits)
                if getattr(drafter, "confidence_head", None) is not None:
                    before, states = line.tokens[begins, :-1], drafted.proposal.steps.states[begins]
                    confidence = drafter.confidence_head(states, drafter.teach(target, states, before))
                    reliability.add("confidence", confidence.sigmoid().cumprod(1), hits)
    return found


class Reliability:
    """How often prefixes of a predicted probability were accepted."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}  # (bins, 3): prefixes, predicted, accepted

    def add(self, kind: str, predicted: torch.Tensor, accepted: torch.Tensor) -> None:
        """Count prefixes, any shape."""
        sums = self.sums.setdefault(kind, np.zeros((len(EDGES) - 1, 3)))
        p, hit = predicted.flatten().double().numpy(), accepted.flatten().double().numpy()
        bins = np.clip(np.searchsorted(EDGES, p, side="right") - 1, 0, len(sums) - 1)
        for column, weights in enumerate((np.ones_like(p), p, hit)):
            sums[:, column] += np.bincount(bins, weights, len(sums))


def texts_at(arguments: argparse.Namespace, temperature: float) -> list[Text]:
    """Return the target's texts at a temperature."""
    found = torch.load(arguments.folder / f"texts-{temperature}.pt", weights_only=True)
    return [Text(**text) for text in found]


def settings(arguments: argparse.Namespace, name: str, seed: int) -> Iterator[Setting]:
    """Yield what a drafter is measured with: everything with the first seed, the ruler with all."""
    yield Setting()
    if seed or not arguments.more:
        return
    if name in FIRST_ORDER:
        yield from (Setting(candidates=count) for count in (8, 16, 64))
    if arguments.continuity:
        yield Setting(continuity=True)
    for temperature in (0.7, 1.0):
        yield from (Setting(temperature=temperature, steered=steered) for steered in (True, False))


@torch.no_grad()
def record(arguments, target, drafter, mode: str, name: str, seed: int, steps: int, done: set) -> None:
    """Measure a drafter in all settings that are missing, a line each in results.jsonl."""
    for setting in settings(arguments, name, seed):
        key = (mode, name, seed, json.dumps(asdict(setting)))
        if key in done:
            continue
        reliability = Reliability() if setting == Setting() else None
        ngram = NGram.open(arguments.continuity, target.tokenizer_digest) if setting.continuity else None
        texts = texts_at(arguments, setting.temperature)
        rounds = measure(drafter, target, texts, setting, ngram, reliability)
        line = {"mode": mode, "head": name, "seed": seed, "steps": steps, "setting": asdict(setting), "rounds": rounds}
        line["tokens"] = [len(text.ids) - text.prompt - 1 for text in texts]
        line["outside"] = [text.outside for text in texts]
        line["reliability"] = {kind: sums.tolist() for kind, sums in reliability.sums.items()} if reliability else {}
        with (arguments.folder / "results.jsonl").open("a") as lines:
            lines.write(json.dumps(line) + "\n")
        shown = {k: round(sum(line["tokens"]) / sum(v), 3) for k, v in rounds.items()}
        print(f"{mode} {name} {seed}: {steps} steps, {setting}: {shown}", flush=True)


def read_results(arguments: argparse.Namespace) -> list[dict]:
    """Return what was measured so far."""
    file = arguments.folder / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def run(arguments: argparse.Namespace) -> None:
    """Train and measure heads, until the time is over; what is there already is left out."""
    began, joint, cache = time.monotonic(), arguments.stage == "joint", {}
    target = load_target("embedded")
    stored = torch.load(arguments.folder / "rows.pt", weights_only=True, mmap=True)
    done = {(one["mode"], one["head"], one["seed"], json.dumps(one["setting"])) for one in read_results(arguments)}
    for seed in arguments.seeds:
        for name in arguments.heads.split(","):
            if time.monotonic() - began > 60 * arguments.minutes:
                return print("more is to be done: the same command goes on", flush=True)
            keys = [(arguments.stage, name, seed, json.dumps(asdict(s))) for s in settings(arguments, name, seed)]
            if all(key in done for key in keys):
                continue
            folder = arguments.folder / f"{arguments.stage}-{name}-{seed}"
            if folder.exists():
                drafter, steps = load_drafter(folder), int((folder / "steps").read_text())
            else:
                start = arguments.folder / (f"frozen-{name}-{seed}" if joint else "backbone")
                head = HeadConfig() if joint else HEADS[name]  # a drafter that has one keeps it
                config = configured(start, head, joint or name == "none", seed)
                drafter, steps = learn(config, target, stored, cache, arguments.seconds)
                save_drafter(drafter.config, drafter.state_dict(), folder)
                (folder / "steps").write_text(str(steps))
            record(arguments, target, drafter, arguments.stage, name, seed, steps, done)
            if arguments.check:
                check(target, drafter, texts_at(arguments, 0.0)[:8])


def check(target, drafter, texts: list[Text]) -> None:
    """Print τ of a few texts measured so and by decoding them."""
    with torch.no_grad():
        rounds = measure(drafter, target, texts, Setting(), None)
    tokens = sum(len(text.ids) - text.prompt - 1 for text in texts)
    for budget in (*map(str, BUDGETS), "chain"):
        method = {"method": "chain"} if budget == "chain" else {"budget": int(budget)}
        done = []
        for text in texts:
            options = DecodeOptions(len(text.ids) - text.prompt, positions=None, candidates=32, **method)
            done += decode(target, drafter, [text.ids[: text.prompt]], options)
        print(f"  {budget}: {tokens / sum(rounds[budget]):.4f}, decoded {tau(done):.4f}", flush=True)


def report(arguments: argparse.Namespace) -> None:
    """Print tables: τ with intervals over prompts, seeds pooled; the gain over no head; reliability."""
    results = read_results(arguments)
    grouped: dict[tuple, list[dict]] = {}
    for one in results:
        grouped.setdefault((one["mode"], one["head"], json.dumps(one["setting"])), []).append(one)
    plain = json.dumps(asdict(Setting()))
    for mode in ("frozen", "joint"):
        print(f"\n{mode}\n| head | seeds | steps | " + " | ".join(["chain", *map(str, BUDGETS)]) + " |")
        for (kind, name, setting), runs in grouped.items():
            if kind == mode and setting == plain:
                base = grouped.get((mode, "none", plain))
                cells = [cell(runs, base, budget) for budget in ("chain", *map(str, BUDGETS))]
                steps = sum(run["steps"] for run in runs) // len(runs)
                print(f"| {name} | {len(runs)} | {steps:,} | " + " | ".join(cells) + " |")
    print("\noutside, and every seed: chain / 16 / 64")
    for (mode, name, setting), runs in grouped.items():
        if setting == plain:
            outside = " / ".join(f"{figure(runs, k, True):.2f}" for k in ("chain", "16", "64"))
            each = "; ".join(" / ".join(f"{figure([run], k, None):.3f}" for k in ("chain", "16", "64")) for run in runs)
            print(f"{mode} {name}: outside {outside}; seeds {each}")
    print("\nfirst seed, other settings")
    for (mode, name, setting), runs in grouped.items():
        if setting != plain:
            cells = " ".join(f"{budget} {figure(runs, budget, None):.3f}" for budget in runs[0]["rounds"])
            print(f"{mode} {name} {setting}: {cells}")
    print("\nreliability: prefixes, predicted, accepted")
    for (mode, name, _), runs in grouped.items():
        for kind in runs[0]["reliability"]:
            sums = np.sum([run["reliability"][kind] for run in runs], 0)
            bins = "; ".join(f"{n:.0f} {p / n:.3f} {a / n:.3f}" for n, p, a in sums if n >= 50)
            print(f"{mode} {name} {kind}: {bins}")


def figure(runs: list[dict], budget: str, outside: bool | None) -> float:
    """Return τ of runs with several seeds, pooled."""
    wanted = [outside is None or flag == outside for flag in runs[0]["outside"]]
    tokens = sum(n for run in runs for n, on in zip(run["tokens"], wanted, strict=True) if on)
    return tokens / sum(n for run in runs for n, on in zip(run["rounds"][budget], wanted, strict=True) if on)


def cell(runs: list[dict], base: list[dict] | None, budget: str) -> str:
    """Return τ, and its gain over no head with the interval that it would have over other prompts."""
    tokens = np.array(runs[0]["tokens"], float)
    rounds = np.mean([run["rounds"][budget] for run in runs], 0)
    tau = f"{tokens.sum() / rounds.sum():.3f}"
    if base is None or base is runs:
        low, high = interval(lambda drawn: pooled(tokens[drawn], rounds[drawn]), len(tokens))
        return f"{tau} ({low:.2f} to {high:.2f})"
    others = np.mean([run["rounds"][budget] for run in base], 0)
    low, high = interval(lambda drawn: 100 * (others[drawn].sum(-1) / rounds[drawn].sum(-1) - 1), len(tokens))
    return f"{tau} +{100 * (others.sum() / rounds.sum() - 1):.1f} % ({low:.0f} to {high:.0f})"


def build_times() -> None:
    """Print microseconds of a build from a table, best and median of many."""

    class Steps:
        recurrent = False

        def __init__(self, length: int, count: int) -> None:
            generator = torch.Generator().manual_seed(0)
            scores = torch.randn(1, length, count, count, generator=generator).mul(2).log_softmax(-1)
            self.length, self.count = length, count
            self.tokens = torch.arange(count).expand(1, length, count).contiguous()
            self.table = scores[:, 0, 0], scores[:, 1:].contiguous()

        def begin(self):
            return self.table[0][:, None], None

        def extend(self, slot, which, memory):
            rows = which[..., None].expand(-1, -1, self.tokens.shape[-1])
            return self.table[1][:, slot - 1].gather(1, rows), None

        def choose(self, slot, prefix, which):
            return self.tokens[:, slot].gather(1, which)

    torch.set_num_threads(1)
    print("positions  candidates  nodes   heap, best / median   depth by depth, median   (microseconds)")
    for length, count, budget in ((7, 16, 16), (7, 32, 64), (15, 32, 64), (15, 64, 256)):
        steps, seconds = Steps(length, count), {}
        for search in (best_first, by_depth):
            samples = []
            for _ in range(400):
                began = time.perf_counter()
                search(steps, budget)
                samples.append(time.perf_counter() - began)
            seconds[search] = min(samples) * 1e6, sorted(samples)[len(samples) // 2] * 1e6
        heap, depth = seconds[best_first], seconds[by_depth]
        print(f"{length:9} {count:11} {budget:6}   {heap[0]:9.1f} / {heap[1]:6.1f} {depth[1]:23.1f}")


def cost(arguments: argparse.Namespace) -> None:
    """Print milliseconds of processor time a round, of the first seed's drafters, which take turns round by round."""
    target = load_target("embedded")
    folders = {name: arguments.folder / f"frozen-{name}-0" for name in arguments.heads.split(",")}
    drafters = {name: load_drafter(folder) for name, folder in folders.items() if folder.exists()}
    prompts = [text.ids[: text.prompt] for text in texts_at(arguments, 0.0)[:: 72 // arguments.few]]
    print("| head | " + " | ".join(f"{name}, ms a round, tokens/s" for name in ("chain", "8", "16", "64")) + " |")
    cells = {name: [] for name in drafters}
    for method, budget in (("chain", 7), ("ddtree", 8), ("ddtree", 16), ("ddtree", 64)):
        options = EngineConfig(method, budget, rows=1, positions=None)
        engines = {name: Engine(target, drafter, options, 96 + 64) for name, drafter in drafters.items()}
        rounds, seconds, texts = dict.fromkeys(drafters, 0), dict.fromkeys(drafters, 0.0), {}
        for prompt in prompts:
            for name, engine in engines.items():
                texts.setdefault(name, []).append(engine.submit(prompt, TextOptions(64, loop_period=LONGEST_PERIOD)))
                engine.step()  # reads the prompt
            while any(engine.busy for engine in engines.values()):
                for name, engine in engines.items():
                    if engine.busy:
                        began, rounds[name] = time.process_time(), rounds[name] + 1
                        engine.step()
                        seconds[name] += time.process_time() - began
        for name, found in cells.items():
            written = sum(len(text.ids) for text in texts[name])
            found.append(f"{1000 * seconds[name] / rounds[name]:.1f}, {written / seconds[name]:.0f}")
    for name, found in cells.items():
        print(f"| {name} | " + " | ".join(found) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("stage", choices=("prepare", "frozen", "joint", "report", "cost", "build"))
    parser.add_argument("--folder", type=Path, default=Path("runs/heads"))
    parser.add_argument("--checkpoint", default="data/embedded/drafter", help="prepare: what becomes the backbone")
    parser.add_argument("--prompts", type=int, default=48)
    parser.add_argument("--outside", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rows", type=int, default=800, help="prepare: packed rows to learn from")
    parser.add_argument("--backbone-seconds", type=float, default=180)
    parser.add_argument("--few", type=int, default=12, help="cost: so many of the prompts")
    parser.add_argument("--heads", default=",".join(HEADS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--seconds", type=float, default=30, help="of processor time, to train each")
    parser.add_argument("--minutes", type=float, default=8, help="begin nothing new after so many")
    parser.add_argument("--more", action="store_true", help="the first seed: candidates, continuity, sampled texts")
    parser.add_argument("--continuity", help="an n-gram file")
    parser.add_argument("--check", action="store_true", help="decode a few texts, too")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    stages = {"prepare": prepare, "report": report, "cost": cost, "build": lambda _: build_times()}
    stages.get(arguments.stage, run)(arguments)


if __name__ == "__main__":
    main()
