"""Draw the pictures of docs/how-it-works.md from one real round on the embedded target.

    python benchmarks/pictures.py

Writes docs/pictures/{block,tree,mask}.svg: the drafter's proposals at every position, the draft
tree with the path that the target accepts, and the attention mask of the forward pass that verifies
the tree. The accepted path is that of greedy baseline decoding, which verification equals
(docs/methods.md, "Why the output does not change").
"""

import argparse
from html import escape
from pathlib import Path

import torch

from infer import generate, load_drafter, load_target
from infer.engine.verification import walk
from infer.trees.ddtree import build_ddtree
from infer.trees.tree import DraftTree, Proposal

PICTURES_FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
PICTURE_PROMPT = "    def __repr__(self):\n        return '%s("
PICTURE_TREE_NODES = 14
ACCEPTED_COLOUR = "#0a7d3c"
DRAFTED_COLOUR = "#8a8f98"
BONUS_COLOUR = "#b36b00"
MUTED_COLOUR = "#8a8f98"
SVG_STYLE = (
    "<style>text{font:13px ui-monospace,monospace;fill:#24292f}.s{font-size:11px;fill:#57606a}"
    "@media(prefers-color-scheme:dark){text{fill:#e6edf3}.s{fill:#9aa4af}}</style>"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", nargs="?", default="embedded")
    target = load_target("embedded", "float32", "cpu")
    drafter = load_drafter(parser.parse_args().drafter)
    prompt = target.tokenizer(PICTURE_PROMPT)["input_ids"]
    length = drafter.block_size - 1
    text = generate(target, drafter, prompt, method="plain", max_new_tokens=length + 2).ids
    marginals = draft_marginals(target, drafter, prompt, text[0])  # (1, L, V)
    tree = build_ddtree(Proposal(torch.tensor(text[:1]), marginals, PICTURE_TREE_NODES))
    PICTURES_FOLDER.mkdir(exist_ok=True)
    # At every node the target chooses the baseline's token of this depth.
    walk_result = walk(tree, torch.tensor(text[1:])[tree.depths])
    accepted = walk_result.path[0, : walk_result.lengths[0]].tolist()
    for name, picture in (
        ("block", draw_block(target.tokenizer, text, marginals[0])),
        ("tree", draw_tree(target.tokenizer, tree, accepted, text[len(accepted)])),
        ("mask", draw_mask(target.tokenizer, tree)),
    ):
        (PICTURES_FOLDER / f"{name}.svg").write_text(picture, encoding="utf-8")
        print(PICTURES_FOLDER / f"{name}.svg")


@torch.no_grad()
def draft_marginals(target, drafter, prompt: list[int], bonus: int) -> torch.Tensor:
    """Return the drafter's log-probabilities of the positions after the bonus token, (1, L, V)."""
    cache = target.allocate_cache(1, len(prompt) + 1)
    state = drafter.allocate_state(1, len(prompt) + 1)
    with cache.add_rows(1) as rows, state.add(1) as state_rows:
        context = target.extend_cache([prompt], rows, drafter.layer_ids).layer_features
        drafter.update_context(target, context, torch.tensor([prompt]), [len(prompt)], state_rows)
    return drafter.draft_block(target, torch.tensor([bonus]), state).marginals.float()


def format_token(tokenizer, token: int) -> str:
    """Return a token's text with visible signs for spaces and line ends."""
    return tokenizer.decode([token]).replace("\n", "⏎").replace(" ", "␣") or "∅"


def build_svg(width: int, height: int, title: str, elements: list[str]) -> str:
    """Return an SVG picture with a title, readable on a light and a dark background."""
    head = (
        '<svg xmlns="http://www.w3.org/2000/svg" '
        f'viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label={title!r}>'
    )
    content = f"<title>{escape(title)}</title>{SVG_STYLE}{''.join(elements)}"
    return f"{head}{content}</svg>\n"


def draw_label(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    """Return a text element; `kind` is its class in SVG_STYLE."""
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" class="{kind}">{escape(text)}</text>'
    )


def draw_box(
    x: float, y: float, width: float, height: float, colour: str, dashed: bool = False
) -> str:
    """Return a rectangle element."""
    dash = ' stroke-dasharray="4 3"' if dashed else ""
    return (
        f'<rect x="{x:.0f}" y="{y:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'rx="5" fill="{colour}" '
        f'fill-opacity="0.12" stroke="{colour}"{dash}/>'
    )


def draw_block(tokenizer, text: list[int], marginals: torch.Tensor) -> str:
    """Draw the bonus token and the three most likely tokens of every drafted position."""
    step = 92
    elements = [draw_box(4, 30, 84, 30, BONUS_COLOUR), draw_label(46, 20, "bonus", kind="s")]
    elements.append(draw_label(46, 50, format_token(tokenizer, text[0])))
    for i, row in enumerate(marginals):
        x = 4 + (i + 1) * step
        elements.append(draw_label(x + 42, 20, f"position {i + 1}", kind="s"))
        for rank, (score, token) in enumerate(zip(*row.topk(3), strict=True)):
            is_accepted = int(token) == text[i + 1]
            elements.append(
                draw_box(
                    x,
                    30 + 46 * rank,
                    84,
                    40,
                    ACCEPTED_COLOUR if is_accepted else DRAFTED_COLOUR,
                    dashed=not is_accepted,
                )
            )
            elements.append(
                draw_label(
                    x + 42,
                    47 + 46 * rank,
                    format_token(tokenizer, int(token)) + (" ✓" if is_accepted else ""),
                )
            )
            elements.append(
                draw_label(x + 42, 63 + 46 * rank, f"{100 * score.exp():.0f} %", kind="s")
            )
    return build_svg(
        8 + step * (len(marginals) + 1),
        176,
        "the three likeliest tokens of every drafted position",
        elements,
    )


def draw_tree(tokenizer, tree: DraftTree, accepted: list[int], correction: int) -> str:
    """Draw the tree from left to right, the accepted path in bold and ticked.

    correction: the target's token after the accepted path
    """
    row_of_node = assign_rows(tree)
    position_of_node = {
        node: (10 + 118 * int(tree.depths[0, node]), 14 + 46 * row)
        for node, row in row_of_node.items()
    }
    elements = []
    for node in range(1, tree.max_drafted + 1):
        x, y = position_of_node[node]
        px, py = position_of_node[int(tree.parents[0, node])]
        is_accepted_node = node in accepted
        path = f"M{px + 84} {py + 18} C{px + 104} {py + 18} {x - 20} {y + 18} {x} {y + 18}"
        colour = ACCEPTED_COLOUR if is_accepted_node else MUTED_COLOUR
        width = 3 if is_accepted_node else 1
        elements.append(f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
    for node, (x, y) in position_of_node.items():
        is_accepted_node = node in accepted
        elements.append(
            draw_box(
                x,
                y,
                84,
                36,
                BONUS_COLOUR
                if node == 0
                else ACCEPTED_COLOUR
                if is_accepted_node
                else DRAFTED_COLOUR,
                dashed=not is_accepted_node,
            )
        )
        word = format_token(tokenizer, int(tree.tokens[0, node])) + (
            " ✓" if node and is_accepted_node else ""
        )
        share = "bonus" if node == 0 else f"{100 * tree.log_probs[0, node].exp():.1f} %"
        elements += [draw_label(x + 42, y + 16, word), draw_label(x + 42, y + 30, share, kind="s")]
    x, y = position_of_node[accepted[-1]]
    below = 46 * (1 + max(row_of_node.values())) + 14
    last_token = format_token(tokenizer, correction)
    caption = f"accepted: {len(accepted) - 1} drafted tokens; then the target's own: {last_token}"
    elements.append(draw_label(10, below + 20, caption, "start"))
    width = max(118 * (1 + int(tree.depths.max())) + 20, 560)
    return build_svg(
        width, below + 34, "a draft tree with the path that the target accepts", elements
    )


def assign_rows(tree: DraftTree) -> dict[int, int]:
    """Return the row of every node: a first child has its parent's row, others start a new one."""
    children: dict[int, list[int]] = {}
    for node in range(1, tree.max_drafted + 1):
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


def draw_mask(tokenizer, tree: DraftTree) -> str:
    """Draw which node (row) attends to which (column) in the verification pass."""
    mask = tree.build_ancestor_mask()[0]
    size = 24
    left = 96
    elements = [draw_label(left + 12 + size * k, 16, str(k), kind="s") for k in range(len(mask))]
    for q, row in enumerate(mask):
        y = 24 + size * q
        elements.append(
            draw_label(
                left - 8, y + 17, f"{format_token(tokenizer, int(tree.tokens[0, q]))}  {q}", "end"
            )
        )
        elements += [
            draw_box(
                left + size * k,
                y,
                size - 3,
                size - 3,
                ACCEPTED_COLOUR if seen else MUTED_COLOUR,
                not seen,
            )
            for k, seen in enumerate(row)
        ]
    width = max(left + size * len(mask) + 10, 420)
    return build_svg(
        width, 30 + size * len(mask), "which node of the tree attends to which", elements
    )


if __name__ == "__main__":
    main()
