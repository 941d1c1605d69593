"""The command line: what it lists, what it refuses, and in which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from stored_run import stored_run

from dithoist.__main__ import main as dithoist
from dithoist.bench import overhead
from dithoist.bench.__main__ import main
from dithoist.bench.baselines import main as baselines
from dithoist.bench.tables import markdown


def test_cases_are_listed_by_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert dithoist(["bench", "--list", "--family", "flux", "--blocks", "24"]) == 0
    assert capsys.readouterr().out.split() == ["flux-64t-64p-4s-24b"]
    assert main(["--list", "--case", "flux-1024t-64p-3s-2b"]) == 0
    assert capsys.readouterr().out.split() == ["flux-1024t-64p-3s-2b"]
    assert main(["--list", "--quick", "--family", "sd3"]) == 0
    assert capsys.readouterr().out.split() == ["sd3-64t-64p-4s-1b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--family", "fluks"], "no case has family 'fluks'"),
        (["--tokens", "3"], "known: 64, 256, 1024"),
        (["--variant", "fast"], "known: eager, torch.compile, regional, dithoist-eager, dithoist-inductor"),
        (["--quick", "--steps", "4"], "leave out --steps"),
        (["--case", "flux"], "'flux' is no case id such as"),
        (["--case", "flux-64t-64p-4s", "--quick"], "leave out the other choices"),
        (["--resume"], "name its file"),
        (["--rounds", "0"], "must be at least 1"),
        (["--device", "tpu"], "cpu, cuda, npu"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_known(
    options: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(options)
    assert error.value.code == 2
    assert words in " ".join(capsys.readouterr().err.replace("'cpu', 'cuda', 'npu'", "cpu, cuda, npu").split())


def test_a_stored_run_is_shown_without_measuring(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored_run().save(tmp_path / "run.json")
    out = tmp_path / "performance.md"
    assert main(["--results", str(tmp_path / "run.json"), "--markdown", str(out)]) == 1, "a case of it failed"
    assert "a step takes 5.0% longer" in capsys.readouterr().out
    assert out.read_text() == markdown(stored_run())
    with pytest.raises(SystemExit):
        main(["--results", str(tmp_path / "nothing.json")])


def test_a_device_that_is_not_there_is_skipped_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in (main, overhead.main, lambda options: baselines(["--check", *options])):
        assert command(["--device", "cuda"]) == 0
        assert capsys.readouterr().out.strip() == "skipped: no cuda device here"
