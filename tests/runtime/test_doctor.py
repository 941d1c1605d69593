"""``dithoist doctor`` says what is true here, and what to do about what does not work."""

from __future__ import annotations

import json
import platform
import shutil
from typing import Any

import pytest
import torch
from torch._dynamo import config as dynamo_config

from dithoist.__main__ import main
from dithoist.runtime import doctor
from dithoist.runtime.release import SUPPORTED


def examined(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", "--json", *(options or ("--timeout", "0"))])
    return code, json.loads(capsys.readouterr().out)


def test_what_it_says_is_true_here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DITHOIST_DUMP", "")
    code, found = examined(capsys)
    assert code == 0
    assert found["versions"]["Python"] == platform.python_version()
    assert found["versions"]["torch"] == torch.__version__
    assert None not in found["versions"].values()
    assert found["devices"][0].startswith(f"cpu: {platform.machine()}")
    assert len(found["devices"]) == 1 + torch.cuda.device_count()
    eager, inductor = found["captures"]
    assert (eager["what"], eager["works"], eager["advice"]) == ("eager", True, "")
    assert inductor["works"] is None
    assert found["releases"][0]["works"] is SUPPORTED
    assert set(found["variables"]) == {"DITHOIST_VERIFY=1", "DITHOIST_DUMP="}
    assert "inductor, was not tried" in found["advice"][0]


def test_it_prints_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--timeout", "0"]) == 0
    printed = capsys.readouterr().out
    for words in (f"torch {torch.__version__}", "eager: works, same bits on", "DITHOIST_VERIFY=1", "in short"):
        assert words in printed


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_inductor_is_tried_where_there_is_a_compiler() -> None:
    found = doctor.examine().captures[1]
    assert (found.works, found.advice) == (True, ""), found.detail


def test_a_compiler_that_hangs_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = examined(capsys, "--timeout", "0.1")
    assert code == 1
    assert found["captures"][0]["works"]
    assert "not done after 0.1 s" in found["captures"][1]["detail"]
    assert found["advice"][0].startswith("compile_pipeline(pipe, backend='eager') works")
    assert "pass backend='eager'" in found["advice"][1]


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_cpp_compiler", lambda: None)
    monkeypatch.setattr(doctor, "_device", lambda: "cpu")
    found = doctor.examine()
    assert found.works
    assert found.captures[1].works is None
    assert "install a C++ compiler" in str(found)


def broken(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Dynamo is not for this Python")


def test_a_broken_capture_is_exit_code_1_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", broken)
    assert main(["doctor"]) == 1  # Inductor is not tried either.
    printed = capsys.readouterr().out
    assert "eager: FAILS, RuntimeError: Dynamo is not for this Python" in printed
    assert "inductor: not tried" in printed
    assert "nothing is compiled here: pipelines run as they are" in printed
    assert "TORCH_LOGS=dynamo" in printed


def test_wrong_numbers_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = doctor.compile_denoiser

    def louder(module: Any, **options: Any) -> Any:
        module.body.weight.data.mul_(2)
        return compiled(module, **options)

    monkeypatch.setattr(doctor, "compile_denoiser", louder)
    found = doctor.examine(0)
    assert not found.works
    assert "wrong numbers" in found.captures[0].detail


@pytest.mark.parametrize("who", ["DITHOIST_DISABLE", "TORCHDYNAMO_DISABLE"])
def test_what_is_switched_off_is_named(
    who: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(who, "1")
    with dynamo_config.patch(disable=who == "TORCHDYNAMO_DISABLE"):  # PyTorch reads it when it is imported.
        code, found = examined(capsys)
    assert code == 1
    assert f"unset {who}" in found["captures"][0]["advice"]
    assert f"{who}=1" in found["variables"]


def test_a_disk_without_room_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.posix_fallocate", full)
    (found, *_) = doctor.examine(0).releases
    assert found.works is not True
    assert "TMPDIR" in found.advice or not SUPPORTED
