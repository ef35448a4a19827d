"""Replace API keys, tokens and passwords in texts and configurations before they are written to
files, printed or sent."""

import os
import re

REDACTED_TEXT = "<redacted>"
# Matches the names of environment variables and options that hold secrets, such as HF_TOKEN and
# api_key. Does not match names such as mask_token_id, prompt_tokens and tokens_per_second.
SECRET_NAME_PATTERN = re.compile(
    r"(^|_|-)(api_?key|key|token|password|passwd|secret|credentials?)$", re.IGNORECASE
)
# Matches texts that look like secrets: keys of the Hugging Face hub, of OpenAI and of W&B; and in a
# URL, the user name with its password, or a parameter such as token=.
SECRET_VALUE_PATTERN = re.compile(
    r"\bhf_\w{16,}|\bsk-[\w-]{16,}|\blocal-[0-9a-f]{40}\b|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[?&])(?:[\w-]*[_-])?(?:api_?key|key|token|password|passwd|secret)=[^&\s\"']+",
    re.IGNORECASE,
)
# A secret environment variable with fewer characters is not replaced in texts, because its value
# could be a common word.
MIN_SECRET_CHARACTERS = 10


def redact_text(text: str) -> str:
    """Replace the secrets in a text by "<redacted>".

    Secrets are the values of environment variables whose names match SECRET_NAME_PATTERN, and
    everything that matches SECRET_VALUE_PATTERN.
    """
    for name, value in os.environ.items():
        if len(value) >= MIN_SECRET_CHARACTERS and SECRET_NAME_PATTERN.search(name):
            text = text.replace(value, REDACTED_TEXT)
    return SECRET_VALUE_PATTERN.sub(REDACTED_TEXT, text)


def redact(value: object, name: str = "") -> object:
    """Return a copy of a configuration (nested dictionaries, lists and values) with its secrets
    replaced by "<redacted>".

    name: the key under which `value` is stored. If it matches SECRET_NAME_PATTERN, as "api_key"
        does, texts are replaced as a whole. Otherwise only secrets inside texts are replaced
        (`redact_text`).
    """
    if isinstance(value, dict):
        return {key: redact(nested_value, str(key)) for key, nested_value in value.items()}
    if isinstance(value, list | tuple):
        return [redact(nested_value, name) for nested_value in value]
    if isinstance(value, str) and value:
        return REDACTED_TEXT if SECRET_NAME_PATTERN.search(name) else redact_text(value)
    return value
