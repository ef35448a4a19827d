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
    """How the server meets the network. Requests must carry the key in the environment variable
    BLOCKDRAFT_API_KEY; on loopback, the default, no key is needed.

    host: address to listen on; 127.0.0.1: this machine only
    port: TCP port
    model_name: what clients call the model; None: the target's own name
    max_length: tokens of a prompt and its answer together; every row has room for as many
    max_texts: texts being written or waiting; further ones are told to try again later (429)
    max_body: bytes of a request
    memory: MiB of address space that the server may take, what the system reserves for threads
        among them (not on CUDA, which reserves far more than it uses); None: no limit. A request
        that does not fit is told 503
    open: listen to other machines without asking for a key
    """

    host: str = "127.0.0.1"
    port: int = 8000
    model_name: str | None = None
    max_length: int = 4096
    max_texts: int = 256
    max_body: int = 1_000_000
    memory: int | None = None
    open: bool = False

    def check(self) -> None:
        """Raise ValueError for options that no server can follow."""
        if not 1 <= self.port < 65536:
            raise ValueError(f"server.port={self.port}: 1 to 65535")
        at_least(self, "server.", max_length=2, max_texts=1, max_body=1, memory=1024)
        if self.key() is None and not self.open and not loopback(self.host):
            raise ValueError(
                f"server.host={self.host}: other machines can reach that; set {KEY_VARIABLE} to a key, or say "
                "server.open=true"
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
