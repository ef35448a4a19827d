"""Reading a drafter's config.json with nothing taken on trust: what is missing or wrong is noted, all of it."""

from dataclasses import dataclass
from typing import Any

ROPES = {  # what the kinds of rotary positions need besides their base
    "default": (),
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
# keys that change what a drafter computes, and the values with which it computes what we do
PLAIN: dict[str, tuple] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "add_swa_attention_sink_bias": (False,),
    "attention_sink_bias": (False,),
    "attention_value_scale": (1.0,),
    "output_multiplier": (1.0,),
    "final_logit_softcapping": (0.0,),
    "logit_scale": (1.0,),
    "is_neox_style": (True,),
    "rope_is_neox_style": (True,),
    "use_aux_hidden_state": (True,),
    "projector_type": ("dflash",),
    "shift_label": (False,),
    "conv_kernel_size": (0,),
    "selector_rank": (0,),
    "markov_rank": (0,),
    "quantization_config": (),
}

# what would take memory or time before any tensor shows that it is wrong
MOST = {"num_hidden_layers": 1024, "block_size": 4096, "draft_length": 4096}


@dataclass
class Keys:
    """One level of a config.json, where null is as good as nothing. What is missing or wrong is noted in `problems`."""

    raw: dict
    problems: list[str]
    prefix: str = ""

    def note(self, key: str, what: str) -> None:
        self.problems.append(f"config.json: {self.prefix}{key} {what}")

    def number(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """A whole number of at least `least`; without a default it must be there."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if value is None:
            self.note(key, "is missing")
        elif not isinstance(value, int) or isinstance(value, bool) or value < least:
            self.note(key, f"is {value!r}, expected a whole number of at least {least}")
            return None
        elif value > MOST.get(key, 2**31 - 1):
            self.note(key, f"is more than {MOST.get(key, 2**31 - 1)}: too large to be true")
            return None
        return value

    def real(self, key: str, default: float) -> float:
        """A number above 0."""
        value = default if self.raw.get(key) is None else self.raw[key]
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
            self.note(key, f"is {value!r}, expected a number above 0")
            return default
        return float(value)

    def flag(self, key: str) -> bool | None:
        """true, false, or None where it is not there."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, bool):
            self.note(key, f"is {value!r}, expected true or false")
            return None
        return value

    def numbers(self, key: str) -> list[int] | None:
        """A list of whole numbers that is not empty, or None."""
        value = self.raw.get(key)
        if value is None:
            return None
        whole = isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value)
        if not whole or not value:
            self.note(key, f"is {value!r}, expected a list of whole numbers")
            return None
        return value

    def part(self, key: str) -> "Keys":
        """The object under a key, empty where there is none."""
        value = self.raw.get(key)
        if value is not None and not isinstance(value, dict):
            self.note(key, f"is {value!r}, expected an object")
        return Keys(value if isinstance(value, dict) else {}, self.problems, f"{self.prefix}{key}.")

    def plain(self) -> None:
        """Notes keys that make it another model than ours."""
        for key, values in PLAIN.items():
            value = self.raw.get(key)
            if value is not None and value not in values:
                self.note(key, f"is {value!r}, which this project's drafters do not have")


def transformer(keys: Keys, layers: int | None) -> dict[str, Any]:
    """The Qwen3 part of a config, checked."""
    keys.plain()
    hidden, heads = keys.number("hidden_size"), keys.number("num_attention_heads")
    if keys.raw.get("target_hidden_size") not in (None, hidden):
        keys.note("target_hidden_size", f"is {keys.raw['target_hidden_size']}, expected hidden_size, {hidden}")
    if keys.raw.get("head_dim") is None and hidden and heads and hidden % heads:
        keys.note("head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads")
    groups = keys.number("num_key_value_heads", heads or 1)
    if heads and groups and heads % groups:
        keys.note("num_key_value_heads", f"is {groups}, which does not divide num_attention_heads, {heads}")
    options = {
        "hidden_size": hidden,
        "intermediate_size": keys.number("intermediate_size"),
        "num_hidden_layers": keys.number("num_hidden_layers", layers),
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "head_dim": keys.number("head_dim", (hidden or 1) // (heads or 1) or 1),
        "vocab_size": keys.number("vocab_size"),
        "max_position_embeddings": keys.number("max_position_embeddings", 32768),
        "rms_norm_eps": keys.real("rms_norm_eps", 1e-6),
        "rope_parameters": rope(keys),
        "tie_word_embeddings": False,
    }
    if options["head_dim"] and options["head_dim"] % 2:
        keys.note("head_dim", f"is {options['head_dim']}, expected an even number")
    return options | sliding(keys, options["num_hidden_layers"])


def rope(keys: Keys) -> dict[str, Any]:
    """Rotary positions: `rope_parameters`, as transformers 5 writes them, or `rope_theta` and `rope_scaling`."""
    new, old = keys.part("rope_parameters"), keys.part("rope_scaling")
    part = new if new.raw else old
    theta = part.real("rope_theta", keys.real("rope_theta", 10000.0))
    kind = part.raw.get("rope_type", part.raw.get("type", "default"))
    if kind not in ROPES:
        part.note("rope_type", f"is {kind!r}, expected one of {', '.join(ROPES)}")
    for key in ROPES.get(kind, ()):
        if part.raw.get(key) is None:
            part.note(key, f"is missing, which {kind} needs")
        part.real(key, 1.0)
    rest = {key: value for key, value in part.raw.items() if key not in ("type", "rope_type", "rope_theta")}
    return {"rope_type": kind, "rope_theta": theta} | (rest if kind != "default" else {})


def sliding(keys: Keys, layers: int | None) -> dict[str, Any]:
    """Which layers slide, and their window. Qwen3 forgets the window unless `use_sliding_window` is true."""
    types, on = keys.raw.get("layer_types"), keys.flag("use_sliding_window")
    if layers is None:  # noted already
        layers = len(types) if isinstance(types, list) else 1
    if types is None:
        first = keys.number("max_window_layers", layers, 0) or 0
        types = ["sliding_attention" if on and i >= first else "full_attention" for i in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or any(kind not in known for kind in types) or len(types) != layers:
        keys.note("layer_types", f"is {types!r}, expected {' or '.join(known)} for each of {layers} layers")
        types = ["full_attention"] * layers
    options: dict[str, Any] = {"layer_types": types}
    if "sliding_attention" in types:
        options |= {"use_sliding_window": True, "sliding_window": keys.number("sliding_window")}
    return options
