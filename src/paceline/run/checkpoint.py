"""Checkpoints that survive: written aside, synced, renamed; checksummed; safe to open.

A checkpoint is a folder `round-00000120/` with safetensors files, which any tool can read and which hold no code, and
`manifest.json` with the sha256 of each and everything that is not a tensor. It is written under a temporary name and
renamed at the end, so a crash or a full disk leaves the last one whole. A flipped bit would load silently from any
tensor format; the checksums find it, and the next older checkpoint is taken.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as tensors_from_bytes
from safetensors.torch import save as bytes_from_tensors
from torch import Tensor

from paceline.errors import PacelineError

FORMAT = 1
KEEP = 3
MANIFEST = "manifest.json"
log = logging.getLogger("paceline")


@dataclass
class Checkpoint:
    """All that a run needs to go on: tensors by part (`model`, `optimizer`, `strategy`) and plain values."""

    tensors: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """One block of bytes, to give to the other ranks at the start."""
        flat = {f"{part}/{name}": t for part, tensors in self.tensors.items() for name, t in tensors.items()}
        return bytes_from_tensors(_separate(flat), {"values": json.dumps(self.values)})

    @classmethod
    def from_bytes(cls, block: bytes) -> Checkpoint:
        header = json.loads(block[8 : 8 + int.from_bytes(block[:8], "little")])
        made = cls(values=json.loads(header["__metadata__"]["values"]))
        for key, tensor in tensors_from_bytes(block).items():
            part, _, name = key.partition("/")
            made.tensors.setdefault(part, {})[name] = tensor
        return made


def write(folder: Path, round_number: int, checkpoint: Checkpoint) -> Path:
    """Write a checkpoint for the round into the folder, whole or not at all; keep the last few."""
    final = folder / f"round-{round_number:08d}"
    aside, replaced = folder / f".{final.name}.writing", folder / f".{final.name}.replaced"
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        sums = {}
        for part, tensors in checkpoint.tensors.items():
            content = bytes_from_tensors(_separate(tensors))
            sums[f"{part}.safetensors"] = hashlib.sha256(content).hexdigest()
            _write_synced(aside / f"{part}.safetensors", content)
        manifest = {"format": FORMAT, "round": round_number, "sha256": sums, "values": checkpoint.values}
        manifest["self"] = _manifest_sum(manifest)
        _write_synced(aside / MANIFEST, json.dumps(manifest, indent=1).encode())
        _sync_folder(aside)
        if final.exists():  # the same round, saved again: the old one goes when the new one stands
            final.rename(replaced)
        aside.rename(final)
        shutil.rmtree(replaced, ignore_errors=True)
        _sync_folder(folder)
    except OSError as error:
        raise PacelineError(
            f"The checkpoint of round {round_number} could not be written: {error.strerror or error}.",
            where=str(folder),
            cause="The checkpoints before it are whole.",
            remedy="Make room or give another folder with Run(out=...).",
        ) from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    for old in sorted(folder.glob("round-*"))[:-KEEP]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def read(path: Path) -> Checkpoint:
    """Read one checkpoint; protests when any part of it is damaged."""
    try:
        manifest = json.loads((path / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise PacelineError(
                f"The checkpoint {path} has format {manifest['format']}; this version reads {FORMAT}.",
                remedy="Use the version of Paceline that wrote it.",
            )
        if manifest.pop("self") != _manifest_sum(manifest):
            raise _damaged(path / MANIFEST, "its checksum differs")
        checkpoint = Checkpoint(values=manifest["values"])
        for name, expected in manifest["sha256"].items():
            content = (path / name).read_bytes()
            if hashlib.sha256(content).hexdigest() != expected:
                raise _damaged(path / name, "its checksum differs")
            checkpoint.tensors[name.removesuffix(".safetensors")] = tensors_from_bytes(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, str(error) or type(error).__name__) from error
    return checkpoint


def read_latest(folder: Path) -> tuple[Path, Checkpoint] | None:
    """The newest whole checkpoint of the folder; damaged ones are named and passed over."""
    damaged = []
    for path in _in_order(folder):
        try:
            return path, read(path)
        except PacelineError as error:
            log.warning("%s The one before it is taken.", error)
            damaged.append(path.name)
    if damaged:
        raise PacelineError(
            f"All {len(damaged)} checkpoints are damaged: {', '.join(damaged)}.",
            where=str(folder),
            remedy="Start anew, or restore the folder from a backup.",
        )
    return None


def newest(folders: list[Path], must_exist: bool) -> tuple[Path, Checkpoint] | None:
    """The newest whole checkpoint of the first folder that has one: a checkpoint, a run's folder or its checkpoints."""
    for folder in folders:
        if (folder / MANIFEST).exists():
            return folder, read(folder)
        inside = folder / "checkpoints" if (folder / "checkpoints").is_dir() else folder
        found = read_latest(inside)
        if found:
            return found
    if must_exist:
        raise PacelineError(
            f"There is no checkpoint in {folders[0]}.", remedy="Give a run's folder, or a folder round-… inside it."
        )
    return None


def _in_order(folder: Path) -> list[Path]:
    """All checkpoints of the folder, the newest first. A crash between the two renames of `write` has left the same
    round, saved before, under the name of what is replaced."""
    hidden = [path for path in folder.glob(".round-*.replaced") if not _standing(path).exists()]
    return sorted([*folder.glob("round-*"), *hidden], key=lambda path: _standing(path).name, reverse=True)


def _standing(replaced: Path) -> Path:
    return replaced.with_name(replaced.name.removeprefix(".").removesuffix(".replaced"))


def optimizer_parts(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """An optimizer's state as tensors by name and plain values."""
    state = optimizer.state_dict()
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    for index, entries in state["state"].items():
        for key, value in entries.items():
            kept: dict[str, Any] = tensors if isinstance(value, Tensor) else values
            kept[f"{index}.{key}"] = value
    return tensors, {"state": values, "param_groups": state["param_groups"]}


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
    """The inverse of `optimizer_parts`."""
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **values["state"]}.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": values["param_groups"]})


def _separate(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, each in memory of its own: safetensors refuses tensors that share it, as views of a buffer do."""
    apart, taken = {}, set()
    for name, tensor in tensors.items():
        memory = tensor.untyped_storage()
        alone = tensor.is_contiguous() and memory.nbytes() == tensor.nbytes and memory.data_ptr() not in taken
        taken.add(memory.data_ptr())
        apart[name] = tensor.detach().cpu() if alone else tensor.detach().cpu().clone().contiguous()
    return apart


def _manifest_sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _damaged(path: Path, why: str) -> PacelineError:
    return PacelineError(f"The checkpoint {path} is damaged: {why}.")


def export(source: Path, file: Path) -> Path:
    """Write the model of a checkpoint as a plain state_dict that `torch.load(file, weights_only=True)` reads.

    Args:
        source: a checkpoint, a run's folder or the folder of its checkpoints.
        file: whole or not at all; what was there before is replaced.

    Returns:
        The checkpoint that was taken.
    """
    found = newest([source], must_exist=True)
    assert found is not None
    taken, content = found[0], io.BytesIO()
    torch.save(found[1].tensors["model"], content)
    aside = file.with_name(f".{file.name}.writing")
    try:
        _write_synced(aside, content.getbuffer())
        aside.replace(file)
        _sync_folder(file.absolute().parent)
    except OSError as error:
        raise PacelineError(
            f"The model could not be written to {file}: {error.strerror or error}.",
            remedy="Make room or give another file.",
        ) from error
    finally:
        aside.unlink(missing_ok=True)
    return taken


def _write_synced(path: Path, content: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
