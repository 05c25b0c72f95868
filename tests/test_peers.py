"""The comparison with other software: its published tables are made from its raw numbers, and its parts are sound."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.options import split_name
from paceline.rules.order import order
from paceline.strategies import STRATEGIES

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))

import peers  # noqa: E402  (benchmarks are no package)
from parts.peers.course import CLUSTERS, PIECE, PIECE_SECONDS, WORKERS, Pace, PacedDevice, Race, paces, shares_of  # noqa: E402  (benchmarks are no package)
from parts.peers.lane import Blocks  # noqa: E402  (benchmarks are no package)
from parts.peers.methods import METHODS  # noqa: E402  (benchmarks are no package)
from parts.peers.outcomes import TARGET, Book, Outcome, median_time  # noqa: E402  (benchmarks are no package)
from parts.peers.sessions import GIVES_WAY, Patience, end, members, own_share, run_session  # noqa: E402  (benchmarks are no package)
from parts.peers.tables import BEGIN, END, factors, inserted, newest, readme_table, report, whole_table  # noqa: E402  (benchmarks are no package)


@pytest.fixture(scope="module")
def published() -> Book:
    return Book(newest())


def test_the_dated_tables_are_made_from_the_raw_numbers(published: Book) -> None:
    assert newest().with_suffix(".md").read_text() == report(published)


def test_the_readme_agrees_with_the_newest_file(published: Book) -> None:
    text = (ROOT / "README.md").read_text()
    assert text == inserted(text, readme_table(published)), "run `scripts/bench peers --tables`"


def test_the_page_agrees_with_the_newest_file(published: Book) -> None:
    text = (ROOT / "docs" / "peers.md").read_text()
    assert text == inserted(text, whole_table(published)), "run `scripts/bench peers --tables`"


def test_nobody_is_dropped_silently(published: Book) -> None:
    text = report(published)
    for method in METHODS:
        assert f"`{method.name}`" in text


def test_every_strategy_races() -> None:
    named = {split_name(method.name)[0] for method in METHODS if method.kind == "paceline"}
    assert named == set(STRATEGIES)


def outcome(method: str, *, seed: int = 0, cluster: str = "static", lr: float = 0.1, reached: float | None) -> Outcome:
    """A race that has reached the target at this time."""
    there = [reached is not None and 0.5 * n >= reached for n in range(61)]
    curve = tuple((0.5 * n, 1000 * n, 0.99 if each else 0.9, TARGET if each else 1.0) for n, each in enumerate(there))
    race = Race(method, cluster, 4, lr, seed, 20.0)
    return Outcome(race, 60_000, 20.0, 120_000.0, curve, 1000, None, 1.0, 0.001)


def test_a_book_keeps_what_it_was_told(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    book.begin({"date": "today"})
    first, second = outcome("ddp", reached=5.0), outcome("ddp", seed=1, reached=None)
    book.add(first)
    book.add(second)
    book.fail("ray-ddp", "no such package")
    again = Book(tmp_path / "book.jsonl")
    assert again.outcomes == {first.race: first, second.race: second}
    assert again.failures == {"ray-ddp": "no such package"} and again.about == {"date": "today"}
    again.add(outcome("ray-ddp", reached=3.0))
    assert not again.failures, "it runs by now"
    for package in ("ray", "torchft"):
        again.begin({"versions": {package: "1"}})
    assert again.about["versions"] == {"ray": "1", "torchft": "1"}, "each may have been run by itself"


def test_the_best_settings_are_those_with_the_shortest_median(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    for seed, (slow, lucky) in enumerate([(6.0, 3.0), (6.0, 9.0), (7.0, None)]):
        book.add(outcome("ddp", seed=seed, lr=0.1, reached=slow))
        book.add(outcome("ddp", seed=seed, lr=0.2, reached=lucky))
    best = book.best("ddp")
    assert best is not None and best.lr == 0.1
    book.begin({"seeds": 3})
    book.add(outcome("ddp", seed=3, lr=0.2, reached=10.0))
    assert book.best("ddp") == best, "one seed more is no reason to prefer it"
    book.begin({"seeds": 1})
    book.add(outcome("ddp", cluster="equal", reached=2.0))
    assert [each.race.cluster for each in book.at_best("ddp", "equal")] == ["equal"]
    assert len(book.at_best("ddp", "static")) == 3


def test_the_two_best_settings_of_one_seed_are_tried_with_the_others(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    rates = {0.05: None, 0.1: 6.0, 0.2: 5.0, 0.4: 7.0}
    for lr, reached in rates.items():
        book.add(outcome("ddp", lr=lr, reached=reached))
    settings = [Race("ddp", "static", 4, lr, 0, 20.0) for lr in (*rates, 0.8)]
    assert [race.lr for race in book.finalists(settings)] == [0.2, 0.1]
    for seed in (1, 2):
        book.add(outcome("ddp", seed=seed, lr=0.1, reached=4.0))
        book.add(outcome("ddp", seed=seed, lr=0.2, reached=8.0))
    best = book.best("ddp")
    assert best is not None and best.lr == 0.1


def test_disturbed_races_do_not_count(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    disturbed = replace(outcome("ddp", reached=3.0), overslept=0.01)
    book.add(disturbed)
    assert book.best("ddp") is None
    undisturbed = outcome("ddp", reached=4.0)
    book.add(undisturbed)
    book.add(disturbed)
    assert book.at_best("ddp", "static") == [undisturbed]
    book.begin({"seeds": 3})
    assert book.at_best("ddp", "static") == [], "three seeds are wanted"


@pytest.mark.parametrize(("asked", "needed"), [(None, 3), (1, 1), (21, 3)])
def test_who_asks_for_many_seeds_does_not_empty_the_cells_that_have_fewer(
    monkeypatch: pytest.MonkeyPatch, asked: int | None, needed: int
) -> None:
    monkeypatch.setattr(peers, "speed_alone", lambda: 1.0)
    options = argparse.Namespace(methods=[], jobs=1, seeds=asked)
    assert peers.about(True, options)["seeds"] == needed


def test_a_file_without_any_race_that_counts_has_tables_too(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    book.begin({"date": "today", "machine": "one", "versions": {}, "races_at_once": 1, "seeds": 1})
    book.add(replace(outcome("ddp", reached=3.0), overslept=0.01))
    assert "1 of 1 races do not count" in report(book)


def test_the_target_is_a_mean_over_a_window_of_samples_and_lies_between_two_snapshots() -> None:
    race = Race("ddp", "static", 4, 0.1, 0, 20.0)
    fine = tuple((0.1 * n, 10 * n, 0.5, 2 * TARGET * (1 - n / 200)) for n in range(200))
    coarse = fine[::5]
    for curve in (fine, coarse):
        found = Outcome(race, 2000, 20.0, 4000.0, curve, 1000, None, 1.0, 0.001)
        assert found.time_to_target == pytest.approx(10.0) and found.samples_to_target == pytest.approx(1000)
    assert Outcome(race, 2000, 20.0, 4000.0, fine[:120], 0, None, 1.0, 0.0).reached is None, (
        "half of the window is to come"
    )
    lucky = tuple((t, samples, accuracy, 0.0 if samples == 500 else 1.0) for t, samples, accuracy, _ in fine)
    assert Outcome(race, 2000, 20.0, 4000.0, lucky, 0, None, 1.0, 0.0).reached is None


def test_the_accuracy_must_be_reached_by_three_snapshots_in_a_row() -> None:
    steady = outcome("ddp", reached=5.0)
    assert steady.time_to_accuracy == 5.0, "the mean of 0.9, 0.99 and 0.99 is above 0.95; it stands for the middle one"
    curve = tuple((t, samples, 0.99 if t == 1.0 else 0.9, 1.0) for t, samples, _, _ in steady.curve)
    lucky = replace(steady, curve=curve)
    assert lucky.time_to_accuracy is None
    assert median_time([steady, steady, lucky]) == steady.time_to_target
    assert steady.share_of_ideal == 0.5


def test_factors_go_by_medians_and_say_when_the_time_was_too_short(tmp_path: Path) -> None:
    book = Book(tmp_path / "book.jsonl")
    for method, reached in (("abs-sgd", 4.0), ("ddp", None), ("ddp-balanced", 6.0), ("post-local-sgd", 9.0)):
        book.add(outcome(method, reached=reached))
    assert factors(book)[2:] == [
        "| DDP | > 5.00× |",
        "| the best peer as documented | 2.25× |",
        "| DDP balanced by hand | 1.50× |",
        "| the same, seeds on which it is sooner | 1 of 1 |",
        "| first of Paceline's | `abs-sgd` |",
    ]


def test_only_what_is_between_the_marks_is_replaced() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert inserted(text, "new") == f"before\n{BEGIN}\n\nnew\n{END}\nafter\n"


@pytest.mark.parametrize("cluster", [name for name in CLUSTERS if name != "traces"])
def test_devices_are_as_fast_as_the_cluster_says(cluster: str) -> None:
    alone = PIECE / PIECE_SECONDS
    made = [pace.by(20.0) / (20.0 * alone) for pace in paces(cluster, seed=1, seconds=20.0)]
    assert len(made) == WORKERS
    if cluster == "equal":
        assert made == pytest.approx([1.0] * WORKERS)
    elif cluster == "static":
        assert made == pytest.approx([1.0, 1.0, 0.5, 0.25])
    elif cluster == "straggler":
        lost = sum(1 - each for each in made) * 20 / (1 - 1 / 8)
        assert lost == pytest.approx(round(lost), abs=0.05) and 3 <= lost <= 17, "seconds in which one of them was slow"
    else:
        assert [round(each, 3) for each in made] != [1.0, 1.0, 0.5, 0.25]
    assert made == [pace.by(20.0) / (20.0 * alone) for pace in paces(cluster, seed=1, seconds=20.0)], "from the seed"


def test_a_device_is_slow_at_its_time_however_its_work_is_cut() -> None:
    now, samples = [0.0], 100
    for size in (1, 4, 5):
        pace = Pace([*range(1, 11), *(10 + n / 8 for n in range(1, 11)), *range(12, 200)])  # type: ignore[arg-type]

        def sleep(seconds: float) -> None:
            now[0] += seconds

        device = PacedDevice(pace, 1.0, lambda: None, sleep=sleep)
        device._clock = lambda: now[0]
        began = now[0]
        for _ in range(samples // size):
            with device.micro_batch(size):
                pass
        assert now[0] - began == pytest.approx(pace.due(0.0, samples), abs=1e-6)


def test_shares_add_up_and_follow_the_speeds() -> None:
    assert shares_of([1.0, 1.0, 0.5, 0.25], 16) == [6, 6, 3, 1]
    assert shares_of([1.0] * 4, 16) == [4] * 4
    for batch in range(4, 40):
        assert sum(shares_of([1.0, 0.9, 0.3, 0.2], batch)) == batch


def test_ranks_share_the_samples_without_overlap_in_the_order_of_a_run_of_paceline() -> None:
    shares = [3, 2, 1]
    taken = [iter(Blocks(20, shares, rank, seed=7)) for rank in range(3)]
    samples = [index for _ in range(6) for each in taken for index in next(each)]
    assert samples == [*order(7, 0, 20), *order(7, 1, 20)][:36], "blocks go on over the end of an epoch"
    assert sorted(len(next(each)) for each in taken) == [1, 2, 3]


def test_a_session_that_hangs_is_given_up_before_the_time_of_all_its_races() -> None:
    now = [0.0]
    patience = Patience([20.0, 30.0], clock=lambda: now[0])
    first = patience.limit
    now[0] = first - 1
    assert not patience.at_an_end
    patience.over()
    assert 30.0 < patience.limit < first
    now[0] += patience.limit + 1
    assert patience.at_an_end
    patience.over()
    assert not patience.at_an_end, "it has time to end after its last race"


def test_nothing_of_a_session_is_left_even_what_has_left_its_process_group() -> None:
    code = "import os, time; os.fork(); os.setpgid(0, 0) if os.getpgrp() != os.getpid() else None; print(flush=True)"
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(600)"], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() and process.stdout.readline(), "both are there"
        assert len(members(process.pid)) == 2
        end(process)
        process.stdout.read()  # its end comes when nobody holds it any more
    assert members(process.pid) == []


def test_a_stopped_session_ends_and_says_so(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    races = [Race("ddp", "static", 4, 0.1, 0, 5.0)]
    failure = run_session(races, command, tmp_path / "session", tmp_path, lambda number: None, stop)
    assert failure is not None and failure.reason == "it was stopped"


@pytest.mark.skipif(not own_share(), reason="this kernel does not share the processors out by session")
def test_a_session_gives_way_at_first_and_then_has_the_share_of_the_benchmark(tmp_path: Path) -> None:
    inside = "from parts.peers.sessions import *; print(own_share()); take_share(os.environ[SHARE]); print(own_share())"
    code = f"""
import sys, threading
from pathlib import Path
from parts.peers.course import Race
from parts.peers.sessions import run_session
Path("/proc/self/autogroup").write_text("7")
command = [sys.executable, "-c", {inside!r}]
run_session([Race("ddp", "static", 4, 0.1, 0, 5.0)], command, Path("session"), Path(), print, threading.Event())
"""
    subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(ROOT / "benchmarks")},
        cwd=tmp_path,
        start_new_session=True,
        check=True,
    )
    assert (tmp_path / "session" / "log").read_text().split() == [str(7 + GIVES_WAY), "7"]


def test_a_rank_runs_when_it_wakes_up_only_while_it_races() -> None:
    code = """
import os, threading
from parts.peers.lane import race_off, race_on
over = threading.Event()
other = threading.Thread(target=over.wait)
other.start()
for change in (race_on, race_off):
    change()
    print(*(os.sched_getscheduler(task) for task in (0, other.native_id)))
over.set()
"""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'benchmarks'}", "PEERS_APART": ""}
    told = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    racing, over = told.stdout.splitlines()
    assert racing in (f"{os.SCHED_RR} {os.SCHED_RR}", f"{os.SCHED_OTHER} {os.SCHED_OTHER}"), "all threads, if allowed"
    assert over == f"{os.SCHED_OTHER} {os.SCHED_OTHER}"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--methods", "ddp,abs-sdg"], "There is no method 'abs-sdg'. Did you mean 'abs-sgd'?"),
        (["--clusters", "statik"], "There is no cluster 'statik'. Did you mean 'static'?"),
    ],
)
def test_an_unknown_name_is_refused_before_anything_is_raced(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["peers.py", *arguments, "--out", str(tmp_path / "results.jsonl")])
    with pytest.raises(SystemExit) as ended:
        peers.main()
    assert said in f"{ended.value}{capsys.readouterr().err}"
    assert not list(tmp_path.iterdir())
