"""Translation as a workload: how a model that writes sentences is trained and judged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch.nn.functional as F  # noqa: N812  (the name that every PyTorch user knows)
from torch import Tensor, nn

from paceline.errors import PacelineError
from paceline.workloads.seq2seq import Seq2Seq
from paceline.workloads.text import PAD, Vocabulary, trimmed
from paceline.workloads.workload import Samples, Workload

LONGEST_TRANSLATION = 50
"""Words after which greedy decoding gives up on a sentence's end; more than any held-out sentence of Multi30k has."""


@dataclass(frozen=True, kw_only=True)
class Translation(Workload):
    """Sentences and their translations; the metric is the share of next words that are found (teacher forcing).

    The **loss** of a batch of n pairs is (1/n) Σ_pairs (1/L) Σ_words −log p(word), where L is the constant
    `mean_length`. So it is a mean over pairs, whatever micro-batch they come in, and still every word weighs the same,
    as in the usual mean over words. That mean itself would not do: it divides by the words of its own micro-batch, so
    a pair would weigh more beside short ones, and a sum of micro-batches would depend on how they were cut. Over the
    training part exp(loss) is the perplexity.

    The **metric** is the mean over the sentences of the share of their words (the end counts as one) that were the
    likeliest. It is cheap, between 0 and 1, and larger is better. Races go by it on the held-out part `test`; what is
    reported in the end, `perplexity` and `bleu`, goes by `exam`, which no choice was made by.

    Args:
        exam: a second held-out part.
        references: its translations, tokenised, joined by blanks.
        vocabulary: of the language that is written.
        mean_length: words of a translation with its end, mean over the training part.
        left_out: pairs of the training part that are too long to learn from.
    """

    metric_name: ClassVar[str] = "word accuracy"
    evaluation_batch: ClassVar[int] = 128
    """The logits of so many sentences, one number for every word of the vocabulary at every place, take 100 MB."""

    exam: Samples
    references: tuple[str, ...]
    vocabulary: Vocabulary
    mean_length: float
    left_out: int

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        source, target = map(trimmed, batch)
        words = target[:, 1:]
        total = F.cross_entropy(model(source, target), words[words != PAD], reduction="sum")
        return total / (self.mean_length * len(target))

    def judge(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[float, float]:
        source, target = map(trimmed, batch)
        words = target[:, 1:]
        real = words != PAD
        logits = model(source, target)
        right = real.masked_scatter(real, logits.argmax(1) == words[real])
        loss = F.cross_entropy(logits, words[real], reduction="sum")
        return float((right.sum(1) / real.sum(1)).sum()), float(loss) / self.mean_length

    def perplexity(self, model: nn.Module, samples: Samples | None = None) -> float:
        """exp of the mean over words of −log p(word), when the words before it are given.

        Args:
            model: to judge.
            samples: to judge it by; `exam` by default.
        """
        samples = self.exam if samples is None else samples
        _, loss = self.evaluate(model, samples)
        words = int((samples.y[:, 1:] != PAD).sum())
        return math.exp(loss * self.mean_length * len(samples) / words)

    def translate(self, model: nn.Module, source: Tensor) -> list[str]:
        """What the model writes when it always takes the likeliest word, joined by blanks."""
        assert isinstance(model, Seq2Seq)
        device = next(model.parameters()).device
        written = []
        for part in source.split(self.evaluation_batch):
            numbers = model.translate(trimmed(part).to(device), LONGEST_TRANSLATION)
            written += [" ".join(self.vocabulary.words(row)) for row in numbers.tolist()]
        return written

    def bleu(self, model: nn.Module) -> float:
        """BLEU of the model's translations of `exam`, from 0 to 100."""
        return bleu(self.translate(model, self.exam.x), self.references)


def bleu(translations: Sequence[str], references: Sequence[str]) -> float:
    """BLEU-4 over a corpus, from 0 to 100, by sacrebleu.

    Both are compared as they are: lower-case and tokenised by this package. So figures compare with each other, and not
    exactly with those of sacrebleu's own tokeniser.
    """
    try:
        from sacrebleu.metrics.bleu import BLEU  # an extra: only who translates needs it
    except ImportError as error:
        raise PacelineError("BLEU needs sacrebleu.", remedy="`pip install paceline[workloads]` installs it.") from error
    # force: it would warn that the text looks tokenised, which it is meant to be.
    return float(BLEU(tokenize="none", force=True).corpus_score(list(translations), [list(references)]).score)
