"""An engine whose steps several processes take together: the first one's server decides, the others follow."""

from dataclasses import dataclass, field

from infer.config import TextOptions
from infer.engine.engine import Engine
from infer.engine.sequence import Sequence
from infer.utils.together import agreed


@dataclass
class LeadingEngine:
    """The first process's engine: before each step it says which texts came and which were given up. A step that fails
    cannot be repeated, since the others may have taken it."""

    engine: Engine
    new: list[tuple[list[int], TextOptions]] = field(default_factory=list)

    def __getattr__(self, name: str) -> object:
        return getattr(self.engine, name)

    def submit(self, prompt: list[int], options: TextOptions) -> Sequence:
        """Queue a text here, and with the next step everywhere."""
        text = self.engine.submit(prompt, options)
        self.new.append((prompt, options))
        return text

    def step(self) -> list[Sequence]:
        """Take a step in every process."""
        texts = (*self.engine.writing, *self.engine.entering, *self.engine.waiting)
        new, self.new = self.new, []
        agreed((new, [text.number for text in texts if text.cancelled]))
        return self.engine.step()

    def retry(self) -> None:
        raise RuntimeError("a round failed in one of several processes, which cannot repeat it together")

    def dismiss(self) -> None:
        """Let the other processes end."""
        agreed(None)


def follow(engine: Engine) -> None:
    """Take the steps of the first process's engine, until it dismisses this one."""
    texts: dict[int, Sequence] = {}
    while (said := agreed(None)) is not None:
        new, cancelled = said
        for prompt, options in new:
            text = engine.submit(prompt, options)
            texts[text.number] = text
        for number in cancelled:
            texts[number].cancelled = True
        engine.step()
        texts = {number: text for number, text in texts.items() if text.finish is None}
