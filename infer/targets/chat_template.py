"""Check a tokenizer's chat template for syntax errors, and set default values of the template's
options."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from infer.targets.checks import DOWNLOAD_AGAIN_HINT


def check_chat_template_syntax(path: str, tokenizer: PreTrainedTokenizerBase) -> None:
    """Render a test message with a tokenizer's chat template. Raise ValueError if the template has
    a syntax error. Other exceptions are ignored, because a valid template may refuse the test
    message.

    path: the target's path, for the error message
    """
    if getattr(tokenizer, "chat_template", None) is None:
        return
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except TemplateSyntaxError as error:
        reason = f"line {error.lineno}, {error.message}"
        raise ValueError(
            f"target.path={path}: the chat template is damaged ({reason}); {DOWNLOAD_AGAIN_HINT}"
        ) from error
    except Exception:  # a template is a program and can raise any exception
        return


def write_template_defaults(
    tokenizer: PreTrainedTokenizerBase, options: Mapping[str, object]
) -> None:
    """Set default values of chat template options, such as {"enable_thinking": False}.

    The defaults are written into the tokenizer's template in place. All later users of the
    tokenizer therefore get them. Raises ValueError if the template does not contain an option's
    name.
    """
    if not options:
        return
    template: Any = tokenizer.chat_template
    words = set(re.findall(r"\w+", str(template or "")))
    for name in options:
        if name not in words:
            raise ValueError(
                f"target.chat_template_kwargs.{name}: this model's chat template has no option of "
                "this name; leave it out"
            )
    statements = []
    for name, value in options.items():
        literal = "none" if value is None else json.dumps(value)
        statements.append(
            f"{{%- if {name} is not defined %}}{{% set {name} = {literal} %}}{{% endif -%}}"
        )
    defaults = "".join(statements)
    if type(template) is dict:  # the tokenizer has several named templates
        tokenizer.chat_template = {name: defaults + text for name, text in template.items()}
    else:
        tokenizer.chat_template = defaults + template
