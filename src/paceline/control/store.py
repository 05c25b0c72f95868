"""torch's rendezvous store over the control service: behind the run's secret, and alive when rank 0 is not.

Use one prefix for each generation, `PrefixStore(f"gen{n}", store)`: gloo does not recover from the addresses that an
earlier group left behind.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import Store  # torch.distributed exports it only at run time

from paceline.control.client import ControlClient

DEFAULT_SECONDS = 300.0  # torch's own default


class ControlStore(Store):
    """What `ProcessGroupGloo` needs of a store, answered by the control service."""

    def __init__(self, client: ControlClient) -> None:
        super().__init__()
        self._client = client
        # C++ keeps only its own half of this object: a temporary, as in `PrefixStore("gen0", ControlStore(client))`,
        # would lose these methods when Python collects it.
        client.kept_alive.append(self)
        self._seconds = DEFAULT_SECONDS

    def set(self, key: str, value: str | bytes) -> None:
        self._client.store_set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._client.store_get(key, self._seconds)

    def add(self, key: str, amount: int) -> int:
        return self._client.store_add(key, amount)

    def check(self, keys: list[str]) -> bool:
        return self._client.store_check(keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._client.store_wait(keys, self._seconds if timeout is None else timeout.total_seconds())

    def delete_key(self, key: str) -> bool:
        return self._client.store_delete(key)

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()
