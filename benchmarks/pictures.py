"""Draw the pictures of docs/how-it-works.md from one real round on the embedded target.

    python benchmarks/pictures.py

Writes docs/pictures/{block,tree,mask}.svg: what the drafter proposes at every position, the tree
that is made of it with the path that the target accepts, and which node sees which in the one pass
that verifies the tree. The accepted path is that of plain greedy decoding, which is what
verification finds (docs/methods.md, "Why the output does not change").
"""

import argparse
from html import escape
from pathlib import Path

import torch

from infer import generate, load_drafter, load_target
from infer.engine.choices import walk
from infer.trees.ddtree import ddtree
from infer.trees.tree import DraftTree, Proposal

OUT = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PROMPT = "    def __repr__(self):\n        return '%s("
NODES = 14
ACCEPTED = "#0a7d3c"
DRAFTED = "#8a8f98"
ROOT = "#b36b00"
QUIET = "#8a8f98"
STYLE = (
    "<style>text{font:13px ui-monospace,monospace;fill:#24292f}.s{font-size:11px;fill:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa4af}}</style>"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", nargs="?", default="embedded")
    target = load_target("embedded", "float32", "cpu")
    drafter = load_drafter(parser.parse_args().drafter)
    prompt = target.tokenizer(PROMPT)["input_ids"]
    length = drafter.block_size - 1
    text = generate(target, drafter, prompt, method="plain", max_new_tokens=length + 2).ids
    marginals = draft(target, drafter, prompt, text[0])  # (1, L, V)
    tree = ddtree(Proposal(torch.tensor(text[:1]), marginals, NODES))
    OUT.mkdir(exist_ok=True)
    walked = walk(
        tree, torch.tensor(text[1:])[tree.depths]
    )  # at every node the target's token of its depth
    accepted = walked.path[0, : walked.lengths[0]].tolist()
    for name, picture in (
        ("block", block_picture(target.tokenizer, text, marginals[0])),
        ("tree", tree_picture(target.tokenizer, tree, accepted, text[len(accepted)])),
        ("mask", mask_picture(target.tokenizer, tree)),
    ):
        (OUT / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(OUT / f"{name}.svg")


@torch.no_grad()
def draft(target, drafter, prompt: list[int], bonus: int) -> torch.Tensor:
    """Return the drafter's log-probabilities (1, L, V) of the positions behind the bonus token."""
    cache = target.cache(1, len(prompt) + 1)
    state = drafter.state(1, len(prompt) + 1)
    with cache.add(1) as rows, state.add(1) as begun:
        context = target.extend([prompt], rows, drafter.layer_ids).context
        drafter.update_context(target, context, torch.tensor([prompt]), [len(prompt)], begun)
    return drafter.draft_block(target, torch.tensor([bonus]), state).marginals.float()


def shown(tokenizer, token: int) -> str:
    """Return a token as one sees it: spaces and line ends as signs."""
    return tokenizer.decode([token]).replace("\n", "⏎").replace(" ", "␣") or "∅"


def svg(width: int, height: int, title: str, parts: list[str]) -> str:
    """Return a picture that says in words what it shows, readable in light and dark."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img"'
    return (
        f"{head} aria-label={title!r}><title>{escape(title)}</title>{STYLE}{''.join(parts)}</svg>\n"
    )


def label(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def box(x: float, y: float, width: float, height: float, colour: str, dashed: bool = False) -> str:
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" rx="5" fill="{colour}" '
        f'fill-opacity="0.12" stroke="{colour}"{dash}/>'
    )


def block_picture(tokenizer, text: list[int], marginals: torch.Tensor) -> str:
    """Draw the bonus token and, behind it, the three likeliest tokens of every drafted position."""
    step = 92
    parts = [box(4, 30, 84, 30, ROOT), label(46, 20, "bonus", kind="s")]
    parts.append(label(46, 50, shown(tokenizer, text[0])))
    for i, row in enumerate(marginals):
        x = 4 + (i + 1) * step
        parts.append(label(x + 42, 20, f"position {i + 1}", kind="s"))
        for rank, (score, token) in enumerate(zip(*row.topk(3), strict=True)):
            right = int(token) == text[i + 1]
            parts.append(
                box(x, 30 + 46 * rank, 84, 40, ACCEPTED if right else DRAFTED, dashed=not right)
            )
            parts.append(
                label(
                    x + 42, 47 + 46 * rank, shown(tokenizer, int(token)) + (" ✓" if right else "")
                )
            )
            parts.append(label(x + 42, 63 + 46 * rank, f"{100 * score.exp():.0f} %", kind="s"))
    return svg(
        8 + step * (len(marginals) + 1),
        176,
        "the three likeliest tokens of every drafted position",
        parts,
    )


def tree_picture(tokenizer, tree: DraftTree, accepted: list[int], correction: int) -> str:
    """Draw the tree from left to right, the accepted path in bold and ticked, and the target's own
    token behind it."""
    places = rows_of(tree)
    spot = {
        node: (10 + 118 * int(tree.depths[0, node]), 14 + 46 * row) for node, row in places.items()
    }
    parts = []
    for node in range(1, tree.budget + 1):
        (x, y), (px, py) = spot[node], spot[int(tree.parents[0, node])]
        bold = node in accepted
        path = f"M{px + 84} {py + 18} C{px + 104} {py + 18} {x - 20} {y + 18} {x} {y + 18}"
        colour, width = (ACCEPTED, 3) if bold else (QUIET, 1)
        parts.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for node, (x, y) in spot.items():
        bold = node in accepted
        parts.append(
            box(x, y, 84, 36, ROOT if node == 0 else ACCEPTED if bold else DRAFTED, dashed=not bold)
        )
        word = shown(tokenizer, int(tree.tokens[0, node])) + (" ✓" if node and bold else "")
        share = "bonus" if node == 0 else f"{100 * tree.log_probs[0, node].exp():.1f} %"
        parts += [label(x + 42, y + 16, word), label(x + 42, y + 30, share, kind="s")]
    x, y = spot[accepted[-1]]
    below = 46 * (1 + max(places.values())) + 14
    end = f"accepted: {len(accepted) - 1} drafted tokens; then the target's own: {shown(tokenizer, correction)}"
    parts.append(label(10, below + 20, end, "start"))
    width = max(118 * (1 + int(tree.depths.max())) + 20, 560)
    return svg(width, below + 34, "a draft tree with the path that the target accepts", parts)


def rows_of(tree: DraftTree) -> dict[int, int]:
    """Return a row for every node: a first child stands beside its parent, every other begins a new
    row."""
    children: dict[int, list[int]] = {}
    for node in range(1, tree.budget + 1):
        children.setdefault(int(tree.parents[0, node]), []).append(node)
    rows = {}
    used = 0
    stack = [(0, 0)]
    while stack:
        node, row = stack.pop()
        if row < 0:
            used += 1
            row = used
        rows[node] = row
        first, *others = children.get(node, [None])
        stack += [(other, -1) for other in reversed(others)]
        if first is not None:
            stack.append((first, row))
    return rows


def mask_picture(tokenizer, tree: DraftTree) -> str:
    """Draw which node (row) attends to which (column) in the pass that verifies the tree."""
    mask = tree.ancestors()[0]
    size = 24
    left = 96
    parts = [label(left + 12 + size * k, 16, str(k), kind="s") for k in range(len(mask))]
    for q, row in enumerate(mask):
        y = 24 + size * q
        parts.append(
            label(left - 8, y + 17, f"{shown(tokenizer, int(tree.tokens[0, q]))}  {q}", "end")
        )
        parts += [
            box(left + size * k, y, size - 3, size - 3, ACCEPTED if seen else QUIET, not seen)
            for k, seen in enumerate(row)
        ]
    width = max(left + size * len(mask) + 10, 420)
    return svg(width, 30 + size * len(mask), "which node of the tree attends to which", parts)


if __name__ == "__main__":
    main()
