"""The command line: what it lists, what it refuses, and in which words."""

from __future__ import annotations

import pytest

from dithoist.__main__ import main as dithoist
from dithoist.bench import overhead
from dithoist.bench.__main__ import main
from dithoist.bench.baselines import main as baselines
from dithoist.bench.machine import available


def test_cases_are_listed_by_their_ids(capsys: pytest.CaptureFixture[str]) -> None:
    assert dithoist(["bench", "--list", "--family", "flux", "--blocks", "24"]) == 0
    assert capsys.readouterr().out.split() == ["flux-64t-64p-4s-24b"]
    assert main(["--list", "--quick", "--family", "sd3"]) == 0
    assert capsys.readouterr().out.split() == ["sd3-64t-64p-4s-1b"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--family", "fluks"], "no case has family 'fluks'"),
        (["--tokens", "3"], "known: 64, 256, 1024"),
        (["--variant", "fast"], "known: eager, torch.compile, regional, dithoist-eager, dithoist-inductor"),
        (["--quick", "--steps", "4"], "leave out --steps"),
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


@pytest.mark.skipif(available("cuda"), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_skipped_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for command in (main, overhead.main, lambda options: baselines(["--check", *options])):
        assert command(["--device", "cuda"]) == 0
        assert capsys.readouterr().out.strip() == "skipped: no cuda device here"
