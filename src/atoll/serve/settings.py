"""What the server may do and how much of it: one dataclass, checked before anything is bound."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from atoll.config import UserError


@dataclass(frozen=True)
class ServerSettings:
    """Address, keys and limits. Times are seconds.

    `keys` are the API keys of clients, `admin_key` that of reload and pause; without the latter those two are off. `hosts` are names,
    beside the loopback's, under which the server may be reached; with none given and keys set, any.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str = "atoll"  # of the model, in requests and answers
    keys: tuple[str, ...] = ()
    admin_key: str | None = None
    hosts: tuple[str, ...] = ()
    max_model_len: int = 32768  # tokens of prompt and answer together
    default_tokens: int = 4096  # of a chat answer or of token ids in, where a request does not say; memory is promised for all of them
    max_choices: int = 64  # answers of one request: prompts times n
    max_live: int = 256  # sequences running or waiting; one more is answered 429
    max_body: int = 32 << 20  # bytes
    max_image_pixels: int = 16 << 20
    max_images: int = 16
    max_schema: int = 64 << 10  # bytes of a JSON schema, all tools' together
    max_logprobs: int = 20
    timeout: float = 600.0  # of a whole answer, waiting included
    body_timeout: float = 30.0  # of reading a request
    thinking: bool = True  # whether assistants think unless a request says otherwise
    drain: float = 30.0  # how long running answers may go on after SIGTERM
    memory_tokens: int = 1 << 20  # sampled tokens that are remembered, so that conversations sent back keep their ids

    def check(self) -> None:
        """Raises `UserError`, one line: a public address without a key, keys that are none, limits below one."""
        if not self.keys and not is_loopback(self.host):
            raise UserError(f"host = {self.host}: anyone on the network could use the model; set ATOLL_API_KEY, or bind to 127.0.0.1")
        given = (*self.keys, *([] if self.admin_key is None else [self.admin_key]))
        if any(len(key) < 8 or not key.isascii() or not key.isprintable() or key != key.strip() for key in given):
            raise UserError("ATOLL_API_KEY, ATOLL_ADMIN_KEY: a key has at least 8 printable ASCII characters, no space at its ends")
        if self.admin_key in self.keys:
            raise UserError("ATOLL_ADMIN_KEY: is a client's key too; give it one of its own")
        if not 0 <= self.port < 65536:
            raise UserError(f"port = {self.port}: 0 (any free one) to 65535 is expected")
        for field in ("max_model_len", "max_live", "timeout", "body_timeout"):
            if not getattr(self, field) > 0:
                raise UserError(f"{field.replace('_', '-')} = {getattr(self, field)}: a number above 0 is expected")
        if not self.drain >= 0:
            raise UserError(f"drain = {self.drain}: 0 seconds or more are expected")


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
