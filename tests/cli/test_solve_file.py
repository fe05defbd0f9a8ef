"""``fxshard solve``: what it prints and writes, and its errors on files that are not problems."""

from __future__ import annotations

import ast
import gzip
import json
from pathlib import Path

import pytest

from fxshard.cli import main as cli
from fxshard.solver import PlacementProblem
from tests.solver.problems import grid

EXAMPLE = str(Path(__file__).parents[1] / "solver" / "example.json")


def printed(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize("limit", [[], ["--time-limit", "20"]])
def test_a_problem_is_solved(limit: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``tests/solver/problem/test_data.py`` finds the optimum of this file by enumeration."""
    output = tmp_path / "solution.json"
    assert cli.main(["solve", EXAMPLE, *limit, "-o", str(output)]) == 0
    lines = printed(capsys)
    assert (lines["cost"], lines["bound"], lines["gap"]) == ("30", "30", "0 %, proven optimal")
    assert ast.literal_eval(lines["choices"]) == [1, 1, 1, 1, 1]
    assert lines["memory"].endswith("of 24") and float(lines["seconds"]) >= 0 and lines["wrote"] == str(output)
    fields = {"choices": [1, 1, 1, 1, 1], "cost": 30.0, "lower_bound": 30.0, "gap": 0.0, "proven": True, "cut": False}
    assert json.loads(output.read_text()) == fields


def test_gzipped_and_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "grid.json.gz"
    problem = grid(16, 16, 12, 1)
    problem.write(path)
    assert cli.main(["solve", str(path), "--time-limit", "1e-9"]) == 0
    lines = printed(capsys)
    assert lines["gap"].endswith("%, cut by a limit") and float(lines["bound"]) < float(lines["cost"])
    assert problem.evaluate(ast.literal_eval(lines["choices"])) == pytest.approx(float(lines["cost"]))


def text(**changes: object) -> bytes:
    """A file of two nodes and an edge, with some of its fields changed."""
    nodes = {"intervals": [[], []], "costs": [[1], [2, 3]], "usages": [[], []]}
    problem = {"nodes": nodes, "edges": {"nodes": [[0, 1]], "costs": [[4, 5]]}, **changes}
    return json.dumps({"problem": problem}).encode()


FOREIGN = [
    (b"", "the file is not JSON"),
    (b"choices: 1", "the file is not JSON"),
    (b"\xff\xfe\x00", "the file is not JSON"),
    (b"[" * 100_000, "the file is not JSON"),
    (b"[1, 2]", "the file is not a placement problem"),
    (b'{"format": "fxshard-plan"}', "it has no field 'problem'"),
    (text(edges={"nodes": []}), "it has no field 'costs'"),
    (text(edges={"nodes": [[0, 7]], "costs": [[4, 5]]}), "the file is not a placement problem"),
    (text(edges={"nodes": [[0, 1]], "costs": [[4, 5, 6]]}), "the file is not a placement problem"),
    (text(usage_limit="much"), "the file is not a placement problem"),
    (gzip.compress(text(), mtime=0)[:40], "the gzipped file is damaged or cut short"),
    (gzip.compress(text(), mtime=0)[:-9] + b"123456789", "the gzipped file is damaged or cut short"),
    (gzip.compress(bytes(2**26), mtime=0), "absurdly large: unpacked, more than 16777216 bytes"),
]


@pytest.mark.parametrize(("content", "what"), FOREIGN, ids=range(len(FOREIGN)))
def test_other_files_are_refused(content: bytes, what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    assert cli.main(["solve", str(path)]) == 2
    error = capsys.readouterr().err
    assert what in error and f"where: {path}" in error and "to do:" in error


def test_mistakes_of_the_user_are_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["solve", str(tmp_path / "none.json")]) == 2
    assert cli.main(["solve", EXAMPLE, "--time-limit", "-1"]) == 2
    assert cli.main(["solve", EXAMPLE, "-o", str(tmp_path / "none" / "solution.json")]) == 2
    problem = PlacementProblem.read(EXAMPLE)
    PlacementProblem(problem.node_costs, problem.edges, problem.edge_costs, problem.usages, problem.intervals, 1.0).write(
        tmp_path / "tight.json"
    )
    assert cli.main(["solve", str(tmp_path / "tight.json")]) == 2
    error = capsys.readouterr().err
    for part in ("cannot read the file", "cannot read --time-limit -1.0", "cannot write the file", "raise usage_limit"):
        assert part in error
    assert "Traceback" not in error
