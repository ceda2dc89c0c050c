"""The tree of kept prefixes in little memory: least recently used first, states with their pages, nothing lost or counted twice."""

from __future__ import annotations

import pytest
import torch
from infer.models import CONFIG, prompt

from atoll.infer.pool import PAGE, Pool
from atoll.infer.prefix_cache import PrefixCache
from atoll.infer.prefix_keys import page_keys


class Bench:
    """A pool of so many pages and snapshots, whose content says which prefix wrote it."""

    def __init__(self, pages: float, host: float, snapshots: int = 0):
        self.pool = Pool(CONFIG, 1, 0, dtype=torch.float32, device=torch.device("cpu"))
        unit = self.pool.page_bytes
        self.pool.limit = int(pages * unit) + snapshots * self.pool.snapshot_bytes
        self.cache = PrefixCache(self.pool, int(host * unit))

    def keep(self, tokens: list[int], parent=None, mark: float = 0.0):
        keys = page_keys(tokens, 0, "")
        count = len(keys) - (0 if parent is None else parent.end // PAGE)
        assert self.cache.make_room(count * self.pool.page_bytes)
        own = self.pool.take(count, promised=False)
        before = [] if parent is None else [p for n in parent.chain() for p in n.pages]
        for page in own:
            self.pool.latents[:, page] = mark
        self.pool.states[:, 0], self.pool.windows[:, 0] = mark, -mark
        node = self.cache.insert(keys[-1], len(keys) * PAGE, parent, [*before, *own], 0, None)
        self.pool.release(own)
        return node

    def find(self, tokens: list[int]):
        """What is found, checked for the mark it was written with; released again."""
        hit = self.cache.find(page_keys(tokens, 0, ""))
        if hit is None:
            return None
        mark = float(hit.snapshot.states.flatten()[0])
        assert bool((hit.snapshot.states == mark).all())
        assert bool((hit.snapshot.windows == -mark).all())
        assert len(hit.pages) * PAGE == hit.node.end
        assert bool((self.pool.latents[:, hit.pages[-1]] == mark).all())
        self.pool.release(hit.pages)
        self.check()
        return hit.node.end, mark

    def check(self):
        nodes = list(self.cache)
        assert self.pool.pages_used == sum(len(n.pages) for n in nodes)
        assert self.pool.snapshots == sum(n.snapshot is not None for n in nodes)
        assert self.cache.host_bytes == sum(n.host_bytes() for n in nodes)
        assert self.cache.host_bytes <= self.cache.host_limit
        assert self.pool.bytes_used() <= self.pool.limit
        for n in nodes:
            assert bool(n.pages) != (n.latents is not None)
            assert n.children or n.snapshot is not None or n.kept is not None
            assert all(c.parent is n for c in n.children)


A, B, C = (prompt(2 * PAGE, seed) for seed in (1, 2, 3))


def test_a_prefix_is_found_by_those_who_begin_with_it():
    bench = Bench(10, 0, snapshots=4)
    bench.keep(A, mark=1.0)
    assert bench.find(A) == (128, 1.0)
    assert bench.find(A + prompt(100)) == (128, 1.0)
    assert bench.find(A[:-1]) is None
    assert bench.find([A[0] + 1, *A[1:]]) is None
    assert bench.find(B) is None


def test_names_hold_tokens_images_version_and_salt():
    base = page_keys(A, 0, "")
    assert len(base) == 2
    assert page_keys([*A, 5], 0, "") == base
    others = [page_keys(A, 1, ""), page_keys(A, 0, "x"), page_keys(B, 0, ""), page_keys(A, 0, "", [(3, b"i")])]
    assert len({tuple(k) for k in [base, *others]}) == 5
    assert all(k[0] not in base for k in others)
    late = page_keys(A, 0, "", [(70, b"i")])
    assert late[0] == base[0]
    assert late[1] != base[1]
    assert page_keys(A, 0, "", [(71, b"i")])[1] != late[1]


def test_the_least_recently_used_goes_to_the_host_and_comes_back_whole():
    bench = Bench(4, 100, snapshots=2)
    bench.keep(A, mark=1.0)
    bench.keep(B, mark=2.0)
    bench.find(A)
    bench.keep(C, mark=3.0)
    assert [n.latents is not None for n in bench.cache] == [False, True, False]
    assert bench.cache.evictions == 1
    assert bench.find(B) == (128, 2.0)
    assert bench.cache.restores == 1
    assert bench.find(A) == (128, 1.0)
    assert bench.find(C) == (128, 3.0)
    bench.cache.clear()
    assert bench.pool.bytes_used() == bench.cache.host_bytes == 0


def test_without_a_host_it_is_dropped():
    bench = Bench(4, 0, snapshots=2)
    for tokens, mark in ((A, 1.0), (B, 2.0), (C, 3.0)):
        bench.keep(tokens, mark=mark)
    assert bench.find(A) is None
    assert bench.find(C) == (128, 3.0)
    assert (bench.cache.drops, bench.cache.host_bytes) == (1, 0)


def test_a_full_host_drops_its_own_oldest():
    bench = Bench(4, 2.5, snapshots=2)
    bench.cache.host_limit += bench.pool.snapshot_bytes
    for i in range(5):
        bench.keep(prompt(2 * PAGE, 10 + i), mark=float(i))
        bench.check()
    found = [bench.find(prompt(2 * PAGE, 10 + i)) for i in range(4, -1, -1)]
    assert found[:3] == [(128, 4.0), (128, 3.0), (128, 2.0)]
    assert found[3:] == [None, None]


def test_an_inner_state_goes_before_the_leaf_that_is_in_use():
    """A conversation in little memory keeps its newest state; older turns lose theirs and still lead to it."""
    bench = Bench(12, 0, snapshots=2)
    tokens, node = [], None
    for turn in range(6):
        tokens = tokens + prompt(2 * PAGE, turn)
        node = bench.keep(tokens, node, mark=float(turn))
        bench.check()
    assert bench.find(tokens) == (6 * 128, 5.0)
    assert bench.find(tokens[: 5 * 128]) == (5 * 128, 4.0)
    assert bench.find(tokens[: 3 * 128]) is None
    assert len(bench.cache.nodes) == 6


def test_a_branch_survives_the_loss_of_its_sister():
    bench = Bench(8, 0, snapshots=4)
    root = bench.keep(A, mark=1.0)
    bench.keep(A + B, root, mark=2.0)
    bench.keep(A + C, root, mark=3.0)
    bench.find(A + C)
    bench.find(A)
    bench.keep(prompt(4 * PAGE, 9), mark=4.0)
    assert bench.find(A + B) == (128, 1.0)
    assert bench.find(A + C) == (256, 3.0)


def test_pages_that_a_sequence_reads_stay_where_they_are():
    bench = Bench(4, 100, snapshots=2)
    bench.keep(A, mark=1.0)
    hit = bench.cache.find(page_keys(A, 0, ""))
    bench.keep(B, mark=2.0)
    assert not bench.cache.make_room(3 * bench.pool.page_bytes + 2 * bench.pool.snapshot_bytes)
    assert bool((bench.pool.latents[:, hit.pages] == 1.0).all())
    bench.pool.release(hit.pages)
    assert bench.cache.make_room(bench.pool.limit)
    assert bench.find(A) == (128, 1.0)


def test_a_prefix_that_does_not_fit_back_is_no_hit_but_a_shorter_one_is():
    bench = Bench(6, 100, snapshots=3)
    root = bench.keep(A, mark=1.0)
    bench.keep(A + B + C, root, mark=2.0)
    assert bench.cache.make_room(bench.pool.limit)
    held = bench.pool.take(3, promised=False)
    hit = bench.cache.find(page_keys(A + B + C, 0, ""))
    assert hit.node.end == 128
    bench.pool.release(hit.pages)
    bench.pool.release(held)
    assert bench.find(A + B + C) == (384, 2.0)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("host", [0, 5, 100])
def test_random_use_keeps_the_books_and_never_mixes_prefixes(seed, host):
    numbers = torch.Generator().manual_seed(seed)
    draw = lambda n: int(torch.randint(n, (), generator=numbers))  # noqa: E731
    bench, marks, known = Bench(12, host, snapshots=4), {}, []
    for step in range(120):
        base = known[draw(len(known))] if known and draw(3) else []
        tokens = base[: draw(len(base) // PAGE + 1) * PAGE] + prompt((1 + draw(2)) * PAGE, 1000 + draw(30))
        if draw(2) or not known:
            hit = bench.cache.find(page_keys(tokens, 0, ""))
            parent = None if hit is None else hit.node
            if parent is None or parent.end < len(tokens):
                marks.setdefault(tuple(tokens), float(step + 1))
                need = (len(tokens) - (0 if parent is None else parent.end)) // PAGE
                if bench.cache.make_room(need * bench.pool.page_bytes):
                    bench.keep(tokens, parent, marks[tuple(tokens)])
                    known.append(tokens)
            if hit is not None:
                bench.pool.release(hit.pages)
        else:
            found = bench.find(tokens)
            if found is not None:
                assert marks[tuple(tokens[: found[0]])] == found[1]
        bench.check()
    bench.cache.clear()
    assert bench.pool.bytes_used() == bench.cache.host_bytes == 0
    assert bench.cache.evictions > 0
