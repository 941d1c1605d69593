"""What is said of a run: losses as plainly as wins, and every promise with what was got."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console
from stored_run import stored_run

from dithoist.bench.plots import draw
from dithoist.bench.results import Run
from dithoist.bench.tables import markdown, show
from dithoist.bench.targets import losses, verdicts


def test_a_run_comes_back_from_its_file(tmp_path: Path) -> None:
    run = stored_run()
    run.save(tmp_path / "run.json")
    assert Run.load(tmp_path / "run.json") == run
    (tmp_path / "run.json").write_text("[]")
    with pytest.raises(ValueError, match="no result of"):
        Run.load(tmp_path / "run.json")


def test_losses_stand_in_the_table_and_in_words() -> None:
    text = markdown(stored_run())
    assert "Measured on cpu: a processor, 2 threads, torch 2." in text
    (loss,) = [line for line in text.splitlines() if line.startswith("| sd3-256t-64p-20s | dithoist-inductor | 1.05e")]
    assert loss.count("▼ 0.952x [0.952, 0.952]") == 2
    assert "- sd3-256t-64p-20s, dithoist-inductor: a step takes 5.0% longer than with torch.compile" in text
    assert "| flux-256t-64p-20s | dithoist-inductor | 800 | " in text


def test_only_what_is_worse_is_a_loss() -> None:
    assert all("sd3" in line or "peak memory" in line for line in losses(stored_run()))
    run = stored_run()
    run.results[0].variants["dithoist-inductor"].error = float("nan")
    run.results[0].variants["dithoist-inductor"].notes = ["fell back: no reason"]
    told = "\n".join(losses(run))
    assert "flux-256t-64p-20s, dithoist-inductor: the error, nan, is above the 1.0e-06 of torch.compile" in told
    assert "fell back: no reason" in told


def test_every_promise_is_judged_by_the_run_alone() -> None:
    found = [(verdict.met, verdict.got) for verdict in verdicts(stored_run())]
    assert found[0] == (True, "1.010 at most in 2 cases")
    assert found[1] == (False, "1.050 at most in 2 cases, over 1.0: sd3-256t-64p-20s (1.050)")
    assert found[3] == (True, "1.101x over 2 families")
    assert found[4] == (True, "0.900 at most in 2 cases")
    assert found[5] == (None, "no case to judge by")
    assert found[6][0] is True
    assert all(verdict.met is None for verdict in verdicts(Run("cpu", "here", 1)))


def test_failed_skipped_and_missing_are_said_everywhere() -> None:
    console = Console(file=io.StringIO(), width=190, record=True)
    show(stored_run(), console)
    for text in (console.export_text(), markdown(stored_run())):
        assert "wan-256t-64p-20s: RuntimeError: out of luck" in text
        assert "pixart-256t-64p-20s" in text
        assert "sd3-256t-64p-20s, regional: SD3Transformer2DModel names no repeated blocks" in text


def test_the_plots_can_be_drawn_of_any_run(tmp_path: Path) -> None:
    for run in (stored_run(), Run("cpu", "here", 1)):
        draw(run, tmp_path / "plots.png")
        assert (tmp_path / "plots.png").stat().st_size > 10_000
