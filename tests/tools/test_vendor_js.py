"""tools/vendor_js.py: the libraries in the package are those whose digests it has; a changed file is noticed."""

from __future__ import annotations

import pytest
import vendor_js


def test_the_libraries_are_those_of_npm(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["vendor_js.py", "--check"])
    assert vendor_js.main() == 0 and not capsys.readouterr().err


def test_a_changed_library_is_noticed() -> None:
    library = vendor_js.LIBRARIES[0]
    contents = {name: (vendor_js.TARGET / name).read_bytes() for name, _ in library.files.values()}
    assert vendor_js.wrong(library, contents) == []
    assert vendor_js.wrong(library, contents | {"dagre.min.js": b""}) == ["dagre.min.js"]


def test_nothing_else_lies_beside_them() -> None:
    known = {name for library in vendor_js.LIBRARIES for name, _ in library.files.values()}
    assert {path.name for path in vendor_js.TARGET.iterdir()} == known
