"""Floors, figures, result files, tables and plots of the benchmarks; README against the result files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ninfer_core.benchmarks import report
from ninfer_core.benchmarks.floors import distinct_share, step_floor
from ninfer_core.benchmarks.results import Device, Figure, figure_of, read, read_all, save
from ninfer_core.config import QWEN36_27B, QWEN36_35B_A3B
from ninfer_core.errors import InvalidRequestError
from ninfer_core.inventory import inventory

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tests/bench/results"
CARD = Device("Some Card 9", "some-card-9", "cuda", 1 << 35)


def test_floor_of_one_token_counts_each_part_once() -> None:
    config, formats = QWEN36_35B_A3B, inventory(QWEN36_35B_A3B, vision=False)
    floor = step_floor(config, formats, context=7680)
    # 10 attention layers, 2 KV heads, keys and values: 256 codes and 4 fp16 scales each.
    assert floor.kv == 10 * 7680 * 2 * 2 * (256 + 8)
    assert floor.state == 2 * 30 * 32 * 128 * 128 * 4
    assert floor.drafts == 0
    # 8 of 256 experts: Q4 gate and up (4.25 bits), Q5 down (5.25 bits; three layers Q6).
    up, down = 40 * 2 * 512 * 2048 * 4.25 / 8, 512 * 2048 * (37 * 5.25 + 3 * 6.25) / 8
    assert floor.experts == pytest.approx(8 * (up + down), rel=1e-6)
    head = 248320 * 2048 * 6.25 / 8
    mixers = 8.5 / 8 * 2048 * (30 * (12288 + 4096) + 10 * (9216 + 4096) + 40 * 3 * 512)
    plain = 2 * 2048 * (40 * 257 + 30 * 64)  # router, a and b in bf16
    assert floor.weights == pytest.approx(head + mixers + plain, rel=2e-3)  # norms and convolutions beside it


def test_floor_of_a_round_reads_weights_once_and_the_draft_layer_for_every_draft() -> None:
    config, formats = QWEN36_27B, inventory(QWEN36_27B, vision=False)
    one, four = (step_floor(config, formats, context=1000, drafts=k) for k in (0, 3))
    assert four.weights - one.weights == pytest.approx(3 * 5120 * 6.25 / 8)  # three more embedding rows
    single = step_floor(config, formats, context=1000, drafts=1).drafts
    assert four.drafts == pytest.approx(3 * single)
    assert four.kv == one.kv and four.state == one.state


def test_distinct_experts_are_an_expectation() -> None:
    assert distinct_share(QWEN36_35B_A3B, 1) == pytest.approx(8 / 256)
    assert distinct_share(QWEN36_35B_A3B, 64) == pytest.approx(1 - (1 - 1 / 32) ** 64)
    assert distinct_share(QWEN36_27B, 5) == 0


def test_a_figure_is_mean_and_sample_deviation_with_its_share() -> None:
    rate = figure_of("m/decode/mtp0/64", [90.0, 100.0, 110.0], "tok/s", floor=200.0)
    assert (rate.value, rate.deviation, rate.runs, rate.share) == (100.0, 10.0, 3, 0.5)
    wait = Figure("m/step", 4.0, "ms", floor=1.0)
    assert wait.share == 0.25 and wait.deviation is None
    assert Figure("m/x", 4.0, "tok/s").share is None
    assert "floor" not in Figure("m/x", 4.0, "tok/s").as_dict()


def test_result_files_keep_what_is_not_measured_again(tmp_path: Path) -> None:
    first = [Figure("m/decode/mtp0/64", 1.0, "tok/s"), Figure("m/prefill/64", 2.0, "tok/s")]
    save(tmp_path, CARD, first, command="one", commit="aaa")
    path = save(tmp_path, CARD, [Figure("m/decode/mtp0/64", 3.0, "tok/s")], command="two", commit="bbb")
    found = read(path)
    assert path.name == "some-card-9.json" and found["device"]["name"] == "Some Card 9"
    assert {name: (e["value"], e["command"]) for name, e in found["figures"].items()} == {
        "m/decode/mtp0/64": (3.0, "two"),
        "m/prefill/64": (2.0, "one"),
    }
    assert found["figures"]["m/prefill/64"]["versions"]["torch"]
    assert list(read_all(tmp_path)) == ["some-card-9"]
    (tmp_path / "other.json").write_text('{"rows": []}')
    assert list(read_all(tmp_path)) == ["some-card-9"]
    (tmp_path / "some-card-9.json").write_text("[]")
    with pytest.raises(InvalidRequestError, match=r"some-card-9\.json is no result file"):
        save(tmp_path, CARD, first, command="three", commit=None)


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    figures = [
        Figure("m-random/decode/mtp0/64", 100.0, "tok/s", 1.5, 5, 400.0, {"context": 64, "weights": "random"}),
        Figure("m-random/decode/mtp0/2048", 80.0, "tok/s", 1.5, 5, 300.0, {"context": 2048, "weights": "random"}),
        Figure(
            "m-random/decode/mtp3-forced/64", 210.0, "tok/s", 2.0, 5, 900.0,
            {"context": 64, "weights": "random", "forced": "yes", "tokens_per_round": 3.19, "accepted_by_position": [1, 1, 0.19]},
        ),
        Figure("m-random/batch/1024/8", 500.0, "tok/s", None, 1, 2000.0, {"sequences": 8}),
    ]  # fmt: skip
    save(tmp_path, CARD, figures, command="ninfer bench", commit="abc")
    peers = {"m/decode/mtp0/64": {"value": 50.0, "unit": "tok/s", "details": {"peer": "other engine"}}}
    text = json.dumps({"device": {"name": "Some Card 9", "peers": "some-card-9"}, "figures": peers})
    (tmp_path / "peers-some-card-9.json").write_text(text)
    return tmp_path


def test_speed_table_sets_each_figure_beside_floor_and_peer(filled: Path) -> None:
    text = report.speed_tables(filled)
    assert "**Some Card 9** ([file](tests/bench/results/some-card-9.json))" in text
    assert "| m: decode at 64 tokens | 100 ± 1.5 | 400 | 25 % | 50 (other engine) |" in text
    assert "| m: decode at 64 tokens, 3 drafts (*forced* to 3.19 tokens a round) | 210 ± 2 | 900 | 23 % |  |" in text
    assert "| m: decode of 8 requests together, 1,024 tokens each | 500 | 2,000 | 25 % |  |" in text
    assert "random in the published formats" in text and "*Forced*" in text
    order = [text.index(part) for part in ("at 64 tokens |", "at 2,048 tokens", "forced* to", "8 requests")]
    assert order == sorted(order)


def place(name: str) -> str:
    return f"{report.BEGIN.format(name)}\nold\n{report.END.format(name)}"


def test_a_document_is_updated_in_its_marked_places_alone(filled: Path, tmp_path: Path) -> None:
    document = tmp_path / "README.md"
    document.write_text(f"# x\n\n{place('speeds')}\n\nmiddle\n\n{place('memory')}\n\nrest\n")
    assert report.update(document, filled) and not report.update(document, filled)
    text = document.read_text()
    assert text.startswith("# x\n") and text.endswith("\n\nrest\n") and "old" not in text
    speeds, memory = text.split("middle")
    assert "Some Card 9" in speeds and "| qwen3.6-27b |" in memory and "| qwen3.6-27b |" not in speeds
    document.write_text("nothing")
    with pytest.raises(InvalidRequestError, match="no place for tables"):
        report.update(document, filled)
    document.write_text(place("colours"))
    with pytest.raises(InvalidRequestError, match="no table 'colours'; there are speeds, memory, texts"):
        report.update(document, filled)


def test_table_of_kinds_of_text(filled: Path) -> None:
    about = {"limit": 4_096, "ended": 13, "tokens_per_round": 2.314, "accepted_by_position": [0.8, 0.5, 0.014]}
    figures = [Figure("m/workload/story", 120.0, "tok/s", 3.0, 15, None, about)]
    figures += [Figure("m/workload/code", 99.0, "tok/s", 1.0, 15, None, {"limit": 4_096, "ended": 0})]
    save(filled, CARD, figures, command="ninfer bench workloads", commit="abc")
    text = report.text_tables(filled)
    assert "| m: story | 120 ± 3 | 2.31 | 80 % / 50 % / 1 % | 4,096 | 13 of 15 |" in text
    assert "| m: code | 99 ± 1 |  |  | 4,096 | 0 of 15 |" in text and "decode" not in text


def test_plot_is_svg_with_a_line_and_a_floor_for_each_setting(filled: Path) -> None:
    svg = ElementTree.fromstring(report.plot(read(filled / "some-card-9.json")["figures"], "a < b"))
    lines = svg.findall("{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 4 and sum("stroke-dasharray" in line.attrib for line in lines) == 2
    told = [text.text for text in svg.findall("{http://www.w3.org/2000/svg}text")]
    assert "m, no drafts" in told and "m, 3 drafts, forced" in told
    for line in lines:
        assert all(0 <= float(n) <= 720 for n in re.split(r"[ ,]", line.attrib["points"]))
    with pytest.raises(InvalidRequestError, match="no decode figures"):
        report.plot({}, "x")


def test_every_kept_figure_names_its_command_and_versions() -> None:
    files = read_all(RESULTS)
    assert files, "there are no result files"
    for slug, found in files.items():
        for name, entry in found["figures"].items():
            assert entry["command"] and entry["versions"] and entry["unit"], f"{slug}: {name}"


@pytest.mark.parametrize("page", ["README.md", "docs/benchmarks.md"])
def test_the_tables_in_the_documents_are_those_of_the_result_files(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text == report.replaced(text, RESULTS), f"run `ninfer bench table --into {page}`"


def test_the_plots_are_those_of_the_result_files() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for slug, found in read_all(RESULTS).items():
        if "peers" not in found["device"] and any("/decode/" in name for name in found["figures"]):
            drawn = report.plot(found["figures"], found["device"]["name"])
            kept = (ROOT / f"docs/plots/{slug}.svg").read_text(encoding="utf-8")
            assert kept == drawn, "run `ninfer bench table --plots docs/plots`"
            assert f"](docs/plots/{slug}.svg)" in readme, f"README does not show the plot of {slug}"


def test_the_page_on_quality_is_that_of_its_results() -> None:
    from tests.tools.quality import page

    found = json.loads((RESULTS / "quality.json").read_text(encoding="utf-8"))
    assert (ROOT / "docs/quality.md").read_text(encoding="utf-8") == page(found), (
        "run `python -m tests.tools.quality --write docs/quality.md`"
    )
