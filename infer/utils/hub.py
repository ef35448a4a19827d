"""Checks once whether the model hub is reachable, so that an unreachable hub costs seconds.

Without this check, libraries retry for about half a minute.
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
# Options whose values may be names on the hub.
HUB_OPTION_KEYS = {"path", "checkpoint", "checkpoints", "init", "base_model"}


def go_offline_if_hub_is_unreachable(options: Iterable[tuple[str, object]]) -> None:
    """Switch huggingface_hub to offline mode if an option names a repository on the hub and the
    hub is not reachable.

    options: (dotted key, value) of every option

    A file that is missing on this machine is then reported at once.
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
    """Return whether the hub, or the proxy in front of it, accepts a connection in
    HUB_REACHABILITY_TIMEOUT_SECONDS."""
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

    # A thread, because resolving the host name may take longer than the timeout.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(HUB_REACHABILITY_TIMEOUT_SECONDS)
    return bool(connections)
