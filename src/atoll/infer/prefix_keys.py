"""Names of prefixes: a chain of hashes over pages of token ids, so that equal names mean equal tokens, images, weights and salt."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable

from atoll.infer.pool import PAGE


def page_keys(tokens: list[int], version: int, salt: str, images: Iterable[tuple[int, bytes]] = ()) -> list[bytes]:
    """One name for each whole page of `tokens`: of everything from the document's start to the page's end.

    images: where each image starts, and its digest; an image belongs to the page in which it starts.
    """
    key = hashlib.sha256(f"{version}:{salt}".encode("utf-8", "surrogatepass")).digest()
    digests: dict[int, list[bytes]] = {}
    for start, digest in images:
        digests.setdefault(start // PAGE, []).append(start.to_bytes(8, "little") + digest)
    keys = []
    for page in range(len(tokens) // PAGE):
        ids = array("q", tokens[page * PAGE : (page + 1) * PAGE]).tobytes()
        key = hashlib.sha256(b"".join([key, ids, *digests.get(page, [])])).digest()
        keys.append(key)
    return keys
