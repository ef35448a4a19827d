"""Check once whether the Hugging Face hub can be reached, and switch to offline mode if not.

The check takes at most a few seconds. Without it, libraries try for about half a minute to reach an
unreachable hub.
"""

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

HUB_REACHABILITY_TIMEOUT_SECONDS = 3.0
DEFAULT_PORT_OF_HTTP_URLS = 80
DEFAULT_PORT_OF_HTTPS_URLS = 443
HUB_NAME_PATTERN = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# Options whose values may name repositories on the hub. The names are without a section: "path"
# stands for target.path and data.path.
HUB_OPTION_KEYS = {"path", "checkpoint", "checkpoints", "init", "base_model"}


def go_offline_if_hub_is_unreachable(options: Iterable[tuple[str, object]]) -> None:
    """Switch huggingface_hub to offline mode if an option's value looks like a repository on the
    hub, but the hub cannot be reached.

    options: pairs (name, value) of all options, with names such as "target.path"

    In offline mode, huggingface_hub uses its local cache, and reports a missing file at once.
    """
    values = {str(value) for key, value in options if HUB_OPTION_KEYS & set(key.split("."))}
    names_repository = any(
        HUB_NAME_PATTERN.fullmatch(value) and not Path(value).exists() for value in values
    )
    if names_repository and not is_hub_reachable():
        from huggingface_hub import constants

        os.environ["HF_HUB_OFFLINE"] = "1"
        constants.HF_HUB_OFFLINE = True


@cache
def is_hub_reachable() -> bool:
    """Return whether the hub, or the configured HTTP proxy, accepts a connection within
    HUB_REACHABILITY_TIMEOUT_SECONDS. Return False if huggingface_hub is in offline mode."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return False
    hub = urlsplit(constants.ENDPOINT)
    proxy = urlsplit(getproxies().get(hub.scheme, ""))
    address = proxy if proxy.hostname else hub
    default_port = (
        DEFAULT_PORT_OF_HTTP_URLS if address.scheme == "http" else DEFAULT_PORT_OF_HTTPS_URLS
    )
    connections = []

    def connect() -> None:
        port = address.port or default_port
        with (
            suppress(OSError),
            socket.create_connection(
                (address.hostname or "", port), HUB_REACHABILITY_TIMEOUT_SECONDS
            ),
        ):
            connections.append(address)

    # A thread is used because the socket's timeout does not include the time to resolve the host
    # name.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_REACHABILITY_TIMEOUT_SECONDS)
    return bool(connections)
