"""Options of the server. No torch here: a wrong option is refused before it loads."""

import ipaddress
import os
from dataclasses import dataclass

from infer.utils.checks import at_least

# the environment variable with the key that the server asks for and the chat sends
KEY_VARIABLE = "BLOCKDRAFT_API_KEY"


def loopback(host: str) -> bool:
    """Return whether the address is reached from this machine only."""
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
        """Raise ValueError for options that no server can follow."""
        if not 1 <= self.port < 65536:
            raise ValueError(f"server.port={self.port}: 1 to 65535")
        at_least(
            self, "server.", max_length=2, max_requests=1, max_body_bytes=1, memory_limit_mib=1024
        )
        if self.key() is None and not self.allow_unauthenticated and not loopback(self.host):
            raise ValueError(
                f"server.host={self.host}: other machines can reach that; set {KEY_VARIABLE} to a key, or say "
                "server.allow_unauthenticated=true"
            )

    @property
    def url(self) -> str:
        """Where it is reached."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def key(self) -> bytes | None:
        """Return the key that requests must carry; None: no key is asked for. Raises ValueError for
        a malformed key, without showing it."""
        key = os.environ.get(KEY_VARIABLE, "")
        if key and (len(key) < 16 or not key.isascii() or len(key.split()) != 1):
            raise ValueError(f"{KEY_VARIABLE}: a key is one word of at least 16 ASCII characters")
        return key.encode() or None
