"""The command line and the demo, on the small sizes' big brothers but for two steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from dithoist.__main__ import main
from dithoist.runtime import demo


def test_the_demo_writes_pictures_reports_and_a_chart(tmp_path: Path) -> None:
    console = Console(record=True, width=120)
    outcomes = demo.run_demo(
        tmp_path, pipelines=("ideogram-4",), backends=("eager",), steps=2, repeats=1, console=console
    )
    (outcome,) = outcomes["ideogram-4"]
    assert outcome.largest_error == 0
    assert outcome.speedup > 0
    assert {f.name for f in tmp_path.iterdir()} == {
        "ideogram-4.png", "ideogram-4-eager.png", "ideogram-4-eager.json", "demo.png",
    }  # fmt: skip
    pictures = [Image.open(tmp_path / f"ideogram-4{end}.png").tobytes() for end in ("", "-eager")]
    assert pictures[0] == pictures[1]
    assert Image.open(tmp_path / "ideogram-4.png").size == (256, 256)
    tree = json.loads((tmp_path / "ideogram-4-eager.json").read_text())
    assert [d["name"] for d in tree["denoisers"]] == ["transformer", "unconditional_transformer"]
    printed = console.export_text()
    for words in ("bitwise equal", "weights read", "host reads left in the body: none"):
        assert words in printed


def test_the_command_line_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--help"], ["demo", "--help"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 0
    assert "--steps" in capsys.readouterr().out
    for arguments in ([], ["paint"], ["demo", "--steps", "1"], ["demo", "--repeats", "none"]):
        with pytest.raises(SystemExit) as stop:
            main(arguments)
        assert stop.value.code == 2
    assert "must be at least 2" in capsys.readouterr().err


def test_python_dash_m_finds_the_package() -> None:
    run = subprocess.run([sys.executable, "-m", "dithoist", "--help"], capture_output=True, text=True, cwd="/")
    assert run.returncode == 0
    assert "demo" in run.stdout
