"""The control service as a process of its own, beside a launcher or beside rank 0.

Inside a rank it would share the interpreter's lock with training: every answer would cost the rank 0.4 ms. The parent
writes one line of JSON with the settings (the secret stays off the command line), reads one line with the address, and
closes the pipe when it is done; the service stays for the other ranks until they have left too. If this process dies,
the parent starts it again with the same settings and the same port, and the journal gives it its memory back.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from paceline.control.durable import DurableService
from paceline.errors import PacelineError

FAREWELL_SECONDS = 60.0  # all ranks end their training in the same round; what they do after it is their own affair


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the ranks; they still want to say farewell
    settings = json.loads(sys.stdin.readline())
    settings |= {"secret": bytes.fromhex(settings["secret"]), "journal": Path(settings["journal"])}
    try:
        service = DurableService(**settings)
    except (PacelineError, OSError) as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    with service:
        print(json.dumps({"address": service.address}), flush=True)
        sys.stdin.read()  # until the parent closes the pipe, or is dead
        deadline = time.monotonic() + FAREWELL_SECONDS
        while service.status()["present"] and time.monotonic() < deadline:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
