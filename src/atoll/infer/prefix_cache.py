"""Prefixes kept for requests that begin alike: at some ends of pages, the KDA layers' states with the MLA pages that lead there.

A tree: a node holds the pages since its parent's end, and a snapshot of the states at its own end. A hit is a node whose snapshot
and whose pages, back to the root, are all there; it is read, never written: pages are shared, states copied. What has not been used
for longest moves to host memory when the device has no room, and is dropped when the host has none; a hit brings it back.
An inner node may lose its snapshot and still lead to those below it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from atoll.infer.pool import PAGE, Pool, Snapshot


@dataclass(eq=False)
class Node:
    """A prefix of `end` tokens. `pages` or `latents` (on the host) since the parent's end; `snapshot` or `kept` (on the host), or neither.

    routing: experts of those tokens, int [layers, n, k], where they were recorded.
    """

    key: bytes
    end: int
    parent: Node | None
    pages: list[int] = field(default_factory=list)
    latents: Tensor | None = None
    snapshot: Snapshot | None = None
    kept: Snapshot | None = None
    routing: Tensor | None = None
    children: list[Node] = field(default_factory=list)
    used: int = 0

    def chain(self) -> list[Node]:
        """From the root's child down to this node."""
        return [*([] if self.parent is None else self.parent.chain()), self]

    def host_bytes(self) -> int:
        latents = 0 if self.latents is None else self.latents.numel() * self.latents.element_size()
        return latents + (0 if self.kept is None else self.kept.num_bytes())


@dataclass
class Hit:
    """A prefix that was found: its tokens, its shared pages (the receiver releases them), its state, its routing where it is known."""

    node: Node
    pages: list[int]
    snapshot: Snapshot
    routing: Tensor | None


class PrefixCache:
    """Prefixes in a pool's memory and in `host_limit` bytes of host memory."""

    def __init__(self, pool: Pool, host_limit: int) -> None:
        self.pool, self.host_limit, self.host_bytes = pool, host_limit, 0
        self.nodes: dict[bytes, Node] = {}
        self.evictions = self.restores = self.drops = 0
        self._clock = 0
        self._held: set[Node] = set()  # being read: not to be moved

    # -------------------------------------------------- finding

    def find(self, keys: list[bytes], routing: bool = False) -> Hit | None:
        """The longest prefix named in `keys` (one a page, in order) that is there whole, with its `routing` if that is asked for.

        What of it is on the host comes back to the device.
        """
        for key in reversed(keys):
            node = self.nodes.get(key)
            if node is None or (node.snapshot is None and node.kept is None):
                continue
            chain = node.chain()
            if routing and any(n.routing is None for n in chain):
                continue
            if (hit := self._claim(node, chain)) is not None:
                return hit
        return None

    def _claim(self, node: Node, chain: list[Node]) -> Hit | None:
        """Share the chain's pages, those on the host brought back first; None where the device has no room for them."""
        self._held.update(chain)
        try:
            for n in chain:
                if n.latents is not None and not self._bring_pages(n):
                    return None
            if node.snapshot is None and node.kept is not None and self.make_room(self.pool.snapshot_bytes):
                node.snapshot = self.pool.adopt(node.kept)
                self._unkeep(node)
        finally:
            self._held.clear()
        self._touch(node)
        pages = [page for n in chain for page in n.pages]
        self.pool.share(pages)
        routed = [n.routing for n in chain if n.routing is not None]
        state = node.snapshot or node.kept
        assert state is not None
        return Hit(node, pages, state, torch.cat(routed, 1) if len(routed) == len(chain) else None)

    def _bring_pages(self, node: Node) -> bool:
        assert node.latents is not None
        count = node.latents.shape[1]
        if not self.make_room(count * self.pool.page_bytes):
            return False
        node.pages = self.pool.take(count, promised=False)
        self.pool.write(node.pages, node.latents)
        self.host_bytes -= node.latents.numel() * node.latents.element_size()
        node.latents = None
        self.restores += 1
        return True

    def _touch(self, node: Node) -> None:
        self._clock += 1
        node.used = self._clock

    # -------------------------------------------------- keeping

    def insert(self, key: bytes, end: int, parent: Node | None, pages: list[int], slot: int, routing: Tensor | None) -> Node | None:
        """Keep the prefix of `end` tokens: its `pages`, its `routing`, and the state in `slot`. The node it is now, or where there is no
        room for it the parent, if that is still there.

        `parent` is the nearest shorter prefix that was found or kept. A prefix that is there already gets what it lacks.
        """
        if parent is not None and self.nodes.get(parent.key) is not parent:
            parent = None  # dropped since
        node = self.nodes.get(key) or self._link(Node(key, end, parent), pages)
        self._held.add(node)
        fits = node.snapshot is not None or self.make_room(self.pool.snapshot_bytes)
        self._held.clear()
        if not fits:
            if node.kept is None and not node.children:
                self._drop(node)
            return parent
        if node.snapshot is None:
            self._unkeep(node)
            node.snapshot = self.pool.snapshot(slot)
        if node.routing is None and routing is not None:
            node.routing = routing[:, 0 if node.parent is None else node.parent.end : end].clone()
        self._touch(node)
        return node

    def _link(self, node: Node, pages: list[int]) -> Node:
        """Put a new node into the tree, with its part of its prefix's pages."""
        self.nodes[node.key] = node
        node.pages = pages[0 if node.parent is None else node.parent.end // PAGE : node.end // PAGE]
        self.pool.share(node.pages)
        if node.parent is not None:
            node.parent.children.append(node)
        return node

    # -------------------------------------------------- making room

    def make_room(self, size: int) -> bool:
        """Move or drop what was not used for longest until `size` bytes of the device are free; False if that cannot be."""
        while self.pool.room() < size:
            movable = [n for n in self.nodes.values() if n not in self._held and (n.snapshot is not None or self._leaf(n))]
            if not movable:
                return False
            self._evict(min(movable, key=lambda n: n.used))
        return True

    def _leaf(self, node: Node) -> bool:
        """Whether the node's pages would be free without it: no pages below it, and no sequence reads them."""
        return bool(node.pages) and not any(c.pages for c in node.children) and self.pool.alone(node.pages)

    def _evict(self, node: Node) -> None:
        """The node's state, and its pages where they go too, to the host; what the host has no room for is dropped."""
        leaf, state = self._leaf(node), node.snapshot
        self.evictions += 1
        size = (len(node.pages) * self.pool.page_bytes if leaf else 0) + (0 if state is None else state.num_bytes())
        fits = self._host_room(size, node)
        if self.nodes.get(node.key) is not node:
            return  # it led only to what was dropped
        if state is not None:
            node.snapshot = None
            self.pool.forget()
        if not fits:
            self._lose(node, leaf)
            return
        if state is not None:
            node.kept = state.to("cpu")
        if leaf:
            node.latents = self.pool.read(node.pages)
            self.pool.release(node.pages)
            node.pages = []
        self.host_bytes += size

    def _lose(self, node: Node, pages: bool) -> None:
        """Drop a node's state; with `pages`, or where it leads nowhere, the node and what is below it."""
        self._unkeep(node)
        if pages or not node.children:
            self._drop(node)

    def _host_room(self, size: int, keep: Node) -> bool:
        keeps = {keep, *keep.chain(), *self._held}
        while self.host_bytes + size > self.host_limit:
            there = [n for n in self.nodes.values() if n not in keeps and n.host_bytes() and (n.kept is not None or not n.children)]
            if size > self.host_limit or not there:
                return False
            oldest = min(there, key=lambda n: n.used)
            self._lose(oldest, pages=oldest.latents is not None and not oldest.children)
        return True

    def _unkeep(self, node: Node) -> None:
        if node.kept is not None:
            self.host_bytes -= node.kept.num_bytes()
            node.kept = None

    def _drop(self, node: Node) -> None:
        """Forget a node, what is below it, and parents that then lead nowhere."""
        for child in list(node.children):
            self._drop(child)
        if self.nodes.pop(node.key, None) is None:
            return
        self.drops += 1
        self.pool.release(node.pages)
        self.host_bytes -= node.host_bytes()
        if node.snapshot is not None:
            self.pool.forget()
        node.pages, node.latents, node.snapshot, node.kept = [], None, None, None
        parent = node.parent
        if parent is not None:
            parent.children.remove(node)
            if not parent.children and parent.snapshot is None and parent.kept is None and parent not in self._held:
                self._drop(parent)

    def clear(self) -> None:
        """Forget everything."""
        for node in list(self.nodes.values()):
            self._drop(node)

    def tokens(self) -> int:
        """Tokens whose pages are kept, wherever."""
        return sum(len(n.pages) * PAGE + (0 if n.latents is None else n.latents.shape[1] * PAGE) for n in self.nodes.values())

    def __iter__(self) -> Iterator[Node]:
        return iter(self.nodes.values())
