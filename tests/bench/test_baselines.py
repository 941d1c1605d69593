"""Baselines: one-sided, a tolerance per kind of figure, and what is said of a shortfall."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from stored_run import MIB, case_result, stored_run

from dithoist.bench import baselines
from dithoist.bench.baselines import KINDS, figures, judge, write
from dithoist.bench.cases import Case
from dithoist.bench.results import Run


def kept(run: Run) -> dict[str, baselines.Figures]:
    return {result.case.id: figures(result) for result in run.results}


def test_a_run_passes_its_own_baseline_and_a_better_one_does_too() -> None:
    run, better = stored_run(), stored_run()
    assert not judge(run, kept(run)).short
    for result in better.results:
        ours = result.variants["dithoist-inductor"]
        ours.steps = [t / 2 for t in ours.steps]
        result.floor = [t / 2 for t in result.floor]
        result.bytes_held = 0
    assert not judge(better, kept(run)).short


def test_no_figure_is_a_time() -> None:
    slow = stored_run()
    for result in slow.results:
        result.floor = [3 * t for t in result.floor]
        for variant in result.variants.values():
            variant.first_call *= 3
            variant.steps = [3 * t for t in variant.steps]
            variant.pictures = [3 * t for t in variant.pictures]
    assert kept(slow)["flux-256t-64p-20s"] == pytest.approx(kept(stored_run())["flux-256t-64p-20s"])


def test_a_slower_step_falls_short_and_is_named_with_its_amount() -> None:
    run = stored_run()
    slower = Run("cpu", "here", 3, [case_result(Case("flux"), ours=0.90)])
    short = {s.figure: s for s in judge(slower, kept(run)).short}
    found = short["speed-up: steps, dithoist-inductor over torch.compile"]
    assert found.by == pytest.approx(1 - 0.80 / 0.90)
    assert "flux-256t-64p-20s: speed-up: steps, dithoist-inductor over torch.compile: 1.111, baseline 1.25" in str(
        found
    )
    assert "worse by 11.1% (allowed: 5%)" in str(found)


def test_each_kind_has_a_tolerance_of_its_own() -> None:
    run = stored_run()
    result = case_result(Case("flux"), ours=0.83)  # 3.6 % slower: within.
    result.bytes_held = 8 * MIB + MIB // 4  # 3.1 % more: within.
    result.body_operations = 281  # One more is one too many.
    short = judge(Run("cpu", "here", 3, [result]), kept(run)).short
    assert [s.figure for s in short] == ["count: operations in the body"]


def test_an_error_where_there_was_none_and_nan_fall_short() -> None:
    assert KINDS["error"].shortfall(0.0, 0.0) == 0
    assert KINDS["error"].shortfall(0.0, 1e-9) == float("inf")
    result = case_result(Case("flux"), ours=0.8)
    result.variants["dithoist-inductor"].error = float("nan")
    short = judge(Run("cpu", "here", 3, [result]), kept(stored_run())).short
    assert [s.figure for s in short] == ["error: dithoist-inductor"]


def test_a_case_without_baseline_is_said_and_not_failed() -> None:
    run = stored_run()
    judgement = judge(run, {"flux-256t-64p-20s": figures(run.results[0])})
    assert not judgement.short
    assert judgement.unjudged == ["sd3-256t-64p-20s: no baseline yet"]


def test_the_command_line_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = stored_run()
    run.failed = {}
    results, baseline = tmp_path / "run.json", tmp_path / "kept" / "cpu.json"
    run.save(results)
    options = ["--results", str(results), "--file", str(baseline)]
    assert baselines.main(["--check", *options]) == 0
    assert "no baseline yet" in capsys.readouterr().out
    assert baselines.main(["--write", *options]) == 0
    assert set(json.loads(baseline.read_text())["cases"]) == {"flux-256t-64p-20s", "sd3-256t-64p-20s"}
    assert baselines.main(["--check", *options]) == 0
    assert "0 of 2 cases fell short" in capsys.readouterr().out

    Run("cpu", "here", 3, [case_result(Case("sd3"), ours=1.5)]).save(results)
    assert baselines.main(["--check", *options]) == 1
    assert "1 of 1 cases fell short" in capsys.readouterr().out


def test_a_failed_case_and_a_file_of_something_else(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = tmp_path / "run.json"
    stored_run().save(results)
    write(stored_run(), tmp_path / "cpu.json")
    options = ["--check", "--file", str(tmp_path / "cpu.json"), "--results", str(results)]
    assert baselines.main(options) == 1
    assert "out of luck" in capsys.readouterr().out
    results.write_text("{}")
    with pytest.raises(SystemExit):
        baselines.main(options)
    assert "no result of python -m bench" in capsys.readouterr().err
