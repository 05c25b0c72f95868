"""How fast the largest entries are found, and what a sparsified push costs, beside torch.topk and two plain passes.

    scripts/bench selection [--rounds 9] [--sizes 1e6,1e7,1e8] [--threads 1,2] [--only choice,push,attempts]

Contenders take turns, so that a change of the machine's load hits all of them; a ratio is the median of those of
neighbouring turns. There are two yardsticks:

    abs().max() + copy    as anybody would write it. The first makes a tensor of n entries, whose page faults may cost
                          three times the pass itself, or nothing: that is up to the allocator.
    aminmax() + copy      what memory can do: each reads n entries once, the copy writes n, none makes a tensor.

`largest` works in one thread; with more only the other contenders become faster. The last part holds what else was
tried to find the places above a known threshold. CPU time of 10 M entries at a hundredth on two shared cores of an AMD
EPYC (Zen 3), as a multiple of aminmax() + copy:

    numpy by pieces, integers (kept)      1.2      torch by pieces                       3.7
    numpy by pieces, two compares         1.3      blocks of 64, by amax and amin        4.3   half of them hold one
    numpy by pieces, words of 8 first     1.3      torch, whole                          7.0
    numpy, whole                          2.0      blocks of 64, by vector_norm         11.0

and to do without: np.partition of everything 4.0, torch.histc for a threshold 19, torch.topk 37. All of `largest`: 1.3
to 2.0 by the load of the other core.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from paceline.rules.compression import Dgc, TopK
from paceline.rules.selection import PIECE, largest

RATIOS = (0.01, 0.001)
YARDSTICK, FLOOR = "abs().max() + copy", "aminmax() + copy"
Contender = Callable[[], object]


def gaussian(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0))


def heavy_tailed(size: int) -> Tensor:
    """Gaussian divided by uniform: the tails fall as 1/x², and the variance is infinite."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, generator=generator).div_(torch.rand(size, generator=generator).add_(1e-6))


def yardsticks(values: Tensor) -> dict[str, Contender]:
    target = torch.zeros_like(values)
    return {
        YARDSTICK: lambda: (values.abs().max(), target.copy_(values)),
        FLOOR: lambda: (values.aminmax(), target.copy_(values)),
    }


def compare(contenders: dict[str, Contender], rounds: int, other: str) -> None:
    """Time all in turns, and print a line for each.

    CPU time is that of all threads. Load stretches it less than wall time, so that on a busy machine its ratios are to
    be looked at; but a thread that waits for another one spins, and that counts.
    """
    wall: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for turn in range(rounds + 1):
        for name, contender in contenders.items():
            began, used = time.perf_counter(), time.process_time()
            contender()
            if turn:  # the first is the warm-up
                wall[name].append(time.perf_counter() - began)
                cpu[name].append(time.process_time() - used)
    print(f"    {'':26}{'wall ms':>10}{'from':>10}{'to':>10}{'CPU ms':>10}   ratios of wall time (of CPU time) to")
    print(f"    {'':66}   {YARDSTICK:>30}{FLOOR:>20}{other:>26}")
    for name in contenders:
        times = [statistics.median(wall[name]), min(wall[name]), max(wall[name]), statistics.median(cpu[name])]
        cells = [f"{_ratio(wall, name, of):.2f} ({_ratio(cpu, name, of):.2f})" for of in (YARDSTICK, FLOOR, other)]
        print(
            f"    {name:26}"
            + "".join(f"{seconds * 1e3:10.2f}" for seconds in times)
            + f"   {cells[0]:>30}{cells[1]:>20}{cells[2]:>26}",
            flush=True,
        )


def _ratio(seconds: dict[str, list[float]], name: str, of: str) -> float:
    return statistics.median(mine / theirs for mine, theirs in zip(seconds[name], seconds[of], strict=True))


def choice(size: int, rounds: int) -> None:
    """`largest` beside `torch.topk` and the yardsticks."""
    for shape in (gaussian, heavy_tailed):
        values = shape(size)
        for ratio in RATIOS:
            k = round(ratio * size)
            contenders: dict[str, Contender] = {
                "largest": lambda values=values, k=k: largest(values, k),
                "torch.topk": lambda values=values, k=k: torch.topk(values.abs(), k, sorted=False),
            }
            print(f"  the largest {ratio:g} of {size:,} entries, {shape.__name__.replace('_', '-')}")
            compare(yardsticks(values) | contenders, rounds, "torch.topk")


def push(size: int, rounds: int) -> None:
    """Whole pushes at a hundredth, with and without momentum, and what the server does with one."""
    gradient, model, residual, k = gaussian(size), torch.zeros(size), torch.zeros(size), size // 100
    top_k, dgc = TopK(gradient, ratio=0.01), Dgc(gradient, ratio=0.01, warm_up=0)
    sent = TopK(gradient, ratio=0.01).push(gradient)

    def by_hand() -> None:
        residual.add_(gradient)
        chosen = torch.topk(residual.abs(), k, sorted=False).indices
        sending = residual[chosen].clone()
        residual[chosen] = 0.0
        model[chosen] += sending

    print(f"  push of {size:,} entries at 0.01: {sent.nbytes:,} bytes instead of {gradient.nbytes:,}")
    contenders = yardsticks(gradient) | {
        "top-k": lambda: top_k.push(gradient),
        "dgc": lambda: dgc.push(gradient),
        "by hand, with torch.topk": by_hand,
        "the server adds it": lambda: sent.add_to(model),
    }
    compare(contenders, rounds, "by hand, with torch.topk")


def attempts(rounds: int) -> None:
    """All ways find the same places; what they have in common, the sample and the cut, is left out."""
    values = gaussian(10_000_000)
    threshold = float(values.abs().kthvalue(len(values) - 125_000).values)
    numbers = values.numpy()
    integers, least = numbers.view(np.int32), np.float32(threshold).view(np.int32)
    magnitudes, passes = np.empty(PIECE, np.int32), np.empty(PIECE, np.bool_)
    starts = range(0, len(values), PIECE)

    def as_integers(begin: int) -> np.ndarray:
        piece = integers[begin : begin + PIECE]
        magnitude = np.bitwise_and(piece, np.int32(0x7FFFFFFF), out=magnitudes[: len(piece)])
        return np.greater(magnitude, least, out=passes[: len(piece)])

    def as_two_compares(begin: int) -> np.ndarray:
        piece = numbers[begin : begin + PIECE]
        return np.logical_or(piece > threshold, piece < -threshold)

    def by_words(begin: int) -> np.ndarray:
        words = as_integers(begin).view(np.int64)
        full = np.flatnonzero(words != 0)
        inside = np.flatnonzero(words.take(full).view(np.bool_))
        return (full.take(inside >> 3) << 3) + (inside & 7) + begin

    def by_blocks(extremes: Callable[[Tensor], Tensor]) -> Tensor:
        blocks = values.view(-1, 64)
        full = (extremes(blocks) > threshold).nonzero().view(-1)
        block, inside = (blocks[full].abs_() > threshold).nonzero(as_tuple=True)
        return full[block] * 64 + inside

    def by_maxima(blocks: Tensor) -> Tensor:
        return torch.maximum(blocks.amax(1), blocks.amin(1).neg_())

    def torch_pieces() -> Tensor:
        return torch.cat(
            [(values[begin : begin + PIECE].abs() > threshold).nonzero().view(-1) + begin for begin in starts]
        )

    def numpy_pieces(mask: Callable[[int], np.ndarray]) -> np.ndarray:
        return np.concatenate([np.flatnonzero(mask(begin)) + begin for begin in starts])

    ways: dict[str, Contender] = {
        "torch, whole": lambda: (values.abs() > threshold).nonzero().view(-1),
        "torch, pieces": torch_pieces,
        "blocks, vector_norm": lambda: by_blocks(lambda blocks: torch.linalg.vector_norm(blocks, torch.inf, dim=1)),
        "blocks, amax and amin": lambda: by_blocks(by_maxima),
        "numpy, whole": lambda: np.flatnonzero(np.abs(numbers) > threshold),
        "numpy, two compares": lambda: numpy_pieces(as_two_compares),
        "numpy, words of 8 first": lambda: np.concatenate([by_words(begin) for begin in starts]),
        "numpy, integers (kept)": lambda: numpy_pieces(as_integers),
    }
    found = [torch.as_tensor(way()) for way in ways.values()]
    assert all(torch.equal(each, found[-1]) for each in found)
    ways["all cut, no threshold"] = lambda: np.partition(np.abs(numbers), len(numbers) - 100_000)
    ways["histc for a threshold"] = lambda: torch.histc(values, bins=4096)
    print("  places above a known threshold, 10,000,000 entries, gaussian, one thread")
    compare(yardsticks(values) | ways, rounds, "torch, whole")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", default="1e6,1e7,1e8")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--only", default="choice,push,attempts")
    options = parser.parse_args()
    sizes = [int(float(size)) for size in options.sizes.split(",")]
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.2f}, "
        f"torch {torch.__version__}, numpy {np.__version__}, Python {platform.python_version()}; medians of "
        f"{options.rounds} alternating turns at 10 M entries, of more below and fewer above"
    )
    for threads in options.threads.split(","):
        torch.set_num_threads(int(threads))
        print(f"{threads} thread{'s' if int(threads) > 1 else ''}, load {os.getloadavg()[0]:.2f}")
        for size in sizes:
            # As much time for small tensors as for large ones, within reason: short turns are the noisiest.
            rounds = max(3, min(5 * options.rounds, options.rounds * 10_000_000 // size))
            if "choice" in options.only:
                choice(size, rounds)
            if "push" in options.only:
                push(size, rounds)
    if "attempts" in options.only:
        torch.set_num_threads(1)
        attempts(options.rounds)


if __name__ == "__main__":
    main()
