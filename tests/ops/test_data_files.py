"""Files of data may be larger than memory, packed, cut, or changed while they are read: rows come by number still."""

import datetime
import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ops.datasets import DataConfig, FileRows, load_dataset
from ops.datasets.files import JsonLines
from schemas import UserError

ROWS = [{"prompt": f"{i}+1=", "answer": str(i + 1)} for i in range(150)]
TEXT = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def rows_in(base: Path, train: str, **config: Any) -> list[dict[str, Any]]:
    data = load_dataset(DataConfig(train=train, shuffle=False, **config), base)
    assert isinstance(data, FileRows)
    return [data.row(k) for k in range(len(data))]


def write_arrow(path: Path, rows: list[dict[str, Any]], kind: str = "stream") -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.Table.from_pylist(rows)
    opened = pyarrow.ipc.new_stream if kind == "stream" else pyarrow.ipc.new_file
    with opened(str(path), table.schema) as sink:
        for batch in table.to_batches(max_chunksize=7):
            sink.write_batch(batch)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=40)


WRITERS: dict[str, Callable[[Path], Any]] = {
    "data.jsonl": lambda path: path.write_bytes(TEXT),
    "data.jsonl.gz": lambda path: path.write_bytes(gzip.compress(TEXT[:500]) + gzip.compress(TEXT[500:])),
    "data.jsonl.zst": lambda path: path.write_bytes(zstandard.compress(TEXT[:500]) + zstandard.compress(TEXT[500:])),
    "data.parquet": lambda path: write_parquet(path, ROWS),
    "data.arrow": lambda path: write_arrow(path, ROWS),
    "feather.arrow": lambda path: write_arrow(path, ROWS, "file"),
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_rows(name: str, tmp_path: Path) -> None:
    """Packed files of several parts, as parallel packers write them, too; so do row groups and batches."""
    WRITERS[name](tmp_path / name)
    assert rows_in(tmp_path, name) == ROWS


@pytest.mark.parametrize("name", ["data.jsonl.gz", "data.jsonl.zst", "data.parquet", "data.arrow"])
def test_a_cut_file_is_named(name: str, tmp_path: Path) -> None:
    """A download that stopped half way."""
    WRITERS[name](tmp_path / name)
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=rf"{name} cannot be read"):
        rows_in(tmp_path, name)


def write_hub(folder: Path) -> None:
    (folder / "data").mkdir(parents=True)
    for number in range(3):
        write_parquet(folder / f"data/train-{number:05d}-of-00003.parquet", ROWS[number * 50 : number * 50 + 50])
    write_parquet(folder / "data/test-00000-of-00001.parquet", ROWS[:5])


def write_saved(folder: Path) -> None:
    for split, rows in (("train", ROWS), ("validation", ROWS[:5])):
        (folder / split).mkdir(parents=True)
        files = [f"data-0000{number}-of-00002.arrow" for number in range(2)]
        for file, part in zip(files, (rows[:3], rows[3:]), strict=True):
            write_arrow(folder / split / file, part)
        state = {"_data_files": [{"filename": file} for file in files], "_split": split, "_fingerprint": "f"}
        (folder / split / "state.json").write_text(json.dumps(state))
        (folder / split / "dataset_info.json").write_text("{}")
    (folder / "dataset_dict.json").write_text('{"splits": ["train", "validation"]}')


def write_lines(folder: Path) -> None:
    folder.mkdir()
    for number in (1, 2, 10):
        start = {1: 0, 2: 50, 10: 100}[number]
        part = "".join(json.dumps(row) + "\n" for row in ROWS[start : start + 50])
        (folder / f"train{number}.jsonl").write_text(part)
    (folder / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS[:5]))


@pytest.mark.parametrize("write", [write_hub, write_saved, write_lines])
def test_a_folder_is_read_split_by_split_and_shard_by_shard(write: Callable[[Path], None], tmp_path: Path) -> None:
    """As the hub keeps it, as save_to_disk writes it, or lines of JSON; evaluation finds a split of its own."""
    write(tmp_path / "folder")
    assert rows_in(tmp_path, "folder") == ROWS
    held_out = load_dataset(DataConfig(train="folder", eval="folder"), tmp_path, held_out=True)
    assert isinstance(held_out, FileRows)
    assert [held_out.row(k) for k in range(len(held_out))] == ROWS[:5]
    with pytest.raises(UserError, match="has no split dev, only t") as told:
        rows_in(tmp_path, "folder#dev")
    assert "folder#" in str(told.value.remedy)


def test_a_saved_split_alone_and_another_split_by_name(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved")
    assert rows_in(tmp_path, "saved/train") == ROWS
    assert rows_in(tmp_path, "saved#validation") == ROWS[:5]


def test_a_folder_without_data_says_where_there_is_some(tmp_path: Path) -> None:
    """Data sets with several configurations keep each in a folder."""
    write_parquet_in = tmp_path / "gsm8k" / "main"
    write_parquet_in.mkdir(parents=True)
    write_parquet(write_parquet_in / "train-00000-of-00001.parquet", ROWS)
    with pytest.raises(UserError, match="holds no data files") as told:
        rows_in(tmp_path, "gsm8k")
    assert told.value.remedy == "Name one of the folders in it: main."
    assert rows_in(tmp_path, "gsm8k/main") == ROWS


def test_what_saved_folders_name_must_be_there(tmp_path: Path) -> None:
    write_saved(tmp_path / "saved")
    (tmp_path / "saved/train/data-00001-of-00002.arrow").unlink()
    with pytest.raises(UserError, match=r"state\.json names data-00001-of-00002\.arrow, which is not there"):
        rows_in(tmp_path, "saved")


# ---- lines by number, against the whole file read at once

LINE = st.one_of(
    st.builds(lambda text: json.dumps({"prompt": text}, ensure_ascii=False), st.text(min_size=1, max_size=6)),
    st.sampled_from(["", "  ", "\t", "{", "[1]", "null", '{"prompt": NaN}', '{"prompt"', "\x00", "é"]),
)


def refused(name: str) -> None:
    raise ValueError(name)


def naive(data: bytes) -> list[tuple[int, Any]]:
    """(line, value) of all lines that are not blank; None for those that are no JSON."""
    out = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not text.strip(b" \t\r"):
            continue
        try:
            out.append((number, json.loads(text.decode(), parse_constant=refused)))
        except ValueError:
            out.append((number, None))
    return out


@settings(max_examples=150)
@example([], "\n", False, False, b"\xef", 0)  # the beginning of a byte order mark is none
@example([], "\n", True, True, b"", 0)
@given(
    st.lists(LINE, max_size=8),
    st.sampled_from(["\n", "\r\n"]),
    st.booleans(),
    st.booleans(),
    st.binary(max_size=3),
    st.integers(0, 40),
)
def test_lines_by_number_are_those_of_a_naive_reader(
    tmp_path_factory: pytest.TempPathFactory,
    lines: list[str],
    end: str,
    bom: bool,
    ended: bool,
    junk: bytes,
    at: int,
) -> None:
    """Byte order marks, Windows line ends, blank lines, bytes that are no UTF-8, a last line without an end."""
    data = end.join(lines).encode("utf-8", "surrogatepass") + (end.encode() if ended else b"")
    data = (b"\xef\xbb\xbf" if bom else b"") + data[:at] + junk + data[at:]
    path = tmp_path_factory.getbasetemp() / "lines.jsonl"
    path.write_bytes(data)
    source = JsonLines(path)
    found = []
    for number in reversed(range(len(source))):
        line = int(source.where(number).rpartition(" ")[2])
        try:
            found.append((line, source.read(number)))
        except UserError:
            found.append((line, None))
    assert found[::-1] == naive(data)


def test_a_file_that_is_written_to_while_it_is_read_is_told(tmp_path: Path) -> None:
    """Its lines have moved: what was row 7 for the controller would be another row when it restarts."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(TEXT)
    data = load_dataset(DataConfig(train="data.jsonl"), tmp_path)
    with path.open("ab") as file:
        file.write(b'{"prompt": "more"}\n')
    with pytest.raises(UserError, match="has been written to since it was opened") as told:
        data.row(0)
    assert "Put a new file in its place" in str(told.value.remedy)


def test_a_file_in_its_place_changes_nothing(tmp_path: Path) -> None:
    """Whoever follows that advice must be safe."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(TEXT)
    data = load_dataset(DataConfig(train="data.jsonl", shuffle=False), tmp_path)
    (tmp_path / "new").write_bytes(b'{"prompt": "new"}\n')
    os.replace(tmp_path / "new", path)
    assert [data.row(k) for k in range(150)] == ROWS


def test_a_large_file_is_not_held_in_memory(tmp_path: Path) -> None:
    """100 MB of rows, as code problems have them: what is held are their places."""
    path = tmp_path / "large.jsonl"
    with path.open("w") as file:
        for number in range(100):
            file.write(json.dumps({"prompt": f"{number}", "notes": "x" * 1_000_000}) + "\n")
    tracemalloc.start()
    try:
        data = load_dataset(DataConfig(train="large.jsonl"), tmp_path)
        assert {data.row(k)["prompt"] for k in range(100)} == {str(k) for k in range(100)}
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 2_000_000
    assert peak < 20_000_000


def test_descriptors_are_given_back(tmp_path: Path) -> None:
    """An evaluator opens the data again and again."""
    write_parquet(tmp_path / "data.parquet", ROWS)
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(TEXT))
    code = (
        "import gc, os, sys; from pathlib import Path; from ops.datasets import DataConfig, load_dataset\n"
        "def used(): gc.collect(); return len(os.listdir('/proc/self/fd'))\n"
        "def once():\n"
        "    for name in ('data.parquet', 'data.jsonl.gz'):\n"
        "        load_dataset(DataConfig(train=name), Path(sys.argv[1])).row(3)\n"
        "once(); before = used()\n"
        "for _ in range(5): once()\n"
        "assert used() == before, (used(), before)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_packed_file_that_fits_nowhere_says_where_to_put_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/tmp is often small, and in memory."""
    (tmp_path / "data.jsonl.gz").write_bytes(gzip.compress(TEXT))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(UserError, match=r"data\.jsonl\.gz does not fit, unpacked") as told:
        rows_in(tmp_path, "data.jsonl.gz")
    assert "TMPDIR" in str(told.value.remedy)


def test_dates_and_decimal_numbers_become_text_however_deep(tmp_path: Path) -> None:
    """A column that nobody reads, of dates within a map, made every row a bad one."""
    day, price = datetime.date(2020, 1, 2), Decimal("1.50")
    write_parquet(tmp_path / "data.parquet", [{"prompt": "a", "day": day, "seen": [{"day": day, "price": price}]}])
    row = rows_in(tmp_path, "data.parquet")[0]
    assert row == {"prompt": "a", "day": "2020-01-02", "seen": [{"day": "2020-01-02", "price": "1.50"}]}
