"""The secret that several machines share: from a file or from the environment, never from the command line."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from paceline.errors import PacelineError
from paceline.launch.surroundings import SECRET

BYTES = 32
FEWEST_BYTES = 16


def usual_file() -> Path:
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "paceline" / "secret"


def find_secret(file: Path | None, *, make: bool) -> tuple[bytes, str]:
    """The secret, and where it is from. A named file counts most, then the environment, then the usual file.

    Args:
        file: that was named.
        make: whether to make the file when it is missing.
    """
    if file is None and os.environ.get(SECRET):
        return _read(os.environ[SECRET], f"the environment's {SECRET}"), SECRET
    path = usual_file() if file is None else file
    if make and not path.exists():
        _make(path)
    try:
        if path.stat().st_mode & 0o077:
            raise PacelineError(f"Others may read the secret in {path}.", remedy=f"chmod 600 {path}")
        return _read(path.read_text(), str(path)), str(path)
    except FileNotFoundError:
        raise PacelineError(
            f"There is no secret in {path}.",
            remedy=f"Make one, `(umask 077; openssl rand -hex {BYTES} > {path})`, copy it to every machine, and "
            f"name it with --secret-file or set {SECRET}. `paceline doctor --listen` makes one too.",
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise PacelineError(f"The secret in {path} cannot be read: {error}.") from error


def _make(path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(BYTES) + "\n")
    except OSError as error:
        raise PacelineError(
            f"The secret's file {path} cannot be made: {error.strerror}.", remedy="Give another with --secret-file."
        ) from error


def _read(text: str, where: str) -> bytes:
    try:
        secret = bytes.fromhex(text.strip())
    except ValueError:
        secret = b""
    if len(secret) < FEWEST_BYTES:
        raise PacelineError(
            "That is no secret.",
            where=where,
            remedy=f"It is at least {2 * FEWEST_BYTES} hexadecimal digits, as `openssl rand -hex {BYTES}` makes them.",
        )
    return secret
