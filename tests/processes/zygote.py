"""A process that has imported torch once and forks a rank of it in milliseconds: importing costs seconds a process.

It reads one line of JSON for every rank to start (`scenario`, `options`, `environment`, `output`, `facts`) and one
`{"kill": pid}` for every rank to end; it answers with `{"pid"}` at once and with `{"ended", "code"}` later. It dies
with the test run, and its ranks die with it.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import select
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def main() -> None:
    end_with_parent()
    import scenarios  # in this folder; it imports torch
    import scenarios_alone
    import scenarios_sparse
    import torch

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)  # the first one imports 800 modules, in two seconds

    known = vars(scenarios) | vars(scenarios_alone) | vars(scenarios_sparse)
    alive: set[int] = set()
    gc.collect()
    gc.freeze()  # else the first collection of every rank copies all pages of what was imported
    say({"ready": os.getpid()})
    while True:
        for pid in list(alive):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                alive.discard(pid)
                say({"ended": pid, "code": os.waitstatus_to_exitcode(status)})
        if not select.select([sys.stdin], [], [], 0.01)[0]:
            continue
        line = sys.stdin.readline()
        if not line:
            break
        order = json.loads(line)
        if "kill" in order:
            if order["kill"] in alive:
                os.kill(order["kill"], signal.SIGKILL)
            continue
        pid = os.fork()
        if pid == 0:
            os._exit(rank(known[order["scenario"]], order))
        alive.add(pid)
        say({"pid": pid})
    for pid in alive:
        os.kill(pid, signal.SIGKILL)


def rank(scenario: Any, order: dict[str, Any]) -> int:
    """A forked rank: run the scenario and write down the facts that it returns."""
    end_with_parent()
    warnings.simplefilter("error")
    os.environ.update(order["environment"])
    output = os.open(order["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)  # after its predecessor
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    try:
        facts = scenario(**order["options"])
        Path(order["facts"]).write_text(json.dumps(facts))
    except BaseException:
        traceback.print_exc()
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def end_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def say(news: dict[str, int]) -> None:
    print(json.dumps(news), flush=True)


if __name__ == "__main__":
    main()
