"""A table before it is drawn: on the terminal, or as Markdown."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_OF_WORDS = frozenset({"case", "variant", "denoiser", "shape", "dtype"})


@dataclass(frozen=True)
class Sheet:
    """Columns of words are set to the left, figures to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def print(self, console: Console) -> None:
        """A first cell that is that of the row above is left out."""
        table = Table(title=self.title, title_justify="left")
        for column in self.header:
            table.add_column(escape(column), justify="left" if column in _OF_WORDS else "right")
        for above, row in itertools.pairwise([("",), *self.rows]):
            table.add_row("" if row[0] == above[0] else row[0], *map(escape, row[1:]))
        console.print(table)

    def markdown(self) -> list[str]:
        """Lines of the table, without its title."""
        return [f"| {' | '.join(cells)} |" for cells in (self.header, ["---"] * len(self.header), *self.rows)]
