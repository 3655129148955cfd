"""What ends a process: faults that the user can mend are told as such, all others start it again."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from ops.host import ProcessSpec, as_user_error
from schemas import UserError


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def raised_in_handling() -> Exception:
    """As torch.save does it: its archive writer fails anew while it closes."""
    try:
        try:
            raise full_disk()
        finally:
            raise RuntimeError("unexpected pos 1061376 vs 1061268")
    except RuntimeError as error:
        return error


@pytest.mark.parametrize("error", [full_disk(), raised_in_handling()], ids=["plain", "behind another error"])
def test_a_full_disk_is_told_with_its_remedy(error: Exception, tmp_path: Path) -> None:
    """Starting the process again would fill it again; the user must make room."""
    told = as_user_error(error, tmp_path)
    assert told is not None
    assert f"The disk of {tmp_path} is full" in told.message
    assert "--resume" in told.remedy


def test_a_fault_of_the_program_is_not_the_users(tmp_path: Path) -> None:
    """It is logged with its traceback, and the process is started again."""
    assert as_user_error(RuntimeError("unexpected pos"), tmp_path) is None


def spec(folder: Path) -> ProcessSpec:
    return ProcessSpec((("trainer", "trainer"),), "run", "", folder, "")


def test_an_error_reaches_whoever_started_the_process(tmp_path: Path) -> None:
    """The two share nothing but the run's folder."""
    spec(tmp_path).leave(UserError("It is broken.", "Mend it."))
    told = spec(tmp_path).left_error()
    assert (told.message, told.remedy) == ("It is broken.", "Mend it.")


@pytest.mark.parametrize("left", [None, "", '{"message": "It is'], ids=["nothing", "an empty file", "half of it"])
def test_an_error_that_the_disk_did_not_take_is_still_one(tmp_path: Path, left: str | None) -> None:
    """What a full disk leaves must not end the supervisor with a traceback, nor start the process again."""
    if left is not None:
        spec(tmp_path).error_file.parent.mkdir()
        spec(tmp_path).error_file.write_text(left)
    assert "the disk may be full" in spec(tmp_path).left_error().message


def test_leaving_an_error_where_nothing_can_be_written_does_not_fail(tmp_path: Path) -> None:
    """Failing there would turn the exit status into that of a crash, which is tried again."""
    (tmp_path / "logs").write_text("a file where the folder should be")
    spec(tmp_path).leave(UserError("It is broken.", "Mend it."))
