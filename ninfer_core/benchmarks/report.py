"""Figures for people: Markdown tables, plots as SVG, and the tables of README and docs made from the result files."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ..errors import InvalidRequestError
from .results import Figure, read_all

BEGIN, END = "<!-- {}, made by `ninfer bench table`; do not edit -->", "<!-- end of {} -->"
_PLACE = re.compile(BEGIN.format(r"(\w+)") + "\n.*?" + END.format(r"\1"), re.S)

BUSY = 1.25
"""Load per core above which a CPU was shared with other programs."""
CARDS = (24, 32)
MEMORY_CONTEXTS = (8_192, 262_144)
CARD_RESERVE = 1.5
"""GiB of a card that are not the engine's: the driver's own, compiled kernels, a desktop."""


def number(value: float) -> str:
    """A figure with as many digits as mean something."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table, its first column left-aligned, the others right."""
    lines = ["| " + " | ".join(header) + " |", "| --- |" + " ---: |" * (len(header) - 1)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


def figures_table(figures: Sequence[Figure]) -> str:
    """All figures of a run, one a row: value with deviation, floor and share, and what belongs to them."""
    rows = []
    for figure in figures:
        about = figure.details
        value = number(figure.value) + (f" ± {number(figure.deviation)}" if figure.deviation is not None else "")
        notes = []
        if "accepted_by_position" in about:
            shares = " / ".join(f"{100 * share:.0f}" for share in about["accepted_by_position"])
            notes.append(f"{about['tokens_per_round']:.2f} tokens a round, accepted {shares} %")
        if "forced" in about:
            notes.append("**forced acceptance**")
        if "copied" in str(about.get("filled", "")):
            notes.append("context of copied pages")
        if about.get("weights") == "random":
            notes.append("random weights")
        rows.append(
            (
                figure.name,
                f"{value} {figure.unit}",
                "" if figure.floor is None else number(figure.floor),
                "" if figure.share is None else f"{100 * figure.share:.0f} %",
                "; ".join(notes),
            )
        )
    return markdown(("figure", "value", "floor", "share", "notes"), rows)


# --- documents -------------------------------------------------------------------------------------------------------

_SPEEDS = ("decode", "prefill", "batch")
_PARTS = {
    "decode": "decode, one request",
    "prefill": "reading a prompt",
    "batch": "decode, several requests",
    "first-token": "first token",
    "gap": "longest gap beside a prompt",
    "workload": "decode by kind of text",
}


def speed_tables(folder: Path) -> str:
    """One table for each result file, each figure beside its floor and the best peer.

    Raises:
        InvalidRequestError: the folder holds no result file.
    """
    own, peers = _files(folder)
    return "\n\n".join(_device_table(found, slug, peers.get(slug, {})) for slug, found in own)


def _files(folder: Path) -> tuple[list[tuple[str, Mapping[str, Any]]], dict[str, Mapping[str, Any]]]:
    """Result files by the slug of their device, GPUs first, and the figures of peers by that of theirs."""
    files = read_all(folder)
    own = [(slug, found) for slug, found in files.items() if "peers" not in found["device"]]
    if not own:
        raise InvalidRequestError(
            f"{folder} holds no result files; write some with `ninfer bench MODEL --save {folder}`"
        )
    peers = {found["device"]["peers"]: found["figures"] for found in files.values() if "peers" in found["device"]}
    return sorted(own, key=lambda item: item[1]["device"].get("kind") == "cpu"), peers


def text_tables(folder: Path) -> str:
    """Decode rate, accepted drafts and tokens per round by kind of text: a table for each device that has such figures.

    Raises:
        InvalidRequestError: the folder holds no result file.
    """
    parts = []
    for _, found in _files(folder)[0]:
        rows = []
        for name, entry in found["figures"].items():
            model, kind, *rest = name.split("/")
            if kind == "workload":
                about = entry["details"]
                shares = " / ".join(f"{100 * share:.0f} %" for share in about.get("accepted_by_position", ()))
                rounds = f"{about['tokens_per_round']:.2f}" if "tokens_per_round" in about else ""
                rate = f"{number(entry['value'])} ± {number(entry['deviation'])}"
                ended = f"{about['ended']} of {entry['runs']}"
                rows.append((f"{model}: {rest[0]}", rate, rounds, shares, f"{about['limit']:,}", ended))
        header = ("kind of text", "tokens a second", "tokens a round", "accepted by position", "limit", "ended before")
        if rows:
            parts += [f"**{found['device']['name']}**", markdown(header, rows), *_shared(found, ("workload",))]
    return "\n\n".join(parts)


def _shared(found: Mapping[str, Any], kinds: Sequence[str]) -> list[str]:
    """A note where a CPU was shared while figures of these kinds were measured."""
    busy = max(
        (entry.get("load") or 0.0 for name, entry in found["figures"].items() if name.split("/")[1] in kinds),
        default=0.0,
    )
    if busy <= BUSY or found["device"]["kind"] != "cpu":
        return []
    return [f"Other programs ran beside the measurement (load {busy:g} per core): an idle machine is faster."]


def _device_table(found: Mapping[str, Any], slug: str, peers: Mapping[str, Any]) -> str:
    rows, forced, random = [], False, False
    for name, entry in sorted(found["figures"].items(), key=lambda item: _order(item[0])):
        model, kind, *rest = name.split("/")
        if kind not in _SPEEDS:
            continue
        about = entry["details"]
        random |= about.get("weights") == "random"
        forced |= "forced" in about
        key = "/".join((model.removesuffix("-random"), kind, *rest))
        peer = peers.get(key)
        rows.append(
            (
                _label(model, kind, rest, about),
                number(entry["value"]) + (f" ± {number(entry['deviation'])}" if "deviation" in entry else ""),
                number(entry["floor"]) if "floor" in entry else "",
                f"{100 * entry['share']:.0f} %" if "share" in entry else "",
                f"{number(peer['value'])} ({peer['details']['peer']})" if peer else "",
            )
        )
    columns = 5 if any(row[4] for row in rows) else 4
    header = ("tokens a second", "ninfer", "byte floor", "share", "best peer")[:columns]
    notes = _shared(found, _SPEEDS)
    if random:
        notes.append("Weights are random in the published formats: speeds mean something, text does not.")
    if forced:
        notes.append("*Forced*: drafts are replaced so that the stated number is accepted.")
    link = f"[file](tests/bench/results/{slug}.json)"
    return f"**{found['device']['name']}** ({link})\n\n{markdown(header, [row[:columns] for row in rows])}" + (
        "\n\n" + " ".join(notes) if notes else ""
    )


def _order(name: str) -> tuple[Any, ...]:
    model, kind, *rest = name.split("/")
    parts = [int(part) if part.isdigit() else part for part in rest]
    return (model, list(_PARTS).index(kind) if kind in _PARTS else 99, [str(p).rjust(9, "0") for p in parts])


def _label(model: str, kind: str, rest: Sequence[str], about: Mapping[str, Any]) -> str:
    model = model.removesuffix("-random")
    if kind == "batch":
        together = f"{int(rest[1]):,} requests together" if rest[1] != "1" else "1 request"
        return f"{model}: decode of {together}, {int(rest[0]):,} tokens each"
    if kind == "prefill":
        return f"{model}: reading a prompt of {int(rest[0]):,} tokens"
    text = f"{model}: decode at {int(rest[1]):,} tokens"
    if "tokens_per_round" in about:
        forced = "*forced* to " if "forced" in about else ""
        text += f", {rest[0][3:4]} drafts ({forced}{about['tokens_per_round']:.2f} tokens a round)"
    return text


def memory_table() -> str:
    """What each model needs on a GPU, from its shapes alone: INT8 KV cache, three drafts, one sequence."""
    from ..config import PUBLISHED
    from ..footprint import fused_footprint
    from ..inventory import inventory

    rows = []
    for model, config in PUBLISHED.items():
        need = fused_footprint(config, inventory(config, vision=False), drafts=3)
        sizes = [f"{need.total(context) / 2**30:.1f} GiB" for context in MEMORY_CONTEXTS]
        longest = [need.longest(int((card - CARD_RESERVE) * 2**30), config.max_position_embeddings) for card in CARDS]
        fits = [f"{tokens // 1000 * 1000:,}" if tokens >= 1000 else "-" for tokens in longest]
        fits = [
            "all" if tokens == config.max_position_embeddings else text
            for tokens, text in zip(longest, fits, strict=True)
        ]
        rows.append((model, f"{need.weights / 2**30:.1f} GiB", *sizes, f"{need.slot / 2**20:.0f} MiB", *fits))
    header = (
        "model", "weights", *(f"at {context:,} tokens" for context in MEMORY_CONTEXTS), "each further sequence",
        *(f"longest context on {card} GB" for card in CARDS),
    )  # fmt: skip
    return markdown(header, rows)


TABLES: Mapping[str, Callable[[Path], str]] = {
    "speeds": speed_tables, "memory": lambda folder: memory_table(), "texts": text_tables,
}  # fmt: skip
"""What a marked place of a document may name, made from a folder of result files."""


def update(document: Path, folder: Path) -> bool:
    """Make the tables between the marks of a document anew; returns whether that changed it.

    Raises:
        InvalidRequestError: there are no marks, or they name an unknown table.
    """
    text = document.read_text(encoding="utf-8")
    made = replaced(text, folder)
    if made is None:
        marks = f"{BEGIN.format('NAME')} and {END.format('NAME')}"
        names = ", ".join(TABLES)
        raise InvalidRequestError(f"{document} has no place for tables: it needs {marks}, where NAME is one of {names}")
    if made != text:
        document.write_text(made, encoding="utf-8")
    return made != text


def replaced(text: str, folder: Path) -> str | None:
    """A document with the tables in its marked places made anew; None if it has no such places.

    Raises:
        InvalidRequestError: a mark names an unknown table.
    """

    def table(found: re.Match[str]) -> str:
        name = found[1]
        if name not in TABLES:
            raise InvalidRequestError(f"there is no table {name!r}; there are {', '.join(TABLES)}")
        return f"{BEGIN.format(name)}\n\n{TABLES[name](folder)}\n\n{END.format(name)}"

    made, count = _PLACE.subn(table, text)
    return made if count else None


# --- plot ------------------------------------------------------------------------------------------------------------

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 720, 400, 70, 50, 40
_COLOURS = ("#1f6feb", "#d1570a", "#2da44e", "#8250df", "#bf3989", "#57606a")


def plot(figures: Mapping[str, Mapping[str, Any]], title: str) -> str:
    """An SVG of decode rates against context, one line per model and setting, their floors dashed.

    `figures`: name -> entry of a result file (`Figure.as_dict`).

    Raises:
        InvalidRequestError: there is no decode figure among them.
    """
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for name, entry in figures.items():
        model, kind, *rest = name.split("/")
        if kind == "decode":
            point = (float(rest[1]), entry["value"], entry.get("floor", 0.0))
            lines.setdefault(_line(model, rest[0]), []).append(point)
    if not lines:
        raise InvalidRequestError("there are no decode figures to plot")
    xs = sorted({x for points in lines.values() for x, _, _ in points})
    top = 1.1 * max(max(value, floor) for points in lines.values() for _, value, floor in points)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    place = _Axes(xs, top)
    parts += place.grid()
    for i, (label, points) in enumerate(sorted(lines.items())):
        points.sort()
        colour = _COLOURS[i % len(_COLOURS)]
        value = " ".join(f"{place.x(x):.1f},{place.y(y):.1f}" for x, y, _ in points)
        parts.append(f'<polyline points="{value}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="3" fill="{colour}"/>' for x, y, _ in points]
        if all(floor for _, _, floor in points):
            floor = " ".join(f"{place.x(x):.1f},{place.y(f):.1f}" for x, _, f in points)
            parts.append(f'<polyline points="{floor}" fill="none" stroke="{colour}" stroke-dasharray="4 4"/>')
        parts.append(f'<text x="{_WIDTH - 250}" y="{_TOP + 16 * (i + 1)}" fill="{colour}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _line(model: str, setting: str) -> str:
    """What a line of a plot is called: `mtp3-forced` is "3 drafts, forced"."""
    drafts, _, forced = setting.removeprefix("mtp").partition("-")
    text = "no drafts" if drafts == "0" else f"{drafts} drafts"
    return ", ".join(part for part in (model.removesuffix("-random"), text, forced) if part)


class _Axes:
    """Where values lie on the page: contexts evenly spaced, rates from zero."""

    def __init__(self, xs: Sequence[float], top: float) -> None:
        self._xs, self._top = list(xs), top

    def x(self, value: float) -> float:
        """Pixels from the left."""
        span = _WIDTH - _LEFT - 40
        return _LEFT + span * self._xs.index(value) / max(1, len(self._xs) - 1)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        return _HEIGHT - _BOTTOM - (_HEIGHT - _BOTTOM - _TOP) * value / self._top

    def grid(self) -> list[str]:
        """Lines and labels."""
        parts = []
        for step in range(6):
            value = self._top * step / 5
            y = self.y(value)
            parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 40}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
            parts.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>')
        for value in self._xs:
            x = self.x(value)
            parts.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 18}" text-anchor="middle">{value:,.0f}</text>')
        middle = (_LEFT + _WIDTH - 40) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 8}" text-anchor="middle">tokens of context</text>')
        parts.append(f'<text x="8" y="{_TOP - 4}">tokens a second; dashed: byte floor</text>')
        return parts
