"""Removal of API keys, tokens and passwords from everything that is written or sent."""

import os
import re

REDACTED_TEXT = "<redacted>"
# Names of secrets such as api_key, HF_TOKEN and password. Options such as mask_token_id,
# prompt_tokens and tokens_per_second do not match.
SECRET_NAME_PATTERN = re.compile(
    r"(^|_|-)(api_?key|key|token|password|passwd|secret|credentials?)$", re.IGNORECASE
)
# Values that look like secrets: keys of the hub, of OpenAI and of W&B, and in an address
# user:password@ and ?token=.
SECRET_VALUE_PATTERN = re.compile(
    r"\bhf_\w{16,}|\bsk-[\w-]{16,}|\blocal-[0-9a-f]{40}\b|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[?&])(?:[\w-]*[_-])?(?:api_?key|key|token|password|passwd|secret)=[^&\s\"']+",
    re.IGNORECASE,
)
# Shorter values of environment variables are likely to be words that occur in ordinary text.
MIN_SECRET_CHARACTERS = 10


def redact_text(text: str) -> str:
    """Replace secrets in a text by REDACTED_TEXT.

    Secrets are the values of environment variables whose names match SECRET_NAME_PATTERN, and
    everything that matches SECRET_VALUE_PATTERN.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARACTERS and SECRET_NAME_PATTERN.search(name):
            text = text.replace(value, REDACTED_TEXT)
    return SECRET_VALUE_PATTERN.sub(REDACTED_TEXT, text)


def redact(value: object, name: str = "") -> object:
    """Return a configuration (dictionaries, lists and values) with its secrets replaced.

    `name` is the key of the value. Text is replaced as a whole if the name matches
    SECRET_NAME_PATTERN; otherwise see `redact_text`.
    """
    if isinstance(value, dict):
        return {key: redact(nested_value, str(key)) for key, nested_value in value.items()}
    if isinstance(value, list | tuple):
        return [redact(nested_value, name) for nested_value in value]
    if isinstance(value, str) and value:
        return REDACTED_TEXT if SECRET_NAME_PATTERN.search(name) else redact_text(value)
    return value
