"""Whether the model hub answers: asked once, for seconds, before anything retries for half a
minute."""

import os
import re
import socket
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Thread
from urllib.parse import urlsplit
from urllib.request import getproxies

WAIT = 3.0  # seconds for an answer of the hub
KEYS = {
    "path",
    "checkpoint",
    "checkpoints",
    "init",
    "base_model",
}  # options that may name what is there


def refrain_from_silent_hub(options: Iterable[tuple[str, object]]) -> None:
    """Where an option names something on the hub and the hub does not answer, let this process use
    only what is on this machine: what is missing is said at once then."""
    names = {str(value) for key, value in options if KEYS & set(key.split("."))}
    named = any(
        re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) and not Path(name).exists()
        for name in names
    )
    if named and not hub_answers():
        from huggingface_hub import constants

        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


@cache
def hub_answers() -> bool:
    """Return whether the hub, or the proxy to it, takes a connection within seconds."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = urlsplit(getproxies().get(hub.scheme, ""))
    place = proxy if proxy.hostname else hub
    answered = []

    def connect() -> None:
        port = place.port or {"http": 80}.get(place.scheme, 443)
        with suppress(OSError), socket.create_connection((place.hostname, port), WAIT):
            answered.append(True)

    thread = Thread(
        target=connect, daemon=True
    )  # looking up the name may take longer than any limit
    thread.start()
    thread.join(WAIT)
    return bool(answered)
