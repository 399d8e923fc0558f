"""Help of a command with many options: they are listed in groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from typer.core import TyperCommand

Groups = Mapping[str, Sequence[str]]
"""Heading to the parameters below it, by their Python names; what is in none comes last."""


def grouped(groups: Groups) -> type[TyperCommand]:
    """A command class whose help lists options under the headings of `groups`."""
    heading_of = {name: heading for heading, names in groups.items() for name in names}

    class GroupedCommand(TyperCommand):
        """Lists options under headings."""

        def format_options(self, ctx: Any, formatter: Any) -> None:
            """Write the arguments, then the options of each group."""
            found: dict[str, list[tuple[str, str]]] = {heading: [] for heading in ("Arguments", *groups, "Other")}
            for param in self.get_params(ctx):
                record = param.get_help_record(ctx)
                if record is not None:
                    own = (
                        "Arguments"
                        if param.param_type_name == "argument"
                        else heading_of.get(param.name or "", "Other")
                    )
                    found[own].append(record)
            for heading, records in found.items():
                if records:
                    with formatter.section(heading):
                        formatter.write_dl(records)

    return GroupedCommand
