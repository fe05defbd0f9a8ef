"""A file that is written through a temporary one has the permissions of any new file, whoever wrote the temporary one."""

from __future__ import annotations

import stat
from pathlib import Path

import torch
from safetensors.torch import save_file

from fxshard.files import atomic_file


def test_permissions_are_those_of_a_new_file(tmp_path: Path) -> None:
    (tmp_path / "new").write_text("")
    with atomic_file(tmp_path / "weights") as temporary:
        save_file({"w": torch.zeros(2)}, temporary)
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == stat.S_IMODE((tmp_path / "new").stat().st_mode)
