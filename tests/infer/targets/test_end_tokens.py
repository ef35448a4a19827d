"""Which tokens end an output: each of the four places that may name one, alone and with the
others."""

from itertools import product

import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GenerationConfig, LlamaConfig, PreTrainedTokenizerFast, Qwen3Config

from infer import generate
from infer.targets.end_tokens import find_eos_token_ids
from infer.targets.target import Target

V = 97
SPECIAL_TOKEN_NAMES = [
    *("<s>", "<gen>", "<config>", "<eos>", "<im_start>", "<im_end>", "<user>", "<assistant>"),
    *("<start>", "<end>", "<return>", "<eot>"),
]
TOKEN_IDS = {name: id for id, name in enumerate(SPECIAL_TOKEN_NAMES)}
CHATML_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}"
    "{{ '<im_start>' + m.role + '\n' + m.content + '<im_end>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<im_start>assistant\n' }}{% endif %}"
)


def make_tokenizer(template: str | None = None, **special: str) -> PreTrainedTokenizerFast:
    """A tokenizer of V words, the first of them special."""
    words = {
        name: id
        for id, name in enumerate(
            [*SPECIAL_TOKEN_NAMES, *(f"w{i}" for i in range(V - len(SPECIAL_TOKEN_NAMES)))]
        )
    }
    word_tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    word_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer, **special)
    tokenizer.add_tokens([AddedToken(name, special=True) for name in SPECIAL_TOKEN_NAMES])
    tokenizer.chat_template = template
    return tokenizer


def make_target(kind: str, model, tokenizer):
    if kind == "causal":
        return Target(model, tokenizer)
    from infer.masked.model import MaskedModel  # an optional package

    return MaskedModel(model, tokenizer, V - 2, False)


@pytest.mark.parametrize("kind", ["causal", "masked"])
@pytest.mark.parametrize("sources", [*product([False, True], repeat=4)])
def test_the_end_tokens_are_those_of_all_places(random_qwen3, kind, sources):
    in_generation, in_config, in_tokenizer, in_template = sources
    model = random_qwen3(vocab_size=V)
    model.generation_config.eos_token_id = [TOKEN_IDS["<gen>"], V - 1] if in_generation else None
    model.config.eos_token_id = TOKEN_IDS["<config>"] if in_config else None
    special = {"eos_token": "<eos>"} if in_tokenizer else {}
    tokenizer = make_tokenizer(CHATML_TEMPLATE if in_template else None, **special)
    target = make_target(kind, model, tokenizer)

    expected = {TOKEN_IDS["<gen>"], V - 1} if in_generation else set()
    expected |= {TOKEN_IDS["<config>"]} if in_config else set()
    expected |= {TOKEN_IDS["<eos>"]} if in_tokenizer else set()
    expected |= {TOKEN_IDS["<im_end>"]} if in_template else set()
    assert target.eos_token_ids == expected


def test_an_output_ends_where_any_place_says(random_qwen3):
    model = random_qwen3(vocab_size=V)
    target = Target(model, make_tokenizer())
    unstopped = generate(target, None, [5, 6], max_new_tokens=8, method="plain")
    assert unstopped.finish_reason == "length"
    end = unstopped.ids[3]
    model.config.eos_token_id = end
    model.generation_config.eos_token_id = TOKEN_IDS["<gen>"]
    first = unstopped.ids.index(end)
    ended = generate(target, None, [5, 6], max_new_tokens=8, method="plain")
    assert ended.ids == unstopped.ids[: first + 1] and ended.finish_reason == "stop"
    # an end token is no text, whether or not the tokenizer calls it special
    assert ended.text == target.tokenizer.decode(unstopped.ids[:first], skip_special_tokens=True)


def role_template(
    assistant_end: str, last_end: str, user: str = "<user>", prompt: str = "<assistant>"
) -> str:
    """A template of role tokens with these ends of an answer, inside a chat and as its last
    message."""
    return (
        f"{{{{ '<s>' }}}}{{% for m in messages %}}"
        f"{{% if m.role == 'user' %}}{{{{ '{user}' + m.content }}}}"
        f"{{% else %}}{{{{ '{prompt}' + m.content | trim }}}}"
        f"{{% if loop.last %}}{{{{ '{last_end}' }}}}"
        f"{{% else %}}{{{{ '{assistant_end}' }}}}{{% endif %}}{{% endif %}}"
        f"{{% endfor %}}{{% if add_generation_prompt %}}{{{{ '{prompt}' }}}}{{% endif %}}"
    )


# of older ChatML models: the last turn is closed only if a generation prompt follows
OPEN_LAST_TURN_TEMPLATE = (
    "{% for m in messages %}{{ '<im_start>' + m.role + '\n' + m.content }}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}"
    "{{ '<im_end>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}"
    "{{ '<im_start>assistant\n' }}{% endif %}"
)
TEMPLATE_CASES = {
    "chatml": (CHATML_TEMPLATE, "<im_end>"),
    "default system prompt": (
        "{{ '<im_start>system\nBe kind.<im_end>\n' }}" + CHATML_TEMPLATE,
        "<im_end>",
    ),
    "always asks": (
        CHATML_TEMPLATE.replace("{% if add_generation_prompt %}", "{% if true %}"),
        "<im_end>",
    ),
    "last turn open": (OPEN_LAST_TURN_TEMPLATE, "<im_end>"),
    "space before the end": (role_template(" <eos><s>", " <eos>", "[INST] ", " [/INST] "), "<eos>"),
    "end, then end of text": (role_template("<end>\\n", "<end>\\n<eos>"), "<end>"),
    "two tokens close a turn": (role_template("<end><eot>", "<end><eot>"), "<eot>"),
    "blank lines": (role_template("\\n\\n<eot>\\n", "\\n\\n<eot>\\n"), "<eot>"),
    "no end (GLM)": (role_template("", ""), None),
    "no end, and one token begins every turn": (
        role_template("", "", "<start>user\\n", "<start>assistant\\n"),
        None,
    ),
    "the same turn may go on (gpt-oss)": (
        role_template("<end>", "<return>", "<start>user", "<start>assistant"),
        None,
    ),
    "end in ordinary text": (role_template(" END ", " END "), None),
    "white space alone": (role_template("\\n", "\\n"), None),
    "no answers": (
        "{% for m in messages if m.role == 'user' %}{{ m.content }}<im_end>{% endfor %}",
        None,
    ),
    "refuses": ("{{ raise_exception('roles must be user and model') }}", None),
    "refuses a second question": (
        "{% if messages | length > 2 %}{{ 1 / 0 }}{% endif %}" + CHATML_TEMPLATE,
        None,
    ),
    "is no template": ("{% for %}", None),
}


@pytest.mark.parametrize("name", TEMPLATE_CASES)
def test_the_token_that_ends_a_turn_is_found_by_rendering(name):
    template, end = TEMPLATE_CASES[name]
    expected = set() if end is None else {TOKEN_IDS[end]}
    assert find_eos_token_ids((), make_tokenizer(template), V) == expected
    # as one of several templates, and added without being called special
    several_templates = make_tokenizer()
    several_templates.chat_template = {"default": template, "tool_use": CHATML_TEMPLATE}
    assert find_eos_token_ids((), several_templates, V) == expected


def test_ends_that_the_model_cannot_generate_and_class_defaults_are_left_out():
    outside_ids = GenerationConfig(eos_token_id=[1, V, 10**6])
    assert find_eos_token_ids((outside_ids, None), None, V) == {1}
    tokenizer = make_tokenizer(pad_token="<s>", eos_token="<eos>")
    assert find_eos_token_ids((), tokenizer, V) == {TOKEN_IDS["<eos>"]}  # padding ends nothing
    assert find_eos_token_ids((), tokenizer, 2) == set()
    # Llama's class says 2, which is ordinary text in Llama 3's vocabulary
    assert LlamaConfig().eos_token_id == 2
    without_added = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"#": 2})))
    assert find_eos_token_ids((LlamaConfig(),), without_added, V) == set()
    assert find_eos_token_ids((LlamaConfig(),), tokenizer, V) == {2, TOKEN_IDS["<eos>"]}
    assert find_eos_token_ids((LlamaConfig(),), None, V) == {2}
    assert find_eos_token_ids((Qwen3Config(),), None, V) == set()
