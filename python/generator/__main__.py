"""Writes the generated files, or with --check says which of them are not what the header asks for."""

from __future__ import annotations

import sys
from pathlib import Path

from generator.emit import FOLDER, files
from generator.header import read


def main() -> int:
    """Returns 1 where --check finds a difference."""
    made = files(read())
    if "--check" in sys.argv[1:]:
        stale = [name for name, text in made.items() if _current(FOLDER / name) != text]
        for name in stale:
            print(f"{FOLDER / name} is not what folio.h asks for; run `python -m generator` in python/")
        return 1 if stale else 0
    for name, text in made.items():
        (FOLDER / name).write_text(text)
    return 0


def _current(path: Path) -> str:
    return path.read_text() if path.exists() else ""


sys.exit(main())
