"""Who is next: sequences wait in order of arrival, start when a slot and memory for their longest answer are free, and give both back."""

from __future__ import annotations

from collections import deque

from atoll.infer.pool import PAGE, Pool
from atoll.infer.prefix_cache import Hit, PrefixCache
from atoll.infer.prefix_keys import page_keys
from atoll.infer.sequence import Sequence


class Scheduler:
    """Queue and running sequences over one pool. Only one sequence is read at a time: the next may begin with what it leaves behind."""

    def __init__(self, pool: Pool, cache: PrefixCache) -> None:
        self.pool, self.cache = pool, cache
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.queries = self.hits = self.hit_tokens = 0

    def next_to_read(self, version: int) -> Sequence | None:
        """The sequence that is being read, or the first that waits, if it can start."""
        for s in self.running:
            if s.reading:
                return s
        if not self.waiting or not self.pool.free_slots or not self._start(self.waiting[0], version):
            return None
        s = self.waiting.popleft()
        self.running.append(s)
        return s

    def decoding(self) -> list[Sequence]:
        return [s for s in self.running if not s.reading]

    def _start(self, s: Sequence, version: int) -> bool:
        """Give `s` a slot, the pages of a prefix that is kept, and a promise of the rest; False where memory is short for now."""
        s.keys = page_keys(s.tokens, version, s.request.salt, ((i.start, i.digest) for i in s.images))
        asks = not s.request.prompt_logprobs
        hit = self.cache.find(s.keys[: (len(s.tokens) - 1) // PAGE], s.request.routing) if asks else None
        have = 0 if hit is None else len(hit.pages)
        if not self._promise(s, s.pages_needed() - have):
            if hit is not None:
                self.pool.release(hit.pages)
            assert self.running, "all memory is free or can be freed, and the longest request fits into it"
            return False
        s.slot, s.reading, s.fed, s.node = self.pool.free_slots.pop(), True, 0, None
        self.queries += asks
        if hit is not None:
            self._resume(s, hit)
        s.marks = [mark for mark in s.prefix_marks() if mark > s.fed]
        return True

    def _promise(self, s: Sequence, pages: int) -> bool:
        if not self.cache.make_room(pages * self.pool.page_bytes):
            return False
        self.pool.promised += pages
        s.promised = pages
        return True

    def _resume(self, s: Sequence, hit: Hit) -> None:
        """Begin where a kept prefix ends."""
        assert s.slot is not None
        self.pool.restore(s.slot, hit.snapshot)
        self.pool.enter(s.slot, 0, hit.pages)
        s.pages, s.fed, s.node = hit.pages, hit.node.end, hit.node
        if s.request.routing and hit.routing is not None:
            s.fed = 0
            s.note_routing(hit.routing)
            s.fed = hit.node.end
        if not s.answer.ids:
            s.answer.cached = s.fed
        self.hits += 1
        self.hit_tokens += s.fed

    def provide(self, s: Sequence, length: int) -> None:
        """Pages for the first `length` tokens of `s`, out of what it was promised."""
        new = -(-length // PAGE) - len(s.pages)
        if new > 0:
            assert s.slot is not None
            taken = self.pool.take(new, promised=True)
            s.promised -= new
            self.pool.enter(s.slot, len(s.pages), taken)
            s.pages = [*s.pages, *taken]

    def keep(self, s: Sequence) -> None:
        """Keep the prefix of `s` that was just read, if its length is one to be kept."""
        if s.fed in s.marks:
            assert s.slot is not None
            routing = s.routing() if s.request.routing else None
            s.node = self.cache.insert(s.keys[s.fed // PAGE - 1], s.fed, s.node, s.pages, s.slot, routing)

    def release(self, s: Sequence) -> None:
        """Give back the memory of `s`, if it has any."""
        if s.slot is not None:
            self.pool.release(s.pages)
            self.pool.promised -= s.promised
            self.pool.free_slots.append(s.slot)
        s.slot, s.pages, s.promised, s.node = None, [], 0, None

    def remove(self, s: Sequence) -> None:
        """Forget `s`, which has ended."""
        self.release(s)
        if s in self.running:
            self.running.remove(s)
        elif s in self.waiting:
            self.waiting.remove(s)

    def restart(self) -> None:
        """All running sequences are to be read again from their start, before those that wait; no prefix is kept."""
        for s in reversed(self.running):
            self.release(s)
            s.fed, s.reading = 0, True
            self.waiting.appendleft(s)
        self.running.clear()
        self.cache.clear()
