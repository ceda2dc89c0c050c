"""A process that starts training runs and is killed in them. Not a test itself: `test_kill.py` drives it.

Reads one JSON object a line: {"tmp", "out", "model": "standin" | "real", "kill": null | [what, number] | ["time", seconds]}.
Each is run in a forked child, so that torch is imported once; the child's wait status is written back, one line each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "src")]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(what: str, number: float) -> None:
    """Die at the `number`-th call of a function that touches the disk or the weights, or after so many seconds."""
    import helpers  # noqa: F401  (paths)

    from atoll.train import trainer

    if what == "time":
        timer = threading.Timer(number, die)
        timer.daemon = True
        timer.start()
        return
    place: Any = {"fsync": os, "rename": os, "replace": os, "train_step": trainer, "fsync_after": os, "rename_after": os}[what]
    name = what.removesuffix("_after")
    original, calls = getattr(place, name), 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == number and not what.endswith("_after"):
            die()
        result = original(*args, **kwargs)
        if calls == number:
            die()
        return result

    setattr(place, name, counted)


def child(job: dict[str, Any]) -> None:
    import helpers
    import torch

    from atoll import train

    torch.set_num_threads(1)
    if job["model"] == "standin":
        helpers.use_standin()
    out = Path(job["out"])
    config = helpers.micro_config(Path(job["tmp"]), **job.get("changes", {}))
    if job["kill"] is not None:
        arm(*job["kill"])
    train.run(config, out, resume=(out / "config.toml").exists())


def main() -> None:
    import helpers  # noqa: F401
    import torch.distributed.checkpoint.hf_storage
    import torch.distributed.checkpoint.state_dict_saver
    import torch.utils.tensorboard.writer  # noqa: F401

    import atoll.train.trainer  # noqa: F401

    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                log = os.open(job["tmp"] + "/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                child(job)
                code = 0
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        print(json.dumps({"pid": pid}), flush=True)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": status}), flush=True)


if __name__ == "__main__":
    main()
