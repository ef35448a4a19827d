"""Options of the server.

This module does not import torch, so that an invalid option is refused before torch is loaded.
"""

import ipaddress
import os
from dataclasses import dataclass

from infer.utils.checks import require_at_least

# Environment variable with the API key that the server requires and the chat sends.
API_KEY_ENVIRONMENT_VARIABLE = "BLOCKDRAFT_API_KEY"
MIN_API_KEY_CHARACTERS = 16


def is_loopback(host: str) -> bool:
    """Return whether an address can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class ServerConfig:
    """Options of the HTTP server. With an API key in the environment variable BLOCKDRAFT_API_KEY,
    every request must carry it. An address that other machines can reach needs a key; the default
    address, loopback, does not.

    host: address to listen on; 127.0.0.1: this machine only
    port: TCP port
    model_name: name of the model in requests and responses; null: the target's name
    max_length: maximum tokens of a prompt and its output together; memory for it is reserved for
        every sequence of a batch
    max_requests: maximum number of requests that run or wait; more are refused with status 429
    max_body_bytes: maximum size of a request body in bytes
    memory_limit_mib: limit of the server's address space in MiB; a request that does not fit is
        refused with status 503. Not for CUDA, which reserves more address space than it uses. null:
        no limit
    allow_unauthenticated: serve other machines without a key
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_length: int = 4096
    max_requests: int = 256
    max_body_bytes: int = 1_000_000
    memory_limit_mib: int | None = None
    allow_unauthenticated: bool = False

    def check(self) -> None:
        """Raise ValueError for values out of range, and for an open server without a key."""
        if not 1 <= self.port < 65536:
            raise ValueError(f"server.port={self.port}: must be 1 to 65535")
        require_at_least(
            self, "server.", max_length=2, max_requests=1, max_body_bytes=1, memory_limit_mib=1024
        )
        if self.key() is None and not self.allow_unauthenticated and not is_loopback(self.host):
            raise ValueError(
                f"server.host={self.host}: other machines can reach that; set "
                f"{API_KEY_ENVIRONMENT_VARIABLE} to a "
                "key, or give server.allow_unauthenticated=true"
            )

    @property
    def url(self) -> str:
        """The address of the server."""
        is_ipv6 = ":" in self.host
        host = f"[{self.host}]" if is_ipv6 else self.host
        return f"http://{host}:{self.port}"

    def key(self) -> bytes | None:
        """Return the API key that requests must have; None: no key is required.

        Raises ValueError for a malformed key. The message does not contain the key.
        """
        key = os.environ.get(API_KEY_ENVIRONMENT_VARIABLE, "")
        is_ascii_word = key.isascii() and len(key.split()) == 1
        if key and (len(key) < MIN_API_KEY_CHARACTERS or not is_ascii_word):
            raise ValueError(
                f"{API_KEY_ENVIRONMENT_VARIABLE}: a key is one word of at least "
                f"{MIN_API_KEY_CHARACTERS} ASCII "
                "characters"
            )
        return key.encode() or None
