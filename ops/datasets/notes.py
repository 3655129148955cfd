"""What a look through the data found, kept in the run's folder and told when the run starts and when it ends."""

from collections.abc import Sequence
from pathlib import Path

from ops.datasets.bad_rows import SHOWN, RowReport

FILE = "data.txt"


def write_notes(folder: Path, reports: Sequence[RowReport]) -> None:
    """Write what was found in each file, the first bad rows with their places."""
    lines = []
    for report in reports:
        lines.append(f"data: {report.in_words()}")
        lines += [f"  {sentence}" for sentence in report.bad]
        if report.bad_rows > SHOWN:
            lines.append(f"  and {report.bad_rows - SHOWN:,} more; `rollstream data` looks at them")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


def read_notes(folder: Path) -> str:
    """What `write_notes` wrote; empty if there is nothing."""
    try:
        return (folder / FILE).read_text(encoding="utf-8").rstrip("\n")
    except OSError:
        return ""
