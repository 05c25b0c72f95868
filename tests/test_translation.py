"""The translation workload: words and numbers, a loss that is a mean over pairs, attention, BLEU, and wrong files."""

from __future__ import annotations

import gzip
import math
import sys
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from paceline import workloads
from paceline.errors import PacelineError
from paceline.race.race import run_race
from paceline.race.spec import RaceSpec
from paceline.workloads import multi30k
from paceline.workloads.seq2seq import Attention, Seq2Seq
from paceline.workloads.text import BOS, EOS, PAD, UNK, Vocabulary, padded, tokenise
from paceline.workloads.translation import Translation, bleu
from paceline.workloads.workload import Samples, data_folders

TRAIN = [
    ("Ein Hund läuft.", "A dog runs."),
    ("Ein Hund schläft.", "A dog sleeps."),
    ("Eine Katze läuft.", "A cat runs."),
    ("Eine Katze schläft.", "A cat sleeps."),
    ("Ein Hund und eine Katze schlafen.", "A dog and a cat sleep."),
    ("Eine Katze und ein Hund schlafen.", "A cat and a dog sleep."),
    ("Ein Vogel singt heute laut und lange.", "A bird sings loudly and long today."),
]
HELD_OUT = [("Ein Hund und ein Hund.", "A dog and a dog."), ("Eine Katze.", "A cat.")]
EXAM = [("Eine Katze und eine Katze.", "A cat and a cat."), ("Ein Hund läuft.", "A dog runs."), ("Oh!", "Oh!")]


def write_part(folder: Path, part: str, pairs: list[tuple[str, str]]) -> None:
    for side, language in enumerate(("de", "en")):
        text = "".join(f"{pair[side]}\n" for pair in pairs)
        (folder / f"{part}.{language}.gz").write_bytes(gzip.compress(text.encode()))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part, pairs in (("train", TRAIN), ("val", HELD_OUT), ("test_2016_flickr", EXAM)):
        write_part(tmp_path, part, pairs)
    return tmp_path


def load(folder: Path) -> Translation:
    workload = workloads.load("multi30k", folder)
    assert isinstance(workload, Translation)
    return workload


# ---- words


def test_the_corpus_as_numbers(folder: Path) -> None:
    workload = load(folder)
    assert len(workload.train) == 7 and len(workload.test) == 2 and len(workload.exam) == 3
    assert workload.train.x.dtype == workload.train.y.dtype == torch.int64
    # By frequency, then by the alphabet: a 9, . 7, cat and dog 4, and 3, runs, sleep and sleeps 2; the rest is unknown.
    assert workload.train.y[0].tolist() == [BOS, 4, 7, 9, 5, EOS, PAD, PAD, PAD, PAD]
    assert workload.train.y[-1].tolist() == [BOS, 4, UNK, UNK, UNK, 8, UNK, UNK, 5, EOS]
    assert workload.vocabulary.words(workload.train.y[4].tolist()) == tokenise(TRAIN[4][1])
    assert len(workload.vocabulary) == 12 and workload.vocabulary.numbers(["bird"]) == [UNK]
    assert (workload.train.x[:, 0] != BOS).all() and workload.train.x[0].tolist()[3:6] == [4, EOS, PAD]
    assert workload.mean_length == (4 * 5 + 2 * 8 + 9) / 7 and workload.left_out == 0
    assert workload.references == ("oh !", "a dog runs .", "a cat and a cat ."), "by length; unknown words as they are"
    for source, target, words in zip(workload.exam.x, workload.exam.y, workload.references, strict=True):
        assert int((source != PAD).sum()) == int((target != PAD).sum()) - 1 == len(words.split()) + 1


def test_long_sentences_are_left_out_of_training_and_counted_but_judged(folder: Path) -> None:
    long = ("Hund " * (multi30k.LONGEST + 1), "dog")
    fits = ("Hund " * multi30k.LONGEST, "dog")
    write_part(folder, "train", [*TRAIN, long, fits, (long[1], long[0])])
    write_part(folder, "val", [long])
    workload = load(folder)
    assert (len(workload.train), workload.left_out) == (8, 2)
    assert workload.train.x.shape == (8, multi30k.LONGEST + 1)
    assert int((workload.test.x != PAD).sum()) == multi30k.LONGEST + 2
    write_part(folder, "train", [long])
    with pytest.raises(PacelineError, match="no sentence to learn from"):
        load(folder)


@given(st.lists(st.text()))
def test_a_token_holds_no_blank_and_none_is_lost(lines: list[str]) -> None:
    for line in lines:
        tokens = tokenise(line)
        assert "".join(tokens) == "".join(line.lower().split()) and all(token.strip() for token in tokens)
        assert not set(tokens) & {"<pad>", "<bos>", "<eos>", "<unk>"}


@given(st.lists(st.lists(st.sampled_from("abcdef")), min_size=1), st.integers(1, 3))
def test_known_words_come_back(sentences: list[list[str]], least: int) -> None:
    vocabulary = Vocabulary(sentences, least)
    for sentence in sentences:
        for word, number in zip(sentence, vocabulary.numbers(sentence), strict=True):
            seen = sum(other.count(word) for other in sentences)
            assert (number == UNK) == (seen < least)
            assert vocabulary.words([number]) == [word if seen >= least else "<unk>"]


# ---- the loss


@cache
def small() -> tuple[Translation, Seq2Seq, Samples]:
    """A model of 9 and 8 words, and random pairs of one to nine words."""
    generator = torch.Generator().manual_seed(0)

    def rows(words: int, begin: list[int]) -> Tensor:
        lengths = torch.randint(1, 10, (12,), generator=generator).tolist()
        return padded([[*begin, *torch.randint(UNK, words, (n,), generator=generator).tolist(), EOS] for n in lengths])

    samples = Samples(rows(9, []), rows(8, [BOS]))
    torch.manual_seed(0)
    model = Seq2Seq(9, 8, embedding=6, width=5).double()
    workload = Translation(
        name="small",
        train=samples,
        test=samples,
        exam=samples,
        references=("a",) * 12,
        vocabulary=Vocabulary([["a", "b", "c", "d"]], least=1),
        mean_length=4.5,
        left_out=0,
        model=lambda: model,
        micro_batch=4,
        target=0.5,
        lr=0.1,
    )
    return workload, model, samples


def gradient(indices: list[int]) -> tuple[Tensor, Tensor]:
    workload, model, samples = small()
    model.zero_grad()
    loss = workload.loss(model, samples[torch.tensor(indices)])
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


@settings(deadline=None)
@given(st.lists(st.integers(0, 11), min_size=2, max_size=12), st.data())
def test_loss_and_gradient_are_means_over_pairs_however_a_batch_is_cut(indices: list[int], data: st.DataObject) -> None:
    cut = data.draw(st.integers(1, len(indices) - 1))
    whole, first, second = gradient(indices), gradient(indices[:cut]), gradient(indices[cut:])
    for total, a, b in zip(whole, first, second, strict=True):
        joined = (cut * a + (len(indices) - cut) * b) / len(indices)
        torch.testing.assert_close(total, joined, rtol=1e-9, atol=1e-12)


def test_padding_does_not_change_the_loss() -> None:
    workload, model, samples = small()
    before = workload.loss(model, samples[:])
    wider = [torch.cat((rows, torch.full((12, 3), PAD)), dim=1) for rows in samples[:]]
    assert workload.loss(model, (wider[0], wider[1])).item() == before.item()
    # Untrimmed, so that the model itself sees the padding.
    plain, seen = model(*samples[:]), model(wider[0], wider[1])
    torch.testing.assert_close(seen, plain, rtol=1e-12, atol=1e-12)


def test_every_word_weighs_the_same() -> None:
    workload, model, samples = small()
    for length, batch in ((1, padded([[BOS, EOS]])), (3, padded([[BOS, 4, 5, EOS]]))):
        logits = model(samples.x[:1], batch)
        by_hand = -logits.log_softmax(1)[range(length), batch[0, 1:]].sum() / 4.5
        assert workload.loss(model, (samples.x[:1], batch)).item() == pytest.approx(by_hand.item())


def test_a_model_that_knows_nothing_has_the_perplexity_of_its_vocabulary() -> None:
    workload, _, samples = small()
    model = Seq2Seq(9, 8, embedding=6, width=5)
    nn.init.zeros_(model.logits.weight)
    nn.init.zeros_(model.logits.bias)
    words = int((samples.y[:, 1:] != PAD).sum())
    assert workload.perplexity(model) == pytest.approx(8, rel=1e-5)
    assert workload.perplexity(model, Samples(*samples[:5])) == pytest.approx(8, rel=1e-5)
    assert workload.evaluate(model)[1] == pytest.approx(math.log(8) * words / (12 * 4.5), rel=1e-5)


def test_the_metric_is_the_mean_share_of_right_words() -> None:
    workload, _, samples = small()
    model = Seq2Seq(9, 8, embedding=6, width=5)
    nn.init.zeros_(model.logits.weight)
    with torch.no_grad():
        model.logits.bias.copy_(torch.eye(8)[EOS])  # it always says that the sentence is over: right once in each
    shares = [1 / int((row[1:] != PAD).sum()) for row in samples.y]
    assert workload.evaluate(model)[0] == pytest.approx(sum(shares) / 12)
    assert workload.translate(model, samples.x) == [""] * 12


# ---- the model


def test_attention_gives_padding_no_weight() -> None:
    attention = Attention(query=3, key=4, width=5)
    real = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    states = torch.randn(3, 3, 4)
    states[~real] = 1e30  # whatever stands there
    weights = attention(torch.randn(3, 3), attention.key(states), real)
    assert (weights[~real] == 0).all() and (weights[real] > 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(3))


def test_shapes_and_that_the_future_is_not_seen() -> None:
    model = Seq2Seq(9, 8, embedding=6, width=5)
    source, target = padded([[4, 5, EOS], [6, EOS]]), padded([[BOS, 4, 5, EOS], [BOS, 6, EOS]])
    logits = model(source, target)
    assert logits.shape == (3 + 2, 8), "one row for each word, and none for padding"
    other = target.clone()
    other[0, 2] = 7
    torch.testing.assert_close(model(source, other)[:2], logits[:2])
    assert not torch.allclose(model(source, other)[2], logits[2])
    turned = source.clone()
    turned[0, 1] = 7
    assert not torch.allclose(model(turned, target)[0], logits[0]), "the source is seen as a whole"


def test_greedy_decoding_takes_the_likeliest_word_and_ends() -> None:
    _, model, samples = small()
    together = model.translate(samples.x, longest=7)
    assert together.shape[1] <= 7
    for source, row in zip(samples.x, together, strict=True):
        alone = model.translate(source[source != PAD].unsqueeze(0), longest=7)[0]
        assert row[: len(alone)].tolist() == alone.tolist() and (row[len(alone) :] == PAD).all()
        again = model(source.unsqueeze(0), torch.cat((torch.tensor([BOS]), alone)).unsqueeze(0)).argmax(1)
        assert again.tolist() == alone.tolist()


def test_it_learns_to_translate(folder: Path) -> None:
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu, of the extra `workloads`")
    write_part(folder, "test_2016_flickr", TRAIN[:6])
    workload = load(folder)
    model = workload.build_model(0)
    optimizer = workload.build_optimizer(model, optimizer="adamw", lr=0.01)
    before = workload.evaluate(model, workload.exam)
    for _ in range(40):
        optimizer.zero_grad()
        workload.loss(model, workload.train[:]).backward()
        optimizer.step()
    after = workload.evaluate(model, workload.exam)
    assert after[0] == 1.0 > before[0] and after[1] < 0.1 < before[1]
    assert workload.perplexity(model) < 1.1
    assert workload.translate(model, workload.exam.x) == list(workload.references)
    assert workload.bleu(model) == pytest.approx(100)


# ---- BLEU


def test_bleu_of_the_references_is_100_and_of_other_words_less() -> None:
    pytest.importorskip("sacrebleu", reason="BLEU needs sacrebleu, of the extra `workloads`")
    references = [" ".join(tokenise(english)) for _, english in TRAIN]
    assert bleu(references, references) == pytest.approx(100)
    assert 0 < bleu([*references[:-1], "a bird"], references) < 100
    assert bleu(["x"] * len(references), references) == pytest.approx(0, abs=1e-6)
    # Three words of four, two pairs of three, one triple of two, no four: (3/4 · 2/3 · 1/2 · 1/2 · 1/1)^(1/4).
    assert bleu(["a dog runs ."], ["a dog runs !"]) == pytest.approx(100 * (3 / 4 * 2 / 3 * 1 / 2 * 1 / 2) ** 0.25)


def test_without_sacrebleu_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(PacelineError, match=r"BLEU needs sacrebleu.*paceline\[workloads\]"):
        bleu(["a"], ["a"])


# ---- files


def test_the_files_may_lie_in_a_subfolder_and_the_folder_come_from_the_environment(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = folder / "all" / "multi30k"
    below.mkdir(parents=True)
    for file in folder.glob("*.gz"):
        file.rename(below / file.name)
    assert len(load(folder / "all").train) == 7
    monkeypatch.setenv("PACELINE_DATA", str(folder / "all"))
    assert len(workloads.load("multi30k").train) == 7


def test_missing_files_tell_how_to_get_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PacelineError, match=r"train\.de\.gz.*nowhere or .*nowhere.multi30k.*--data DIR.*task1/raw"):
        workloads.load("multi30k", folder / "nowhere")
    monkeypatch.delenv("PACELINE_DATA", raising=False)
    with pytest.raises(PacelineError, match=r"are not there\. Give the folder .* PACELINE_DATA"):
        workloads.load("multi30k")
    (folder / "val.en.gz").unlink()
    with pytest.raises(PacelineError, match=r"Where: .*val\.en\.gz\. It cannot be read: .*No such file"):
        load(folder)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"A dog runs.\n", r"val\.en\.gz\. It cannot be read: Not a gzipped file"),
        (gzip.compress(b"A dog runs.\nA cat.\n", mtime=0)[:-9], r"val\.en\.gz\. It cannot be read"),
        (b"", r"val\.en\.gz, line 1\. It is empty"),
        (gzip.compress(b"", mtime=0), r"val\.en\.gz, line 1\. It is empty"),
        (gzip.compress(b"A dog runs.\n", mtime=0), r"val\.en\.gz\. It has 1 lines, but val\.de\.gz has 2"),
        (gzip.compress(b"A dog.\nA cat.\nA bird.\n", mtime=0), r"val\.en\.gz\. It has 3 lines, but val\.de\.gz has 2"),
        (gzip.compress(b"A dog.\n \n", mtime=0), r"val\.en\.gz, line 2\. There is no word in it"),
        (gzip.compress(b"A dog.\nA \xff cat.\n", mtime=0), r"val\.en\.gz, line 2\. It is not UTF-8"),
    ],
)
def test_wrong_files_are_named_with_the_line(folder: Path, raw: bytes, words: str) -> None:
    (folder / "val.en.gz").write_bytes(raw)
    with pytest.raises(PacelineError, match=f"A file of Multi30k cannot be used.*{words}.*one sentence a line"):
        load(folder)


def test_signs_that_python_takes_for_the_end_of_a_line_are_none(folder: Path) -> None:
    (folder / "val.en.gz").write_bytes(gzip.compress("A\x85dog\u2028runs.\r\nA cat.".encode()))
    workload = load(folder)
    assert len(workload.test) == 2
    assert workload.vocabulary.words(workload.test.y[1].tolist()) == ["a", "dog", "runs", "."]


# ---- in a race


@pytest.mark.parametrize("strategy", ["all-reduce", "abs-sgd", "d-psgd"])
def test_a_race_in_virtual_time(folder: Path, tmp_path: Path, strategy: str) -> None:
    spec = RaceSpec(
        strategies=(strategy,),
        speeds=(1.0, 0.5),
        workload="multi30k",
        data=str(folder),
        backend="simulated",
        seconds=0.3,
        optimizer="adamw",
    )
    race = run_race(spec, tmp_path / "runs")
    assert (race["metric"], race["model"], race["lr"]) == ("word accuracy", "seq2seq", 2e-3)
    assert 0 <= race["results"][0]["final_metric"] <= 1 and race["results"][0]["final_loss"] > 0


# ---- the real files

REAL = any((place / "train.de.gz").is_file() for place in data_folders(None, "multi30k"))


@pytest.mark.skipif(not REAL, reason="PACELINE_DATA names no folder with the files of Multi30k")
def test_the_real_files() -> None:
    workload = workloads.load("multi30k")
    assert isinstance(workload, Translation)
    assert (len(workload.train), workload.left_out) == (28_908, 92)
    assert (len(workload.test), len(workload.exam), len(workload.vocabulary)) == (1014, 1000, 5871)
    assert workload.mean_length == pytest.approx(14.07, abs=0.01)
    model = workload.build_model(0)
    assert workload.loss(model, workload.train[:8]).item() == pytest.approx(math.log(5871), rel=0.5)
