"""Replacement of API keys, tokens and passwords in everything that is written to files or sent."""

import os
import re

REDACTED_TEXT = "<redacted>"
# Matches names of secrets, such as api_key, HF_TOKEN and password. It does not match option names
# such as mask_token_id, prompt_tokens and tokens_per_second.
SECRET_NAME_PATTERN = re.compile(
    r"(^|_|-)(api_?key|key|token|password|passwd|secret|credentials?)$", re.IGNORECASE
)
# Matches texts that look like secrets: keys of the Hugging Face hub, of OpenAI and of W&B, and in a
# URL the password in user:password@ and the parameter in ?token=.
SECRET_VALUE_PATTERN = re.compile(
    r"\bhf_\w{16,}|\bsk-[\w-]{16,}|\blocal-[0-9a-f]{40}\b|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[?&])(?:[\w-]*[_-])?(?:api_?key|key|token|password|passwd|secret)=[^&\s\"']+",
    re.IGNORECASE,
)
# Shorter values of environment variables are not replaced, because they are likely to be words that
# occur in ordinary text.
MIN_SECRET_CHARACTERS = 10


def redact_text(text: str) -> str:
    """Replace the secrets in a text by REDACTED_TEXT.

    Secrets are the values of environment variables whose names match SECRET_NAME_PATTERN, and
    everything that matches SECRET_VALUE_PATTERN.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARACTERS and SECRET_NAME_PATTERN.search(name):
            text = text.replace(value, REDACTED_TEXT)
    return SECRET_VALUE_PATTERN.sub(REDACTED_TEXT, text)


def redact(value: object, name: str = "") -> object:
    """Return a configuration, which consists of nested dictionaries, lists and values, with its
    secrets replaced.

    name: the key of the value. If the name matches SECRET_NAME_PATTERN, a text is replaced as a
        whole; otherwise only the secrets in the text are replaced (`redact_text`).
    """
    if isinstance(value, dict):
        return {key: redact(nested_value, str(key)) for key, nested_value in value.items()}
    if isinstance(value, list | tuple):
        return [redact(nested_value, name) for nested_value in value]
    if isinstance(value, str) and value:
        return REDACTED_TEXT if SECRET_NAME_PATTERN.search(name) else redact_text(value)
    return value
