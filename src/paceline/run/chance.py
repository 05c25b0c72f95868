"""The random generators of a process as tensors, so that a resumed run draws what it would have drawn.

torch's, Python's and numpy's: dropout and most augmentation use one of them. Those of a DataLoader's worker processes
are not here; torch seeds them anew whenever it starts them.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def draw_from(saved: dict[str, Tensor], device: torch.device) -> None:
    """Go on where the generators were when `state` was called; with nothing saved they stay as they are."""
    if not saved:
        return
    torch.set_rng_state(saved["torch"])
    if "cuda" in saved and device.type == "cuda":
        torch.cuda.set_rng_state(saved["cuda"], device)
    version, *words = saved["python"].tolist()
    ahead = saved["python.ahead"].tolist()
    random.setstate((version, tuple(words), ahead[0] if ahead else None))
    words, ahead = saved["numpy"].tolist(), saved["numpy.ahead"].tolist()
    np.random.set_state(("MT19937", np.array(words[:-1], np.uint32), words[-1], len(ahead), *(ahead or [0.0])))


def state(device: torch.device) -> dict[str, Tensor]:
    """Where the generators are; that of the device too, if it has one of its own. `ahead` is a number that Python and
    numpy may have drawn too many: normal ones come in pairs."""
    version, words, ahead = random.getstate()
    _, numpy_words, position, has_ahead, numpy_ahead = np.random.get_state()
    saved = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words]),
        "python.ahead": torch.tensor([] if ahead is None else [ahead], dtype=torch.float64),
        "numpy": torch.tensor([*np.asarray(numpy_words).tolist(), position]),
        "numpy.ahead": torch.tensor([numpy_ahead] if has_ahead else [], dtype=torch.float64),
    }
    if device.type == "cuda":
        saved["cuda"] = torch.cuda.get_rng_state(device)
    return saved
