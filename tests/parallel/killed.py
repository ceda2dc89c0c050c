"""One of the processes that torchrun starts in `test_restart.py`: on the first start one of them is killed. Not a test itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "src")]


AXES = {"stage": {"pipeline": 2}}  # where layers are cut, else weights


def kill_at(place: Any, name: str, number: int) -> None:
    """Die at the end of the `number`-th call of a function."""
    original, calls = getattr(place, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(place, name, counted)


def main(tmp: str, out: str, moment: str) -> int:
    from runs import config_in, run_on
    from training import layout

    from atoll.parallel.pipeline import Pipelined
    from atoll.train import checkpoint, step

    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
        place, name, number = {
            "step": (step, "accumulate", 4),
            "save": (checkpoint, "_write_tensors", 2),
            "stage": (Pipelined, "_forward", 30),
        }[moment]
        kill_at(place, name, number)
    said = run_on(layout(config_in(Path(tmp), train__micro_batch=1), **AXES.get(moment, {"data_shard": 2})), out)
    print(said)
    return 2 if said else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
