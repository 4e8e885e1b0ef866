"""A benchmark's figures as JSON, beside the protocol, the command, the machine and the versions that gave them."""

import json
import re
from pathlib import Path
from typing import Any

from modegpt.checkpoint import write_json
from modegpt.report import protocol

RESULTS = Path(__file__).parent / "results"


def save(path: Path, figures: dict[str, Any]) -> None:
    """Write figures that this call alone measured, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json({**stamp(), **figures}, path)
    print(f"wrote {path}", flush=True)


def stamp() -> dict[str, Any]:
    """Return command, versions and machine; where it keeps things is told as CACHE, OUT or MADE."""
    about = protocol()
    command = "python " + re.sub(r"(--converter[ =])\S*/", r"\1llama.cpp/", about["command"])
    kept = r"(--(cache|out|made)[ =])('[^']*'|\S+)"
    about["command"] = re.sub(kept, lambda found: found[1] + found[2].upper(), command)
    return about


class Results:
    """The rows of one protocol in a file, written as each is measured, so that a call that is stopped loses none.

    `command`, `versions` and `machine` in the file are those of the call that wrote last. Where rows of earlier calls
    stand beside its own, the list `earlier` has the same of those. What else is in the file, such as a `note`, stays.
    """

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        """Read what earlier calls left.

        Raises:
            SystemExit: the file is of another protocol or model.
        """
        self.path, self.rows = path, []
        self._about, self._beside, self._earlier = about, {}, []
        if not path.is_file():
            return
        found = json.loads(path.read_text(encoding="utf-8"))
        if any(key not in found or found[key] != value for key, value in about.items()) or "rows" not in found:
            raise SystemExit(f"{path} was measured under another protocol; move it away, or give another --json")
        self.rows = found.pop("rows")
        self._earlier = found.pop("earlier", [])
        self._earlier.append({key: found.pop(key) for key in ("command", "versions", "machine")})
        self._beside = {key: value for key, value in found.items() if key not in about}
        print(f"{path} has {len(self.rows)} rows, which stay; with another --json they are measured anew", flush=True)

    def has(self, known: dict[str, Any]) -> bool:
        """Return whether a row with these entries was measured."""
        return any(known.items() <= row.items() for row in self.rows)

    def add(self, row: dict[str, Any], *silent: str) -> None:
        """Add a row, tell it but for its `silent` entries, and write the file."""
        print({key: value for key, value in row.items() if key not in silent}, flush=True)
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Write all rows."""
        earlier = [call for call in self._earlier if call != stamp()]
        told = {"earlier": earlier} if earlier else {}
        save(self.path, {**told, **self._about, **self._beside, "rows": self.rows})
