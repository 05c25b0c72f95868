"""Sentences as numbers: one plain regular expression cuts them, a vocabulary numbers the words, rows are padded."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

PAD, BOS, EOS, UNK = range(4)
"""Fills a row up, begins a sentence, ends it, stands for a word that the vocabulary does not have."""
SPECIALS = ("<pad>", "<bos>", "<eos>", "<unk>")
TOKEN = re.compile(r"\w+|[^\w\s]")
"""A run of letters and digits, or one sign of punctuation."""


def tokenise(sentence: str) -> list[str]:
    """The sentence's words and signs, lower-case.

    >>> tokenise("Zwei Hunde, weiß & groß!")
    ['zwei', 'hunde', ',', 'weiß', '&', 'groß', '!']
    """
    return TOKEN.findall(sentence.lower())


class Vocabulary:
    """Words and their numbers: the special ones first, then by frequency, equally frequent ones by the alphabet.

    Args:
        sentences: tokenised; all that is known.
        least: a word that occurs less often is unknown. A word seen once cannot be learnt, and half of all words are.

    >>> words = Vocabulary([["a", "dog", "and", "a", "cat"], ["a", "dog"]], least=2)
    >>> len(words), words.numbers(["a", "cat", "and", "a", "dog"])
    (6, [4, 3, 3, 4, 5])
    """

    def __init__(self, sentences: Iterable[Sequence[str]], least: int = 2) -> None:
        counts = Counter(word for sentence in sentences for word in sentence)
        known = sorted((word for word, n in counts.items() if n >= least), key=lambda word: (-counts[word], word))
        self._words = (*SPECIALS, *known)
        # A sentence cannot hold a special word: the expression cuts off its brackets.
        self._numbers = {word: number for number, word in enumerate(self._words)}

    def __len__(self) -> int:
        return len(self._words)

    def numbers(self, tokens: Sequence[str]) -> list[int]:
        return [self._numbers.get(token, UNK) for token in tokens]

    def words(self, numbers: Iterable[int]) -> list[str]:
        """The words up to the sentence's end; what stands before its begin and what fills it up are left out.

        >>> Vocabulary([["a", "a"]]).words([BOS, 4, UNK, EOS, 4, PAD])
        ['a', '<unk>']
        """
        found = []
        for number in numbers:
            if number == EOS:
                break
            if number not in (PAD, BOS):
                found.append(self._words[number])
        return found


def padded(rows: Sequence[Sequence[int]]) -> Tensor:
    """Rows of unequal length as one tensor of whole numbers.

    >>> padded([[5, EOS], [4, 4, EOS]]).tolist()
    [[5, 2, 0], [4, 4, 2]]
    """
    longest = max(map(len, rows))
    return torch.tensor([[*row, *[PAD] * (longest - len(row))] for row in rows], dtype=torch.int64)


def trimmed(rows: Tensor) -> Tensor:
    """The rows without the columns that hold nothing but padding: a batch of short sentences costs what they cost.

    >>> trimmed(torch.tensor([[5, 2, 0, 0], [4, 4, 2, 0]])).tolist()
    [[5, 2, 0], [4, 4, 2]]
    """
    return rows[:, : int((rows != PAD).sum(1).max())]
