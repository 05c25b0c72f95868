"""torch's process group meets over the control service."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from datetime import timedelta

import pytest

from paceline.control.client import ControlClient
from paceline.control.service import ControlService
from paceline.control.store import ControlStore
from paceline.errors import PacelineError

SECRET = b"the run's secret"

RANK = textwrap.dedent("""
    import sys
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from paceline.control.client import ControlClient
    from paceline.control.store import ControlStore
    port, rank = int(sys.argv[1]), int(sys.argv[2])
    with ControlClient(("127.0.0.1", port), b"the run's secret", rank) as client:
        client.hello({})
        for generation in (0, 1):
            store = dist.PrefixStore(f"gen{generation}", ControlStore(client))
            group = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
            values = torch.full((1000,), float(rank + 1 + generation))
            group.allreduce([values]).wait()
            print(values[0].item(), flush=True)
            group.barrier().wait()
        client.leave()
""")


def test_two_processes_add_up_their_tensors_in_two_generations():
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with ControlService(2, SECRET) as service:
        command = [sys.executable, "-c", RANK, str(service.address[1])]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True, env=environment)
            for rank in (0, 1)
        ]
        outputs = [rank.communicate(timeout=120)[0].split() for rank in ranks]
        assert outputs == [["3.0", "5.0"]] * 2 and [rank.returncode for rank in ranks] == [0, 0]


def test_the_store_in_one_process():
    with ControlService(1, SECRET) as service, ControlClient(service.address, SECRET, 0) as client:
        store = ControlStore(client)
        store.set("text", "value")
        store.set("bytes", b"\x00\xff")
        assert (store.get("text"), store.get("bytes")) == (b"value", b"\x00\xff")
        assert store.add("count", 2) == 2 and store.check(["count", "text"]) and store.delete_key("count")
        store.wait(["text"])
        store.set_timeout(timedelta(milliseconds=1))
        with pytest.raises(PacelineError, match="Nobody set the store's key 'none'"):
            store.get("none")
        with pytest.raises(PacelineError, match="Nobody set the store's key 'none'"):
            store.wait(["none"], timedelta(milliseconds=1))
