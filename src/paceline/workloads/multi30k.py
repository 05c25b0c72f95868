"""Multi30k, captions in German and English, from gzipped text: a translation workload. Nothing is downloaded."""

from __future__ import annotations

import gzip
import zlib
from functools import partial
from pathlib import Path

from paceline.errors import PacelineError
from paceline.workloads.seq2seq import Seq2Seq
from paceline.workloads.text import BOS, EOS, Vocabulary, padded, tokenise
from paceline.workloads.translation import Translation
from paceline.workloads.workload import Samples, Workload, choose_model, data_folders

TRAIN, HELD_OUT, EXAM = "train", "val", "test_2016_flickr"
SOURCE, TARGET = "de", "en"
LONGEST = 30
"""Words of a sentence to learn from. One long sentence makes its whole micro-batch long: the few longer ones, 92 of
29,000 pairs, would cost more than they teach."""
LEAST_FREQUENCY = 2

Pair = tuple[list[str], list[str]]


def load(data: Path | None = None, model: str | None = None) -> Workload:
    """29,000 captions to learn to translate from German to English; 1,014 held out for the race, and the 1,000 of the
    test of 2016 for perplexity and BLEU.

    Training pairs with more than `LONGEST` words on either side are left out and counted in `left_out`; the held-out
    ones are all judged, and whole. The files lie in the folder `data`, else in the environment's PACELINE_DATA; in its
    subfolder `multi30k` as well.
    """
    folder = _folder(data)
    known = _pairs(folder, TRAIN)
    pairs = [pair for pair in known if max(map(len, pair)) <= LONGEST]
    if not pairs:
        raise PacelineError(
            "There is no sentence to learn from.", where=str(folder), cause=f"All have more than {LONGEST} words."
        )
    german, english = (Vocabulary((pair[side] for pair in pairs), LEAST_FREQUENCY) for side in (0, 1))
    # Sentences of one length are judged together: 12 % of what the decoder computes is padding, unsorted 50 %.
    held_out, exam = (sorted(_pairs(folder, part), key=lambda pair: len(pair[1])) for part in (HELD_OUT, EXAM))
    return Translation(
        name="multi30k",
        train=_samples(pairs, german, english),
        test=_samples(held_out, german, english),
        exam=_samples(exam, german, english),
        references=tuple(" ".join(words) for _, words in exam),
        vocabulary=english,
        mean_length=sum(len(words) + 1 for _, words in pairs) / len(pairs),
        left_out=len(known) - len(pairs),
        model=choose_model("multi30k", model, {"seq2seq": partial(Seq2Seq, len(german), len(english))}),
        micro_batch=32,
        target=0.3,
        lr=0.1,
        adamw_lr=2e-3,
    )


def _samples(pairs: list[Pair], source: Vocabulary, target: Vocabulary) -> Samples:
    """A sentence is its words and its end; a translation begins with a word of its own as well."""
    return Samples(
        padded([[*source.numbers(words), EOS] for words, _ in pairs]),
        padded([[BOS, *target.numbers(words), EOS] for _, words in pairs]),
    )


def _folder(data: Path | None) -> Path:
    places = data_folders(data, "multi30k")
    for place in places:
        if (place / f"{TRAIN}.{SOURCE}.gz").is_file():
            return place
    raise PacelineError(
        f"The files of Multi30k, {TRAIN}.{SOURCE}.gz and so on, are not there.",
        where=" or ".join(map(str, places)),
        remedy="Give the folder that holds them with --data DIR or PACELINE_DATA. They are in data/task1/raw of "
        f"https://github.com/multi30k/dataset: of {TRAIN}, {HELD_OUT} and {EXAM} those in {SOURCE} and {TARGET}.",
    )


def _pairs(folder: Path, part: str) -> list[Pair]:
    sides = [folder / f"{part}.{language}.gz" for language in (SOURCE, TARGET)]
    german, english = map(_sentences, sides)
    if len(german) != len(english):
        raise _bad_file(
            sides[1], f"It has {len(english)} lines, but {sides[0].name} has {len(german)}: a line translates a line."
        )
    return list(zip(german, english, strict=True))


def _sentences(path: Path) -> list[list[str]]:
    """The file's lines, tokenised. Only a line feed ends a line: text holds other signs that Python takes for one."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError, zlib.error) as error:
        raise _bad_file(path, f"It cannot be read: {error}.") from error
    try:
        lines = raw.decode().removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise _bad_file(path, "It is not UTF-8.", line=raw.count(b"\n", 0, error.start) + 1) from error
    sentences = [tokenise(line) for line in lines]
    for number, words in enumerate(sentences, start=1):
        if not words:
            raise _bad_file(path, "It is empty." if not raw.strip() else "There is no word in it.", line=number)
    return sentences


def _bad_file(path: Path, cause: str, line: int | None = None) -> PacelineError:
    return PacelineError(
        "A file of Multi30k cannot be used.",
        where=str(path) if line is None else f"{path}, line {line}",
        cause=cause,
        remedy="It must be gzipped text, one sentence a line, as many lines in both languages. Get the file again.",
    )
