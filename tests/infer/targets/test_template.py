"""What a chat template is told: one setting, in the tokenizer's template, the drafter's folder and
the card."""

import json

import pytest
import torch

from infer.api import encode_prompt
from infer.cli.models import load_target_and_drafter
from infer.config import TargetConfig
from infer.drafters.config_keys import build_public_config
from infer.formats.checkpoint import load_drafter, save_drafter
from infer.targets.chat_template import write_template_defaults
from infer.targets.loading import load_tokenizer, resolve_hub_id_or_folder

OPTIONS_TEMPLATE = """{% for m in messages %}{{ m.content }}
{% endfor %}{% if style == 'loud' %}!{% endif %}{% if enable_thinking is false %}#{% endif %}"""
MESSAGES = [{"role": "user", "content": "Hi"}]


def test_a_setting_holds_unless_a_row_or_request_says_otherwise():
    tokenizer = load_tokenizer()
    tokenizer.chat_template = OPTIONS_TEMPLATE

    def text(**template_options) -> str:
        return tokenizer.apply_chat_template(MESSAGES, tokenize=False, **template_options)

    assert text() == "Hi\n"
    write_template_defaults(tokenizer, {"enable_thinking": False, "style": "loud"})
    assert text() == "Hi\n!#"
    assert text(enable_thinking=True) == "Hi\n!" and text(style=None) == "Hi\n#"
    with pytest.raises(
        ValueError,
        match=r"target\.chat_template_kwargs\.enable_thinkin: this model's chat template",
    ):
        write_template_defaults(tokenizer, {"enable_thinkin": False})


def test_a_drafter_brings_its_setting_along(repo, tmp_path, monkeypatch):
    """Written into its folder, read back, and told to the target that it is loaded with, unless
    that says otherwise."""
    import infer.targets.loading as loading

    monkeypatch.setattr(
        loading.AutoTokenizer,
        "from_pretrained",
        lambda path, plain=loading.AutoTokenizer.from_pretrained, **options: with_template(
            plain(path, **options)
        ),
    )
    drafter = load_drafter(repo / "data" / "embedded" / "drafter")
    drafter.config.chat_template_kwargs = {"enable_thinking": False}
    assert build_public_config(drafter.config)["chat_template_kwargs"] == {"enable_thinking": False}
    save_drafter(drafter.config, drafter.state_dict(), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["chat_template_kwargs"] == {
        "enable_thinking": False
    }
    for template_options, end in (({}, "#"), ({"enable_thinking": True}, "\n")):
        place = TargetConfig(
            path=resolve_hub_id_or_folder("embedded"),
            device="cpu",
            chat_template_kwargs=template_options,
        )
        target, loaded = load_target_and_drafter(place, str(tmp_path))
        assert target.tokenizer.decode(encode_prompt(target, MESSAGES)).endswith(end)
        assert torch.equal(loaded.norm.weight, drafter.norm.weight)


def with_template(tokenizer):
    tokenizer.chat_template = OPTIONS_TEMPLATE
    return tokenizer


@pytest.mark.parametrize("template_options", [{"a b": True}, {"x": [1]}, {"x": {}}])
def test_a_setting_is_a_name_and_a_plain_value(template_options):
    with pytest.raises(ValueError, match="true, false, a number or a text"):
        TargetConfig(chat_template_kwargs=template_options).check()
