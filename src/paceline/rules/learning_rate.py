"""How the step follows the batch when the batch varies from round to round.

κ = B / B_ref, where B_ref is the batch that the user's learning rate was tuned for:

    linear     η·κ                                        SGD: as many samples, as far (Goyal et al. 2017)
    sqrt       η·√κ, β → β^κ                              Adam and its kin (Malladi et al. 2022)
    adascale   η·(ν + 1)/(ν/κ + 1), ν = B_noise/B_ref     linear while noise rules, constant when it does not
                                                          (Johnson et al. 2020)
    none       η
"""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import Final

RULES = ("auto", "linear", "sqrt", "adascale", "none")


@dataclass(frozen=True)
class Steps:
    """How the user's optimizer makes its steps, by its first parameter group.

    Args:
        learning_rate: the present one.
        momentum: how much of the last step it keeps (momentum, Adam's first beta); 0.0 for none.
        nesterov: whether the momentum is Nesterov's.
        adaptive: whether it divides by the gradient's size, as Adam does.
        clips: whether gradients are clipped before it.
    """

    learning_rate: float = 0.0
    momentum: float = 0.0
    nesterov: bool = False
    adaptive: bool = False
    clips: bool = False


@dataclass(frozen=True)
class StepScale:
    """How one step departs from what the user's optimizer is set to.

    Args:
        learning_rate: times the learning rate.
        momentum_power: the momentum, raised to it: a step that stands for twice the samples forgets twice.
        size_power: Adam's other betas, raised to it: how long it remembers the size of gradients.
        momentum: times the momentum, or Adam's first beta; 0 for a step without.
        weight_decay: times the weight decay.
    """

    learning_rate: float = 1.0
    momentum_power: float = 1.0
    size_power: float = 1.0
    momentum: float = 1.0
    weight_decay: float = 1.0


AS_SET: Final = StepScale()


def step_scale(rule: str, batch: int, reference: int, noise_scale: float | None, largest: float) -> StepScale:
    """What to do with the learning rate and momentum of a step over `batch` samples.

    Args:
        rule: one of the above.
        batch: B, samples of the round.
        reference: B_ref.
        noise_scale: B_noise; unknown counts as large, which makes `adascale` linear.
        largest: κ is cut to it: no rule holds for ever.

    >>> step_scale("linear", 64, 128, None, 4.0)
    StepScale(learning_rate=0.5, momentum_power=1.0, size_power=1.0, momentum=1.0, weight_decay=1.0)
    >>> step_scale("sqrt", 512, 128, None, 4.0)
    StepScale(learning_rate=2.0, momentum_power=4.0, size_power=4.0, momentum=1.0, weight_decay=1.0)
    >>> step_scale("adascale", 256, 128, 128.0, 4.0).learning_rate
    1.3333333333333333
    """
    kappa = min(batch / reference, largest)
    if rule == "none" or batch == 0:
        return AS_SET
    if rule == "sqrt":
        return StepScale(sqrt(kappa), kappa, kappa)
    if rule == "adascale" and noise_scale is not None:
        ratio = noise_scale / reference
        return StepScale((ratio + 1) / (ratio / kappa + 1))
    return StepScale(kappa)
