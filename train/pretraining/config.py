"""Options of the embedded target's pre-training. No torch here: a wrong option is refused before it loads."""

from dataclasses import dataclass

from infer.utils.checks import above_zero, at_least


@dataclass
class PretrainConfig:
    """Options of the embedded target's pre-training; data/embedded/pretraining.json has those of the shipped one.

    out: the folder that is written
    init: a folder to go on from, tokenizer and weights, instead of random weights
    seed: seed of weights and data order
    model_type: qwen3, or qwen3_5_text: three of four layers are Gated DeltaNet
    vocab_size: tokens, special ones among them
    hidden_size: entries of a hidden state
    intermediate_size: entries between the two feed-forward matrices
    num_hidden_layers: layers
    num_attention_heads: query heads
    num_key_value_heads: key and value heads
    head_dim: entries of a head
    length: tokens a window
    batch: windows a step
    loops: windows a step that repeat themselves, to learn to leave loops
    loop_decline: how likely a repeated token is to be, as a share of the time before
    steps: training steps
    lr: peak rate of both optimisers
    compile: train under torch.compile
    save_every: steps between saves
    answers: texts that the finished target writes, for drafters to learn from
    prompt_tokens: tokens of such a text's prompt
    answer_tokens: tokens that the target writes, greedy
    """

    out: str = "runs/embedded-target"
    init: str | None = None
    seed: int = 0
    model_type: str = "qwen3"
    vocab_size: int = 512
    hidden_size: int = 192
    intermediate_size: int = 384
    num_hidden_layers: int = 12
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    head_dim: int = 32
    length: int = 512
    batch: int = 16
    loops: int = 4
    loop_decline: float = 0.5
    steps: int = 1000
    lr: float = 3e-3
    compile: bool = True
    save_every: int = 100
    answers: int = 2560
    prompt_tokens: int = 96
    answer_tokens: int = 160

    def check(self) -> None:
        """Raise ValueError for a recipe that cannot run."""
        at_least(self, vocab_size=1, hidden_size=1, intermediate_size=1, num_hidden_layers=1, num_attention_heads=1)
        at_least(self, num_key_value_heads=1, head_dim=1, prompt_tokens=1, answer_tokens=1, answers=0, loops=0)
        at_least(self, steps=1, batch=1, length=1, save_every=1)
        if self.loops and self.length < 256:
            raise ValueError(f"length={self.length}: windows that repeat themselves take 256 tokens; or loops=0")
        if not 0 <= self.loop_decline <= 1:
            raise ValueError(f"loop_decline={self.loop_decline}: a share between 0 and 1")
        if self.model_type not in ("qwen3", "qwen3_5_text"):
            raise ValueError(f"model_type={self.model_type}: qwen3 or qwen3_5_text")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(f"num_key_value_heads={self.num_key_value_heads} divides num_attention_heads")
        above_zero(self, "", "lr")
