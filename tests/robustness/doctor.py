"""Faults put into a serving engine one by one, each on the embedded target with its own drafter, and what the doctor
says of them; and healthy pairs. `python tests/robustness/doctor.py` prints the table of docs/results/doctor.md.

The engine decodes the reference's prompts as a server does, without HTTP between (that is tested in
tests/infer/doctor/test_doctor.py); the doctor sees what a server tells: texts, ids, numbers of tokens, counters.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from data.prompts import Prompt, outside_prompts
from infer import DecodeOptions, load_drafter, load_target
from infer.api import answer_text, decode, encode
from infer.doctor.causes import Served, altered
from infer.doctor.engines import tokens_of
from infer.doctor.examine import Diagnosis, examine
from infer.doctor.replay import next_norm
from infer.drafters.base import Drafter
from infer.evaluation.acceptance import measure_reference
from infer.evaluation.results import Acceptance, Reference
from infer.targets.loading import EMBEDDED
from infer.targets.target import Target

THINKING = {"enable_thinking": False}
TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
    "{% if enable_thinking is defined and not enable_thinking %}pass\n{% endif %}"
)
OTHER = "{% for m in messages %}User: {{ m['content'] }}\n{% endfor %}Assistant: {% if enable_thinking %}{% endif %}"


@dataclass(frozen=True)
class Fault:
    """What goes wrong, the name of the cause that should be found, and the engine that has it."""

    name: str
    cause: str | None
    engine: Callable[[Target, Drafter, Path], tuple[Target, Drafter]]
    drafted: int | None = None


def copied(folder: Path, name: str, template: str = TEMPLATE) -> Path:
    """Return a copy of the embedded target with another chat template."""
    out = folder / name
    out.mkdir()
    for file in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        shutil.copy(EMBEDDED / file, out)
    shutil.copy(EMBEDDED / "model.safetensors", out)
    (out / "chat_template.jinja").write_text(template)
    return out


def load_copy(path: Path, told: dict = THINKING) -> Target:
    return load_target(str(path), "float32", "cpu", chat_template_kwargs=told)


def with_config(**keys: object) -> Callable:
    """Read the drafter with keys of its config changed, those of its family's part under `own`."""
    return lambda target, drafter, folder: (target, altered(drafter, **keys))


def with_rope(**keys: object) -> Callable:
    return lambda target, drafter, folder: (
        target,
        altered(drafter, rope_parameters=dict(drafter.config.rope_parameters) | keys),
    )


def behind_norms(target: Target, drafter: Drafter, folder: Path) -> tuple[Target, Drafter]:
    """Give the drafter what the norms behind its taps make of the features."""
    other = altered(drafter)
    update = other.update_context

    def normed(target: Target, features: torch.Tensor, *rest, **more) -> None:
        parts = features.chunk(len(drafter.layer_ids), dim=-1)
        parts = [next_norm(target, layer)(part) for layer, part in zip(drafter.layer_ids, parts, strict=True)]
        update(target, torch.cat(parts, dim=-1), *rest, **more)

    other.update_context = normed
    return target, other


def other_vocabulary(target: Target, drafter: Drafter, folder: Path) -> tuple[Target, Drafter]:
    """Give the tokenizer's words other ids."""
    path = copied(folder, "vocabulary")
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    words, special = tokenizer["model"]["vocab"], {token["id"] for token in tokenizer["added_tokens"]}
    free = sorted(set(words.values()) - special)
    order = torch.randperm(len(free), generator=torch.Generator().manual_seed(0)).tolist()
    moved = dict(zip(free, (free[i] for i in order), strict=True))
    tokenizer["model"]["vocab"] = {word: moved.get(id, id) for word, id in words.items()}
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return load_copy(path), drafter


def other_weights(target: Target, drafter: Drafter, folder: Path) -> tuple[Target, Drafter]:
    other, generator = load_copy(folder / "target"), torch.Generator().manual_seed(1)
    for part in other.body.layers.modules():
        if isinstance(part, torch.nn.Linear):
            noise = torch.randn(part.weight.shape, generator=generator)
            part.weight.data = part.weight.data + 0.2 * part.weight.data.std() * noise
    return other, drafter


DRAFTED = "another number of drafts a round"
FAULTS = (
    Fault("tapped layers one up", "tapped layers off by one", with_config(own={"target_layer_ids": [4, 20]})),
    Fault("features behind the next norm", "features taken behind a norm", behind_norms),
    Fault("causal inside the block", "causality inside the block", with_config(own={"causal": True})),
    Fault("drafting from the anchor's slot", "the anchor's slot", with_config(own={"sample_from_anchor": True})),
    Fault("rope_theta 1e6 for 1e4", "rotary base", with_rope(rope_theta=1e6)),
    Fault("words under other ids", "another tokenizer or vocabulary", other_vocabulary),
    Fault("a block of 16 for 8", DRAFTED, with_config(own={"block_size": 16}, block_size=16)),
    Fault("weights of another target", "another target's weights, or the same in few bits", other_weights),
    Fault("one draft a round", DRAFTED, lambda t, d, f: (t, d), drafted=1),
    Fault(
        "another chat template",
        "another chat template or thinking mode",
        lambda target, drafter, folder: (load_copy(copied(folder, "template", OTHER)), drafter),
    ),
    Fault(
        "thinking left on",
        "another chat template or thinking mode",
        lambda target, drafter, folder: (load_copy(folder / "target", {}), drafter),
    ),
)


def serve(target: Target, drafter: Drafter, reference: Reference, drafted: int | None = None) -> Served:
    """Return what an engine of this pair makes of a reference's prompts."""
    asked = [[{"role": "user", "content": text.said}] if text.chat else text.said for text in reference.texts]
    prompts, budget = [encode(target, prompt) for prompt in asked], drafted or drafter.block_size - 1
    texts = []
    for prompt, text in zip(prompts, reference.texts, strict=True):
        options = DecodeOptions(method="chain", budget=budget, max_new_tokens=tokens_of(text, reference), rows=1)
        texts += decode(target, drafter, [prompt], options)
    drafts = [count for text in texts for count in text.drafted]
    counted = [
        Acceptance(len(text.accepted), [sum(count > k for count in text.accepted) for k in range(budget)])
        for text in texts
    ]
    return Served(
        "the engine",
        [answer_text(target, text.ids, text.options) for text in texts],
        [text.ids for text in texts],
        [len(prompt) for prompt in prompts],
        counted,
        sum(drafts) / len(drafts),
    )


def prompts_of(target: Target, count: int, first: int = 0) -> list[Prompt]:
    """Return `count` prompts from outside the data, of all kinds in turn; every fourth is a chat's question."""
    plain, chats = (outside_prompts(target.tokenizer, 64, chat) for chat in (False, True))
    order = [(first + i) % len(plain) for i in range(count)]
    return [(chats if i % 4 == 3 else plain)[i] for i in order]


def run(count: int = 20, only: set[str] | None = None) -> Iterator[tuple[Fault, Diagnosis, float]]:
    """Yield every fault with what the doctor says of it, and the seconds of CPU that the doctor took."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        target, drafter = load_copy(copied(folder, "target")), load_drafter("embedded")
        reference = measure_reference(target, drafter, prompts_of(target, count))
        for fault in FAULTS:
            if only is None or fault.name in only:
                theirs = fault.engine(target, drafter, folder)
                served = serve(*theirs, reference, fault.drafted)
                began = time.process_time()
                yield fault, examine(target, drafter, reference, served), time.process_time() - began


def healthy(times: int = 20, count: int = 5) -> Iterator[Diagnosis]:
    """Yield what the doctor says of a healthy engine, each time on other prompts."""
    with TemporaryDirectory() as name:
        target, drafter = load_copy(copied(Path(name), "target")), load_drafter("embedded")
        for turn in range(times):
            reference = measure_reference(target, drafter, prompts_of(target, count, turn))
            yield examine(target, drafter, reference, serve(target, drafter, reference))


def main() -> None:
    torch.set_num_threads(1)
    print("| fault in the engine | named | verdict | CPU s |\n| --- | --- | --- | --- |")
    right = 0
    for fault, found, seconds in run(only=set(sys.argv[1:]) or None):
        named = found.cause.name if found.cause else "healthy" if found.healthy else "none"
        right += named == fault.cause
        mark = "yes" if named == fault.cause else f"**no**: {named}"
        print(f"| {fault.name} | {mark} | {found.verdict} | {seconds:.0f} |", flush=True)
    print(f"\n{right} of {len(FAULTS)} named", flush=True)
    if len(sys.argv) == 1 or "healthy" in sys.argv:
        verdicts = [found.healthy for found in healthy()]
        print(f"healthy {sum(verdicts)} of {len(verdicts)}")


if __name__ == "__main__":
    main()
