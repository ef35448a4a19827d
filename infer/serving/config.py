"""Options of the server.

This module does not import torch, so that an invalid option is refused before torch is loaded.
"""

import ipaddress
import os
from dataclasses import dataclass

from infer.utils.checks import require_at_least

# Environment variable with the API key that the server requires and `./launch.sh chat` sends
API_KEY_ENVIRONMENT_VARIABLE = "BLOCKDRAFT_API_KEY"
MIN_API_KEY_CHARACTERS = 16


def is_loopback(host: str) -> bool:
    """Return whether a host name or IP address can be reached only from this machine."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass
class ServerConfig:
    """Options of the HTTP server. If the environment variable BLOCKDRAFT_API_KEY contains an API
    key, every request must send this key. The default host can be reached from this machine only
    and needs no key. A host that other machines can reach needs one.

    host: address that the server listens on. 127.0.0.1 accepts connections from this machine only
    port: TCP port that the server listens on
    model_name: name of the model in requests and responses. null means the target's name
    max_length: maximum number of tokens of a prompt and its output together. Memory for this many
        tokens is reserved for every sequence of a batch
    max_requests: maximum number of sequences that run or wait. Further requests are refused with
        status 429
    max_body_bytes: maximum size of a request body in bytes
    memory_limit_mib: limit of the server's address space in MiB. A request that needs more memory
        is refused with status 503. Do not set it on CUDA, which reserves more address space than it
        uses. null means no limit
    allow_unauthenticated: whether a server without a key may listen on a host that other machines
        can reach
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
        """Raise ValueError for an option that is out of range, and for a server without protection.

        A server is without protection if other machines can reach it, no key is set, and
        `allow_unauthenticated` is false.
        """
        if not 1 <= self.port < 65536:
            raise ValueError(f"server.port={self.port}: give a port number from 1 to 65535")
        require_at_least(
            self, "server.", max_length=2, max_requests=1, max_body_bytes=1, memory_limit_mib=1024
        )
        if (
            self.read_api_key() is None
            and not self.allow_unauthenticated
            and not is_loopback(self.host)
        ):
            raise ValueError(
                f"server.host={self.host}: other machines can reach this address, and the server "
                f"requires no key. Set the environment variable {API_KEY_ENVIRONMENT_VARIABLE} to "
                "a key, or give server.allow_unauthenticated=true"
            )

    @property
    def url(self) -> str:
        """The address of the server, such as http://127.0.0.1:8000."""
        is_ipv6 = ":" in self.host
        host = f"[{self.host}]" if is_ipv6 else self.host
        return f"http://{host}:{self.port}"

    def read_api_key(self) -> bytes | None:
        """Return the API key that requests must send, or None if no key is required.

        Raises ValueError for a malformed key. The error message does not contain the key.
        """
        key = os.environ.get(API_KEY_ENVIRONMENT_VARIABLE, "")
        is_ascii_word = key.isascii() and len(key.split()) == 1
        if key and (len(key) < MIN_API_KEY_CHARACTERS or not is_ascii_word):
            raise ValueError(
                f"the environment variable {API_KEY_ENVIRONMENT_VARIABLE} is not a valid key: set "
                f"it to one word of at least {MIN_API_KEY_CHARACTERS} ASCII characters"
            )
        return key.encode() or None
