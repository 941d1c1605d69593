"""``dithoist doctor``: what is here, what of it works, and what to do about what does not.

Nothing is taken on trust: a small denoiser is compiled and called, and a small weight leaves memory and comes back.
A back end that runs a compiler is tried in a process of its own, with a time limit: one that hangs must not hang this.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._dynamo import config as dynamo_config

from . import env
from .denoiser import compile_denoiser
from .release import LEAST_BYTES, SUPPORTED, ReleasedWeights
from .report import Printable, human, report

PACKAGES = ("dithoist", "torch", "diffusers", "transformers")

TIMEOUT = 120
"""Seconds for a back end that runs a compiler; ten are enough on an idle machine."""

_MARK = "dithoist doctor: "
_CHILD = (
    "import sys; from dithoist.runtime.doctor import capture_problem; "
    f"print({_MARK!r} + capture_problem(*sys.argv[1:]))"
)


@dataclass(frozen=True)
class Finding:
    """Something that was tried.

    Attributes:
        what: the back end, or where weights would go.
        works: ``None`` if it was not tried.
        detail: how it went.
        advice: what to do; empty if nothing needs doing.
    """

    what: str
    works: bool | None
    detail: str
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis(Printable):
    """What :func:`examine` found. ``str()`` prints it in plain words.

    Attributes:
        versions: of Python and the packages; ``None`` for one that is not installed.
        devices: what torch can compute on.
        flash_attention: version of flash-attn, if it is installed.
        captures: for each back end, whether a small denoiser is captured and gives the right numbers.
        releases: for each kind of device, whether weights can leave its memory.
        variables: the environment variables that are set and change what we do, with what they do.
        advice: what would be used, and what to do.
    """

    versions: dict[str, str | None]
    devices: list[str]
    flash_attention: str | None
    captures: list[Finding]
    releases: list[Finding]
    variables: dict[str, str]
    advice: list[str]

    @property
    def works(self) -> bool:
        """Whether every capture that was tried works."""
        return all(found.works is not False for found in self.captures)

    def _tables(self, console: Console) -> None:
        table = Table.grid(padding=(0, 2))
        table.add_column(style="bold", no_wrap=True)
        table.add_column(overflow="fold")
        versions = (f"{name} {version or 'is not installed'}" for name, version in self.versions.items())
        table.add_row("versions", ", ".join(versions))
        table.add_row("devices", "\n".join(self.devices))
        flash = self.flash_attention or "not installed; attention is that of PyTorch"
        table.add_row("flash-attn", flash)
        for title, findings in (("capture", self.captures), ("release_weights", self.releases)):
            for found in findings:
                state = {True: "works", False: "FAILS", None: "not tried"}[found.works]
                table.add_row(title, f"{found.what}: {state}, {found.detail}")
        variables = [f"{name}: {meaning}" for name, meaning in self.variables.items()]
        table.add_row("variables set", "\n".join(variables) or "none")
        table.add_row("in short", "\n".join(self.advice))
        console.print(table, highlight=False, markup=False)


def examine(timeout: float = TIMEOUT) -> Diagnosis:
    """Find out what works here.

    Args:
        timeout: seconds that compiling with Inductor may take; 0 leaves it out.
    """
    device = _device()
    eager = _try_eager(device)
    captures = [eager, _try_inductor(device, timeout if eager.works else 0)]
    releases = [_try_release(torch.device("cpu"))]
    if torch.cuda.is_available():
        releases.append(_try_release(torch.device("cuda")))
    versions = {"Python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}
    return Diagnosis(
        versions=versions,
        devices=_devices(),
        flash_attention=_version("flash-attn") if importlib.util.find_spec("flash_attn") else None,
        captures=captures,
        releases=releases,
        variables={f"{name}={os.environ[name]}": env.VARIABLES[name] for name in env.VARIABLES if name in os.environ},
        advice=_advice(versions, captures, releases),
    )


class _Small(nn.Module):
    """Text projection (request), modulation (schedule), and a body: all that a denoiser has."""

    def __init__(self) -> None:
        super().__init__()
        self.text, self.modulation, self.body = (nn.Linear(16, 16) for _ in range(3))

    def forward(
        self, hidden_states: torch.Tensor, timestep: torch.Tensor, encoder_hidden_states: torch.Tensor
    ) -> torch.Tensor:
        scale = self.modulation(timestep.sin())
        out: torch.Tensor = self.body(hidden_states * scale + self.text(encoder_hidden_states))
        return out


def capture_problem(backend: str, device: str) -> str:
    """What goes wrong when a small denoiser is compiled and called; empty if nothing does."""
    try:
        return _capture_problem(backend, torch.device(device))
    except Exception as error:  # Whatever it is, it is the finding.
        return f"{type(error).__name__}: {error}"


def _capture_problem(backend: str, device: torch.device) -> str:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        untouched = _Small().eval().to(device)
        calls = [[torch.randn(1, 16), torch.full((1, 16), step), torch.ones(1, 16)] for step in (2.0, 1.0)]
        compiled = compile_denoiser(copy.deepcopy(untouched), backend=backend, strict=True)
        for call in calls:
            arguments = [value.to(device) for value in call]
            actual, expected = compiled(*arguments), untouched(*arguments)
            same = torch.equal(actual, expected) if backend == "eager" else torch.allclose(actual, expected, 1e-3, 1e-4)
            if not same:
                return f"wrong numbers: {float((actual - expected).abs().max()):.1e} off"
    graphs = report(compiled).denoisers[0].graphs
    if not graphs:
        return "nothing was captured"
    hoisted = {time for time, work in graphs[0].by_time.items() if time != "step" and work.runs}
    return "" if {"request", "schedule"} <= hoisted else "nothing was moved out of the loop"


def _try_eager(device: str) -> Finding:
    begin = time.perf_counter()
    problem = capture_problem("eager", device)
    if not problem:
        return Finding("eager", True, f"same bits on {device}, {time.perf_counter() - begin:.0f} s")
    if env.disabled():
        advice = "unset DITHOIST_DISABLE: it turns dithoist off"
    elif dynamo_config.disable:
        advice = "unset TORCHDYNAMO_DISABLE and TORCH_COMPILE_DISABLE: they turn torch.compile off, which captures"
    else:
        advice = "pipelines run as if never compiled; TORCH_LOGS=dynamo says more, and a report of it is welcome"
    return Finding("eager", False, _first_lines(problem), advice)


def _try_inductor(device: str, timeout: float) -> Finding:
    compiler = _cpp_compiler()
    if device == "cpu" and compiler is None:
        advice = "install a C++ compiler (g++ or clang++, or name it in CXX), or pass backend='eager'"
        return Finding("inductor", None, "there is no C++ compiler", advice)
    with_what = f"on {device}" + (f" with {compiler}" if device == "cpu" else "")
    if timeout <= 0:
        return Finding("inductor", None, with_what)
    begin = time.perf_counter()
    problem = _problem_of_a_child("inductor", device, timeout)
    if not problem:
        return Finding("inductor", True, f"{with_what}, {time.perf_counter() - begin:.0f} s")
    advice = "pass backend='eager', which runs no compiler; TORCH_LOGS=inductor says more"
    return Finding("inductor", False, f"{with_what}: {_first_lines(problem)}", advice)


def _problem_of_a_child(backend: str, device: str, timeout: float) -> str:
    """As :func:`capture_problem`, from a process that is ended when time is up."""
    command = [sys.executable, "-c", _CHILD, backend, device]
    # Without worker processes, which would outlive it.
    variables = os.environ | {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=variables)
    except subprocess.TimeoutExpired:
        return f"not done after {timeout:g} s"
    said = run.stdout.partition(_MARK)
    if run.returncode or not said[1]:
        last = run.stderr.strip().splitlines()[-1:]
        return f"the process ended with exit code {run.returncode}: {''.join(last)}"
    return said[2].strip()


def _try_release(device: torch.device) -> Finding:
    where = {"cpu": "to the disk", "cuda": "to the host"}[device.type]
    what = f"{device.type}, {where}"
    if device.type == "cpu" and not SUPPORTED:
        return Finding(what, False, "this system is not Linux", "leave release_weights out")
    weight = nn.Parameter(torch.arange(LEAST_BYTES, device=device) % 251, requires_grad=False)
    expected = weight.clone()
    weights = ReleasedWeights()
    try:
        moved = weights.release([weight])
        same = torch.equal(weight, expected)
        weights.restore([weight])
        same = same and torch.equal(weight, expected)
    except Exception as error:  # As above.
        problem = _first_lines(f"{type(error).__name__}: {error}")
        folder = f"; TMPDIR names the folder for the file, now {_temporary()}" if device.type == "cpu" else ""
        return Finding(what, False, problem, f"release_weights leaves weights where they are{folder}")
    if not moved or not same:
        problem = "nothing was moved" if same else "the weight came back changed"
        return Finding(what, False, problem, "leave release_weights out, and please report this")
    return Finding(what, True, f"a file in {_temporary()}" if device.type == "cpu" else "memory the device can read")


def _temporary() -> str:
    folder = tempfile.gettempdir()
    return f"{folder}, {human(shutil.disk_usage(folder).free)} free"


def _advice(versions: dict[str, str | None], captures: list[Finding], releases: list[Finding]) -> list[str]:
    eager, inductor = captures
    if eager.works and inductor.works:
        used = ["compile_pipeline(pipe) works: backend='inductor' is used, backend='eager' keeps the bits"]
    elif eager.works and inductor.works is None and not inductor.advice:
        used = ["compile_pipeline(pipe, backend='eager') works; the default back end, inductor, was not tried"]
    elif eager.works:
        used = ["compile_pipeline(pipe, backend='eager') works; the default back end, inductor, does not"]
    else:
        used = ["nothing is compiled here: pipelines run as they are, right but no faster"]
    used += [f"{found.what}: {found.advice}" for found in (*captures, *releases) if found.advice]
    missing = [name for name in ("diffusers", "transformers") if not versions[name]]
    if missing:
        used.append(f"for compile_pipeline, explain and demo: pip install 'dithoist[demo]' ({', '.join(missing)})")
    return used


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _devices() -> list[str]:
    found = [f"cpu: {platform.machine()}, {os.cpu_count()} cores, threads of torch: {torch.get_num_threads()}"]
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            found.append(f"cuda:{i}: {properties.name}, {human(properties.total_memory)}")
    elif (other := torch.accelerator.current_accelerator()) is not None:
        found.append(f"{other}: tests do not cover it")
    return found


def _cpp_compiler() -> str | None:
    """The C++ compiler that Inductor would run."""
    from torch._inductor.cpp_builder import get_cpp_compiler

    try:
        return get_cpp_compiler()
    except Exception:  # Of several kinds, and each means that there is none.
        return None


def _first_lines(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[:3])
