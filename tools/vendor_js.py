"""Fetches the JavaScript libraries of the HTML report, and their licences, from npm's registry into the package.

    python tools/vendor_js.py [--check]

Versions and SHA-256 digests are fixed here; a file that differs is an error, and nothing is written. ``--check`` compares the files in the
package with the digests and fetches nothing. To take a new version, change it here, run with ``--print`` and write down its digests.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import sys
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

TARGET = Path(__file__).resolve().parent.parent / "fxshard/inspect/report/static/vendor"
REGISTRY = "https://registry.npmjs.org"


@dataclass(frozen=True)
class Library:
    """``files``: path in the package -> (name here, SHA-256)."""

    name: str
    version: str
    files: dict[str, tuple[str, str]]

    @property
    def address(self) -> str:
        return f"{REGISTRY}/{self.name}/-/{self.name.rpartition('/')[2]}-{self.version}.tgz"


LIBRARIES = (
    Library(
        "@dagrejs/dagre",
        "3.1.3",
        {
            "dist/dagre.min.js": ("dagre.min.js", "54a503e346f93ca0bb10abe7999587e037262935687aca45eb4e4b0f64bbb578"),
            "LICENSE": ("dagre.LICENSE", "6a349742a6cb219d5a2fc8d0844f6d89a6efc62e20c664450d884fc7ff2d6015"),
        },
    ),
    Library(
        "uplot",
        "1.6.32",
        {
            "dist/uPlot.iife.min.js": ("uPlot.iife.min.js", "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"),
            "dist/uPlot.min.css": ("uPlot.min.css", "df630c6a8d6f8eeaff264b50f73ce5b114f646ffd9a0bb74f049b0a00135fa04"),
            "LICENSE": ("uPlot.LICENSE", "8f989229699b4fe2f1a0432d0e9edc338a8a911e250e2d1b01ecd770a5f5b1bd"),
        },
    ),
    Library(
        "tabulator-tables",
        "6.5.3",
        {
            "dist/js/tabulator.min.js": ("tabulator.min.js", "ffac518cb793c672a2f0522b7fc80bf862234d96bb1e581c8aaf7f48f130eafa"),
            "dist/css/tabulator_simple.min.css": (
                "tabulator_simple.min.css",
                "edef8839235a4b6a8c3dc391ec93f2ce1bc633dd5270a5f990753b6f9183d32b",
            ),
            "LICENSE": ("tabulator.LICENSE", "191a2ee554684e1064c897b432f0e1bc6dfa714ca045d3f6ea2cf692cbd398b7"),
        },
    ),
)


def fetched(library: Library) -> dict[str, bytes]:
    """The library's files, by their names here."""
    with urllib.request.urlopen(library.address) as answer:
        packed = io.BytesIO(answer.read())
    found = {}
    with tarfile.open(fileobj=packed) as archive:
        for path, (name, _) in library.files.items():
            member = archive.extractfile(f"package/{path}")
            assert member is not None
            found[name] = member.read()
    return found


def wrong(library: Library, contents: dict[str, bytes]) -> list[str]:
    """The names of files whose digests differ."""
    digests = dict(library.files.values())
    return [name for name, digest in digests.items() if hashlib.sha256(contents.get(name, b"")).hexdigest() != digest]


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches the JavaScript libraries of the HTML report.")
    parser.add_argument("--check", action="store_true", help="compare what is in the package, fetch nothing")
    parser.add_argument("--print", action="store_true", help="print the digests of what npm has, write nothing")
    options = parser.parse_args()
    for library in LIBRARIES:
        names = [name for name, _ in library.files.values()]
        local = {name: (TARGET / name).read_bytes() for name in names if (TARGET / name).exists()}
        contents = local if options.check else fetched(library)
        if options.print:
            print("\n".join(f"{hashlib.sha256(data).hexdigest()}  {name}" for name, data in contents.items()))
            continue
        if found := wrong(library, contents):
            print(f"{library.name} {library.version}: {', '.join(found)} differ from the digests in {__file__}", file=sys.stderr)
            return 1
        if not options.check:
            for name, data in contents.items():
                (TARGET / name).write_bytes(data)
    return 0


if __name__ == "__main__":
    sys.exit(main())
