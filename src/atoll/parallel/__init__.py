"""A run spread over processes: the mesh, what each process holds, and how they agree. The modules themselves know none of it."""

from atoll.parallel.layouts import check, place
from atoll.parallel.mesh import Mesh, make_mesh
from atoll.parallel.optimizer import ShardedOptimizer
from atoll.parallel.ranks import ALONE, Ranks, started
from atoll.parallel.shard import Sharded, shard

__all__ = ["ALONE", "Mesh", "Ranks", "Sharded", "ShardedOptimizer", "check", "make_mesh", "place", "shard", "started"]
