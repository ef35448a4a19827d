"""Options of targets, drafters, decoding and evaluation. No torch here: a wrong option is refused before it loads."""

from dataclasses import dataclass, field

METHODS = ("plain", "chain", "ddtree")


@dataclass
class TargetConfig:
    """Which target, and how it is loaded."""

    path: str = "embedded"  # a hub id, a local folder, or "embedded": the small target of the repository
    dtype: str = "auto"  # float32, bfloat16, or auto: bfloat16 on CUDA, else float32
    device: str = "auto"  # cpu, cuda, cuda:1, ..., or auto
    trust_remote_code: bool = False  # run modelling code that comes with the model

    def check(self) -> None:
        """Raises ValueError for a dtype that does not exist."""
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ValueError(f"target.dtype={self.dtype}: use auto, float32, bfloat16 or float16")


@dataclass
class DrafterConfig:
    """Sizes of a drafter to be trained; everything not named here is taken from the target."""

    family: str = "dflash"
    layers: int = 2
    block_size: int = 8  # bonus token and block_size - 1 drafted positions
    target_layer_ids: list[int] | None = None  # tapped decoder layers, from 0; None: spread by the public formula
    warm_start: bool = True  # begin with the target's own layers where the shapes agree, else from noise
    mask_token_id: int | None = None  # None: the tokenizer's mask token, else the first id past its own

    def check(self) -> None:
        """Raises ValueError for sizes that no drafter can have."""
        if self.family != "dflash":
            raise ValueError(f"drafter.family={self.family}: only dflash exists")
        if self.layers < 1:
            raise ValueError(f"drafter.layers={self.layers}: a drafter has at least 1 layer")
        if self.block_size < 2:
            raise ValueError(f"drafter.block_size={self.block_size}: a block is a bonus token and at least one draft")


@dataclass
class DecodeOptions:
    """How to decode."""

    method: str = "ddtree"  # plain, chain or ddtree
    budget: int = 64  # drafted nodes the target verifies each round; a chain uses at most block_size - 1 of them
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0  # of sampling; the same seed gives the same text, whatever the method
    stop: list[str] = field(default_factory=list)  # texts that end the answer; they are not part of it

    def check(self) -> None:
        """Raises ValueError for options that cannot be followed."""
        if self.method not in METHODS:
            raise ValueError(f"method={self.method}: use {', '.join(METHODS)}")
        if self.budget < 1:
            raise ValueError(f"budget={self.budget}: a draft tree has at least 1 node (or use method=plain)")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: 0 for greedy decoding, or above")
        if any(not text for text in self.stop):
            raise ValueError("stop: an empty stop string would end every answer at once")


@dataclass
class EvaluationConfig:
    """What is decoded at every checkpoint."""

    prompts: int = 16  # held-out prompts
    prompt_tokens: int = 64  # of them, at most
    max_new_tokens: int = 128
    budgets: list[int] = field(default_factory=lambda: [16, 32, 64, 128])  # DDTree nodes
    temperature: float = 0.0
    seed: int = 0
    samples: int = 3  # decoded texts shown in the report

    def check(self) -> None:
        """Raises ValueError for an evaluation that measures nothing."""
        for name in ("prompts", "prompt_tokens", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"evaluation.{name}={getattr(self, name)}: at least 1")
        if not self.budgets or any(budget < 1 for budget in self.budgets):
            raise ValueError(f"evaluation.budgets={list(self.budgets)}: name DDTree node budgets of at least 1")
        if not self.temperature >= 0:
            raise ValueError(f"evaluation.temperature={self.temperature}: 0 for greedy decoding, or above")

    def methods(self, block_size: int) -> list[tuple[str, int]]:
        """(method, nodes) in the order of the table."""
        return [("plain", 0), ("chain", block_size - 1), *(("ddtree", budget) for budget in self.budgets)]
