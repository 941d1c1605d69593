"""What a run found, and its JSON. Times are in seconds, memory in bytes."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cases import Case
from .ratios import Ratio, ratio


@dataclass
class VariantResult:
    """One way to run one case.

    Attributes:
        first_call: the first call, with cold caches: compilation and one step; the fastest, if there were several.
        steps: of each round, the median of some steps with all values held that can be.
        pictures: of each round, a picture with a new prompt; what is done once a request is part of it.
        error: largest absolute difference of any step's output to eager's, over eager's largest value. 0 is the
            same bits.
        graphs: what Dynamo captured in the first call.
        recompiles: what it captured later.
        host_reads: calls that make the host wait, in one step.
        peak: most memory in the loop, in a process of its own; ``None`` where it was not measured.
        notes: such as a fall-back to the untouched module.
    """

    first_call: float = 0.0
    steps: list[float] = field(default_factory=list)
    pictures: list[float] = field(default_factory=list)
    error: float = 0.0
    graphs: int = 0
    recompiles: int = 0
    host_reads: int = 0
    peak: int | None = None
    notes: list[str] = field(default_factory=list)


@dataclass
class CaseResult:
    """All variants of one case, measured in turns in one process.

    Attributes:
        depth: blocks the module is a stack of.
        floor: of each round, a step of our compiled body alone, on held values.
        operations: in a step as captured; ``None`` without a variant of ours.
        body_operations: those left in the body.
        body_host_reads: calls left in the body that make the host wait.
        bytes_held: between calls, by ours with Inductor.
        unsupported: why a variant does not exist for this family, by name.
        failed: why a variant could not make its first call, or its memory not be measured; by name.
    """

    case: Case
    depth: int
    variants: dict[str, VariantResult]
    floor: list[float] = field(default_factory=list)
    operations: int | None = None
    body_operations: int | None = None
    body_host_reads: int | None = None
    bytes_held: int | None = None
    unsupported: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def speedup(self, name: str, over: str, figure: str = "steps") -> Ratio | None:
        """Time of ``over`` divided by that of ``name``; ``figure`` is ``"steps"`` or ``"pictures"``."""
        if name not in self.variants or over not in self.variants:
            return None
        return ratio(getattr(self.variants[over], figure), getattr(self.variants[name], figure))

    def over_floor(self, name: str) -> Ratio | None:
        """Time of a step of ``name`` divided by that of the body alone."""
        return ratio(self.variants[name].steps, self.floor) if name in self.variants and self.floor else None


@dataclass
class Overhead:
    """What one call costs besides its work, for a denoiser whose hoisted work reads ``parameters`` weights.

    Attributes:
        dynamo: seconds for guards and AOTAutograd's wrapper around a graph that does nothing.
        ours: seconds we add, the body left out.
        first: seconds of the first call of a picture, body included: it reads all hoisted weights.
    """

    parameters: int
    dynamo: float
    ours: float
    first: float


@dataclass
class Run:
    """One run on one machine.

    Attributes:
        platform: ``"cpu"``, ``"cuda"`` or ``"npu"``.
        machine: what it is, in words.
        rounds: timed pictures of each variant.
        failed: why a case, or one variant of it, has no figures; by id.
        skipped: ids of cases there was no time for.
        overhead: by number of parameters.
    """

    platform: str
    machine: str
    rounds: int
    results: list[CaseResult] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    overhead: list[Overhead] = field(default_factory=list)

    def take_over(self, earlier: Run) -> None:
        """Go on with a run that was stopped: its figures are this one's.

        Raises:
            ValueError: it ran on another machine, or other rounds.
        """
        for name in ("platform", "machine", "rounds"):
            ours, theirs = getattr(self, name), getattr(earlier, name)
            if ours != theirs:
                raise ValueError(f"cannot go on with a run whose {name} is {theirs!r}: here it is {ours!r}")
        self.results += earlier.results
        self.overhead += earlier.overhead

    def save(self, path: Path) -> None:
        """Write everything as JSON; makes the folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    @classmethod
    def load(cls, path: Path) -> Run:
        """Read what :meth:`save` wrote.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds something else.
        """
        try:
            found = json.loads(path.read_text())
            results = [_case_result(r) for r in found["results"]]
            return cls(**found | {"results": results, "overhead": [Overhead(**o) for o in found["overhead"]]})
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"{path} is no result of python -m bench: {error}") from error


def _case_result(found: dict[str, Any]) -> CaseResult:
    variants = {name: VariantResult(**variant) for name, variant in found["variants"].items()}
    return CaseResult(**found | {"case": Case(**found["case"]), "variants": variants})
