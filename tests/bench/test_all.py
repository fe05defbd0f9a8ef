"""``make bench``: what counts as a slowdown, whose turn it is, the page, and a quick run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.all import __main__ as everything
from bench.all import page, steps
from bench.all.figures import Cell, Figure, Kept, interval, oldest_first, read, slower, write

KEPT = Figure("steps", "llama", steps.OVER, 0.90, 0.88, 0.92, noise=0.05, when="2026-01-01", machine="m")


@pytest.mark.parametrize(("value", "low", "counts"), [(1.00, 0.97, True), (1.00, 0.91, False), (0.93, 0.925, False), (0.80, 0.79, False)])
def test_a_slowdown_lies_above_the_kept_interval_and_is_larger_than_noise(value: float, low: float, counts: bool) -> None:
    new = replace(KEPT, value=value, low=low, high=value + 0.01)
    assert bool(slower(new, KEPT)) == counts
    assert not slower(replace(new, machine="another"), KEPT)
    assert not slower(replace(new, noise=None), KEPT)
    assert not slower(new, None)


def test_the_interval_holds_the_median_of_nineteen_of_twenty_samples() -> None:
    """Order statistics of n values, from the published table of the sign test: ranks 2 and 9 of 10, 4 and 12 of 15, 6 and 15 of 20."""
    for n, low, high in ((5, 1, 5), (6, 1, 6), (10, 2, 9), (15, 4, 12), (20, 6, 15)):
        assert interval([float(v) for v in range(n, 0, -1)]) == ((n + 1) / 2, low, high)


def test_cells_take_turns(tmp_path: Path) -> None:
    cells = [Cell("steps", name, lambda: ()) for name in ("old", "new", "never")]
    figures = [replace(KEPT, cell="old", when="2026-01-01"), replace(KEPT, cell="new", when="2026-02-01")]
    kept = {one.key: one for one in figures}
    write(tmp_path / "kept.json", kept)
    assert read(tmp_path / "kept.json") == kept
    assert [cell.name for cell in oldest_first(cells, kept)] == ["never", "old", "new"]


def test_a_slower_figure_fails_and_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    slow = replace(KEPT, value=1.0, low=0.97, high=1.1)
    monkeypatch.setattr(everything, "_cells", lambda part, chosen: [Cell(part, "llama", lambda: [slow])])
    monkeypatch.setattr(everything, "machine", lambda: "m")
    results, text = tmp_path / "results.json", tmp_path / "page.md"
    write(results, {KEPT.key: KEPT})
    text.write_text(everything.PAGE.read_text())
    asked = ["--parts", "steps", "--results", str(results), "--page", str(text)]
    assert everything.main(asked) == 1
    assert "is 1, on 2026-01-01 it was 0.9" in capsys.readouterr().out
    assert read(results)[KEPT.key] == KEPT
    everything.main([*asked, "--accept"])
    assert read(results)[KEPT.key].value == 1.0
    assert everything.main(asked) == 0


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, Kept]]:
    """Runs the bench on one cell with the given figures, after a run that kept ``KEPT``: the exit code, and what is kept."""
    monkeypatch.setattr(everything, "machine", lambda: "m")
    results, text = tmp_path / "results.json", tmp_path / "page.md"
    write(results, {KEPT.key: KEPT})
    text.write_text(everything.PAGE.read_text())

    def run(*figures: Figure, options: tuple[str, ...] = ()) -> tuple[int, Kept]:
        monkeypatch.setattr(everything, "_cells", lambda part, chosen: [Cell(part, "llama", lambda: figures)])
        code = everything.main(["--parts", "steps", "--results", str(results), "--page", str(text), *options])
        return code, read(results)

    return run


def test_many_small_slowdowns_fail_once_they_add_up_to_more_than_noise(asked: Callable[..., tuple[int, Kept]]) -> None:
    values = [0.90 * 1.04**n for n in range(1, 6)]
    runs = [asked(replace(KEPT, value=v, low=v - 0.001, high=v + 0.001)) for v in values]
    assert [code for code, _ in runs] == [0, 1, 1, 1, 1]
    assert runs[-1][1][KEPT.key].value == pytest.approx(values[0])
    faster, later = replace(KEPT, value=0.70, low=0.69, high=0.71), replace(KEPT, value=0.80, low=0.79, high=0.81)
    assert [asked(one)[0] for one in (faster, later)] == [0, 1]


def test_an_own_choice_that_breaks_fails_and_its_cell_is_kept_as_it_was(
    asked: Callable[..., tuple[int, Kept]], capsys: pytest.CaptureFixture[str]
) -> None:
    sound = {"ms": [10.0] * 5, "error": "", "predicted": 9.0}
    ways = {steps.AUTO: {**sound, "ms": [9.0] * 5}, "DDP, eager": sound}
    code, kept = asked(*steps.figures("llama", 256, ways))
    assert code == 0 and kept[KEPT.key].value == 0.9
    broken = steps.figures("llama", 256, {**ways, steps.AUTO: {"ms": [], "error": "the losses differ by 0.3"}})
    figures = list(broken)
    assert asked(*figures) == (1, kept)
    said = capsys.readouterr().out
    assert f"{steps.AUTO} gives no value (the losses differ by 0.3)" in said and f"{steps.OVER} gives no value (not measured" in said
    code, accepted = asked(*figures, options=("--accept",))
    assert code == 1 and KEPT.key not in accepted
    assert asked(*figures)[0] == 1  # also where there is nothing to compare with


def test_a_rank_that_fails_does_not_end_the_run() -> None:
    def failing() -> Iterator[Figure]:
        raise SystemExit("a rank failed; its message is above")

    said = everything._measure(Cell("steps", "llama", failing), {}, False)
    assert said == ["steps, llama: SystemExit: a rank failed; its message is above"]


def test_one_clock_runs_for_all_parts_and_each_has_a_turn_before_its_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells of 4 minutes and 36 minutes: the short parts overrun, and the longest has the rest; nothing begins after 36."""
    now, begun = [0.0], list[tuple[float, str]]()

    def cell(part: str, number: int) -> Cell:
        def run() -> Iterator[Figure]:
            begun.append((now[0] / 60, part))
            now[0] += 4 * 60
            yield Figure(part, str(number), "one", 1.0)

        return Cell(part, str(number), run)

    monkeypatch.setattr(everything.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(everything, "_cells", lambda part, chosen: [cell(part, n) for n in range(20)])
    monkeypatch.setattr(page, "update", lambda *given: None)
    assert everything.main(["--results", str(tmp_path / "results.json"), "--minutes", "36"]) == 0
    assert {part for _, part in begun} == set(everything.SHARES)
    assert [minute for minute, _ in begun] == [4.0 * n for n in range(10)]
    assert "steps: 15 cells are left" in capsys.readouterr().out


def test_a_calibration_happens_when_a_cell_needs_it_and_is_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = list[object]()
    monkeypatch.setattr(steps, "measured", lambda job: jobs.append(job["hardware"]) or {steps.AUTO: {"ms": [], "error": "stopped"}})
    wanted = list(steps.cells(None, lambda ranks: jobs.append(f"calibrated for {ranks}") or f"{ranks}.json"))
    assert jobs == [] and wanted[0].name == "llama, 128/64, 2 ranks, calibrated"
    assert [one.cell for one in wanted[0].run()] == [wanted[0].name]
    assert jobs == ["calibrated for 2", "2.json"]
    assert next(iter(steps.cells("cpu", str))).name == "llama, 128/64, 2 ranks, cpu"


def test_a_quick_run_leaves_the_repositorys_figures_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, text = everything.RESULTS.read_bytes(), everything.PAGE.read_bytes()
    monkeypatch.setattr(everything, "_cells", lambda part, chosen: [Cell(part, "toy", lambda: [replace(KEPT, cell="toy")])])
    assert everything.main(["--quick", "--parts", "steps"]) == 0
    assert (everything.RESULTS.read_bytes(), everything.PAGE.read_bytes()) == (kept, text)


def test_the_page_is_made_from_the_kept_figures() -> None:
    text = everything.PAGE.read_text()
    assert page.rendered(text, read(everything.RESULTS)) == text
    with pytest.raises(ValueError, match="0 places for steps"):
        page.rendered("", {})


@pytest.mark.distributed
def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results, text = tmp_path / "results.json", tmp_path / "page.md"
    text.write_text(everything.PAGE.read_text())
    assert everything.main(["--quick", "--parts", "steps", "--results", str(results), "--page", str(text)]) == 0
    found = {one.name: one for one in read(results).values()}
    assert found[steps.OVER].note == "DDP, eager"
    assert all(one.value and one.value > 0 and one.low and one.low <= one.value <= (one.high or 0) for one in found.values())
    assert "llama, 32/16, 2 ranks, cpu" in capsys.readouterr().out
    assert "llama, 32/16, 2 ranks, cpu" in text.read_text()
    assert page.rendered(text.read_text(), read(results)) == text.read_text(), "as a later run makes the page"
