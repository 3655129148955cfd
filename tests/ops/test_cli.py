"""The command line as a person meets it: through the process, or through typer where that is enough."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import cli

ROOT = Path(__file__).parents[2]


def rollstream(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, from any folder."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "NO_COLOR": "1"}
    return subprocess.run(
        [sys.executable, "-m", "cli", *arguments],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_help_answers_at_once_and_imports_nothing_heavy() -> None:
    """People ask for help often; torch alone takes seconds. The time is generous: machines in tests are busy."""
    code = (
        "import sys, cli\n"
        "try: cli.app(['--help'])\n"
        "except SystemExit as end: assert end.code in (0, None)\n"
        "heavy = {'torch', 'transformers', 'nats', 'numpy', 'pydantic', 'matplotlib', 'asyncio'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    began = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "running_total.yaml" in done.stdout
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert ended.ru_utime + ended.ru_stime - began.ru_utime - began.ru_stime < 2.0, "CPU seconds"


COMMANDS = (
    "run",
    "up",
    "status",
    "record",
    "audit",
    "replay trainer",
    "replay reward",
    "replay bus",
    "trace",
    "diff",
    "eval",
    "data",
    "reward reload",
    "chaos",
    "plan",
    "sim",
    "sft",
    "init",
    "doctor",
    "scale",
    "metrics",
    "export",
    "version",
    "bench async",
    "bench cost",
    "bench staleness",
    "bench packing",
)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_a_command_explains_it(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` is the manual that people read: a sentence, and for all but the simplest an example."""
    with pytest.raises(SystemExit) as end:
        cli.app([*command.split(), "--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    assert f"rollstream {command}" in text or command == "version"


def test_every_command_is_listed_here() -> None:
    """A new command must come under the test above."""
    listed = {command.split()[0] for command in COMMANDS}
    named = {
        command.name or (command.callback and command.callback.__name__) for command in cli.app.registered_commands
    }
    assert named | {group.name for group in cli.app.registered_groups} == listed


@pytest.mark.parametrize(
    ("arguments", "wrong"),
    [
        (["run", "nowhere.yaml"], "There is no recipe nowhere.yaml."),
        (["run", "nowhere.yaml", "--resume"], "There is no recipe nowhere.yaml."),
        (["status"], "There is no run"),
        (["audit", "x"], "There is no run 'x'"),
        (["up", "rollout", "--nats", "nats://127.0.0.1:1"], "--nats and --run-name belong together."),
        (["up", "rollout"], "There is no run"),
        (["eval", "x", "--recipe", "nowhere.yaml"], "There is no recipe nowhere.yaml."),
        (["scale", "--dir", "runs/x", "rollout=2"], "Write: rollstream scale runs/x ROLE=N"),
        (["status", "--run", "x"], "Write: rollstream status x"),
        (["up", "rollout", "--dir", "runs/x"], "Write: rollstream up ROLE --run runs/x"),
    ],
)
def test_a_mistake_is_one_sentence_and_its_remedy_on_standard_error(
    arguments: list[str], wrong: str, tmp_path: Path
) -> None:
    """No traceback: the user's mistake is not our bug. Status 2, so that scripts notice."""
    done = rollstream(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert wrong in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert done.stdout == ""


def test_a_wrong_override_is_told_before_anything_is_started(tmp_path: Path) -> None:
    """Nothing may be left in the folder by a command that was mistyped."""
    done = rollstream("run", str(ROOT / "recipes" / "running_total.yaml"), "rollout.slot=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "Did you mean rollout.slots?" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_init_writes_the_template_and_never_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A person's own recipe must survive a second `init`."""
    monkeypatch.setattr(sys, "argv", ["rollstream", "init", str(tmp_path / "new" / "my.yaml")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code
    path = tmp_path / "new" / "my.yaml"
    assert path.read_text() == (ROOT / "recipes" / "template.yaml").read_text()
    path.write_text("mine")
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 2
    assert path.read_text() == "mine"
    assert "exists" in capsys.readouterr().err


def test_a_bug_of_ours_is_not_dressed_up_as_the_users_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is no `UserError` keeps its traceback."""

    def broken() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(cli, "app", broken)
    with pytest.raises(ZeroDivisionError):
        cli.main()


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """As shells expect: 128 + SIGINT."""

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "app", interrupted)
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert end.value.code == 130


@pytest.mark.parametrize(
    ("redirected", "status", "told"),
    [
        ("PYTHONIOENCODING=latin-1 {} >out", 0, ""),
        ("{} >/dev/full", 2, "error: the output cannot be written: No space left on device."),
        ("{} >&-", 0, ""),
        ("{} | true", 1, ""),
    ],
)
def test_an_output_that_takes_little_or_nothing_is_no_traceback(
    redirected: str, status: int, told: str, tmp_path: Path
) -> None:
    recording = ROOT / "tests/ops/golden_recordings/format1.rollstream"
    command = redirected.format(f"{sys.executable} -m cli audit {recording}")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.partition("\n")[0]) == (status, told)
