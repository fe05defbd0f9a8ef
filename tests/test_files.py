"""Output paths are checked before the work; errors have a reason and a remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from fxshard.errors import FileError
from fxshard.files import check_writable, make_folder


def test_checking_a_writable_path_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("old")
    check_writable(tmp_path / "old")
    check_writable(str(tmp_path / "new"))
    assert [(f.name, f.read_text()) for f in tmp_path.iterdir()] == [("old", "old")]


def test_a_path_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "none" / "file", "No such file"), ("nul\0", "null")):
        with pytest.raises(FileError, match=f"cannot write the file: .*{reason}") as error:
            check_writable(path)
        assert error.value.where == str(path) and "a folder that exists" in str(error.value.remedy)


def test_folders_are_made_or_refused(tmp_path: Path) -> None:
    assert make_folder(str(tmp_path / "a" / "b")) == make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir() and not list((tmp_path / "a" / "b").iterdir())
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(FileError, match="cannot make the folder") as error:
            make_folder(path)
        assert error.value.where == str(path) and error.value.remedy
