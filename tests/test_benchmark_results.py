"""How figures of the benchmarks are put together, and what targets say of them."""

from __future__ import annotations

import statistics
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from benchmark_runs import Record, table_of


@pytest.fixture
def suite_module(modules: Callable[[str], Any]) -> Any:
    return modules("_suite")


@pytest.fixture
def targets(modules: Callable[[str], Any]) -> Any:
    return modules("targets")


@pytest.fixture
def progress(modules: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> Any:
    """With a clock of its own, which may be set."""
    module = modules("_progress")
    monkeypatch.setattr(module, "time", types.SimpleNamespace(monotonic=time.monotonic))
    return module


def test_turns_are_seven_or_none(progress: Any) -> None:
    now = [0.0]

    def one_second() -> float:
        now[0] += 1
        return now[0]

    progress.time.monotonic = lambda: now[0]
    ways = {"a": one_second, "b": one_second}
    clock = progress.Clock(13.5, start=0)
    with pytest.raises(progress.OutOfTime, match="7 turns take 14 s; 14 were left"):
        progress.turns(ways, 25, clock)
    assert now[0] == 2, "it went on though it could not end in time"
    found = progress.turns(ways, 25, progress.Clock(20, start=2))
    assert [len(results) for results in found.values()] == [7, 7]
    unlimited = progress.turns(ways, 25, progress.Clock(start=0))
    assert [len(results) for results in unlimited.values()] == [25, 25]


def test_rounds_count_the_same_however_long_they_are(suite_module: Any) -> None:
    short, long = [10.0], [1.0] * 999
    assert suite_module.percentile([short, long], 0.99) == 10
    found = suite_module.summary([{"samples": short}, {"samples": long}])
    assert (found["median"], found["rounds"]) == (5.5, [10, 1])


def test_the_percentile_is_of_the_samples(suite_module: Any) -> None:
    samples = [float(value) for value in range(1, 101)]
    assert suite_module.percentile([samples], 0.99) == 99
    assert suite_module.percentile([samples, samples], 0.5) == 50


def test_thinned_samples_keep_their_distribution(suite_module: Any) -> None:
    samples = [float(value) for value in range(100_000)]
    thin = suite_module.thin(samples)
    assert len(thin) == 500
    assert (thin[0], thin[-1]) == (0, 99_999)
    assert statistics.median(thin) == pytest.approx(50_000, rel=0.01)


def test_a_way_that_failed_is_named(suite_module: Any) -> None:
    rounds = {"a": [{"samples": [1.0]}], "b": [{"samples": [1.0]}, {"error": "no"}]}
    case = suite_module.Case.of("64 B", rounds)
    table = suite_module.Table("Pairs", "ns", "a", [case])
    assert set(case.ways) == {"a"}
    assert "64 B: b failed: no" in table.report().text()
    assert table.record()["cases"][0]["failed"] == {"b": "no"}


# ---- targets -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "path", "measured", "verdict"),
    [
        (("numpy/c_empty", "64 B", {"host": 102.0, "default": 100.0}),
         "np.empty < 1 KiB, from C", 1.02, "met"),
        (("numpy/c_empty", "1 KiB", {"host": 114.0, "default": 100.0}),
         "np.empty 1 KiB, from C", 1.14, "missed by 20 %"),
        (("numpy/c_empty", "1 KiB", {"host": 95.1, "default": 100.0}),
         "np.empty 1 KiB, from C", 0.951, "missed by less than 1 %"),
        (("core/pair", "64 B", {"host": 24.0, "malloc": 12.0}),
         "hot pair, host, ns", 24.0, "missed by 100 %"),
        (("core/threads", "8 threads", {"host": 3.5}),
         "8 threads, own blocks, × one thread", 3.5, "missed by 100 %"),
        (("core/grow", "64 KiB", {"host": 1e6}),
         "p99 of a pair while the pool grows, ns", 2e6, "met"),
        (("device/c_random", "100,000 × ≤ 4 MiB",
          {"numpy_rmm": 20.0, "rmm pool": 4000.0, "rmm binning": 80.0}),
         "random_allocations 100,000 × ≤ 4 MiB", 0.25, "met"),
        (("core/handoff", "8 threads", {"host": 20.0, "malloc": 10.0}),
         "8 threads, handed to another", None,
         "not measured: nothing to compare with was measured"),
        (("core/handoff", "2 threads", {"host": 20.0, "mimalloc": 10.0}),
         "8 threads, handed to another", None, "not measured"),
    ],
)  # fmt: skip
def test_a_target_is_judged_by_the_figures(
    table: tuple[str, str, Record],
    path: str,
    measured: float | None,
    verdict: str,
    targets: Any,
) -> None:
    key, name, ways = table
    rows = targets.judge([table_of(key, name, **ways)], {"NumPy": "2.4.6"})
    (row,) = (row for row in rows if row["path"] == path)
    assert row["measured"] == pytest.approx(measured)
    assert targets.verdict(row) == verdict
    assert verdict in targets.report(rows).text()


def test_an_old_numpy_is_asked_for_less(targets: Any) -> None:
    table = table_of("numpy/c_empty", "8 B", host=1.05, default=1.0)
    for version, verdict in (("1.26.4", "met"), ("2.0.2", "missed by 3 %")):
        row = targets.judge([table], {"NumPy": version})[0]
        assert targets.verdict(row) == verdict


def test_every_target_is_about_a_table_that_is_measured(targets: Any) -> None:
    """And about ways of it: the names are compared with those of the suites."""
    import run

    measured = {f"{suite_name}/{case}" for suite_name, case, _ in run.ALL}
    assert {target.table for target in targets.TARGETS} == measured


def test_the_page_has_the_figures_of_the_files(modules: Callable[[str], Any]) -> None:
    summary = modules("summary")
    assert summary.page() == summary.PAGE.read_text(), "run benchmarks/summary.py"


def test_a_figure_of_the_page_is_that_of_the_last_run(
    modules: Callable[[str], Any],
) -> None:
    summary = modules("summary")
    (line,) = (x for x in summary.of_suite("device") if "hot pair, device" in x)
    (table,) = (
        table
        for table in summary.read("last_pinned")["tables"]
        if (table["suite"], table["key"]) == ("device", "c_pair")
    )
    (case,) = table["cases"]
    median = case["ways"]["numpy_rmm"]["median"]
    assert f"| ≤ 12 | {median:.3g} |" in line
    assert line.endswith("| missed | `last_pinned` |")
