"""Removal of keys, tokens and passwords from everything that is written or sent."""

import os
import re

HIDDEN = "<redacted>"
# names of secrets: api_key, HF_TOKEN, password; not mask_token_id, prompt_tokens, tokens_per_second
NAMES = re.compile(
    r"(^|_|-)(api_?key|key|token|password|passwd|secret|credentials?)$", re.IGNORECASE
)
# what secrets look like: of the hub, of OpenAI's and W&B's interfaces, user:password@ and ?token=
# in an address
SHAPES = re.compile(
    r"\bhf_\w{16,}|\bsk-[\w-]{16,}|\blocal-[0-9a-f]{40}\b|(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
    r"|(?<=[?&])(?:[\w-]*[_-])?(?:api_?key|key|token|password|passwd|secret)=[^&\s\"']+",
    re.IGNORECASE,
)
SHORTEST = 10  # shorter values of the environment are words that stand elsewhere too


def redact_text(text: str) -> str:
    """Return the text without what looks like a secret, and without the values of the environment's
    secrets."""
    for name, value in os.environ.items():
        if len(value) >= SHORTEST and NAMES.search(name):
            text = text.replace(value, HIDDEN)
    return SHAPES.sub(HIDDEN, text)


def redact(value: object, name: str = "") -> object:
    """Return a configuration (dictionaries, lists, values) without secrets: by name, by shape, by
    the environment."""
    if isinstance(value, dict):
        return {key: redact(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redact(inner, name) for inner in value]
    if isinstance(value, str) and value:
        return HIDDEN if NAMES.search(name) else redact_text(value)
    return value
