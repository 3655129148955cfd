"""kill -9 in the midst of publishing: what was announced can be read, and what was not is not there by half."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

from bus.weights.files import digest_of_file, version_and_base
from schemas import WeightVersion
from tests.bus.published_weights import Published, weights

PROGRAM = """
import sys, json, pathlib
from tests.bus.published_weights import Published
published = Published(pathlib.Path(sys.argv[1]))
for version in range(10_000):
    published.publish([version])
    print(json.dumps(published.events[version].packed()), flush=True)
"""


def killed_after(announced: int, folder: Path) -> list[bytes]:
    """What was announced by a process that was killed while it published one of the next versions."""
    root = Path(__file__).parents[2]
    with subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder)], cwd=root, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(announced)]
        process.send_signal(signal.SIGKILL)
        return lines + process.stdout.readlines()


async def test_a_trainer_killed_while_it_publishes_leaves_only_whole_versions(tmp_path: Path) -> None:
    lines = killed_after(14, tmp_path)
    published = Published(tmp_path)
    for line in lines:
        if line.endswith(b"\n"):
            event = WeightVersion.unpacked(json.loads(line))
            published.events[event.version] = event
    newest = max(published.events)
    names = published.store.names()
    digests = {event.path: event.digest for event in published.events.values()}
    assert digests.keys() <= names
    assert {name: digest_of_file(published.store.root / name) for name in digests} == digests
    assert {version_and_base(name)[0] for name in names - digests.keys()} <= {newest + 1}  # whole, and not announced

    # The next life: its newest version whole, and on from there, with the same bytes as if nothing had happened.
    snapshot = published.writer.snapshot(newest, weights(newest))
    assert published.writer.publish(snapshot).digest == published.events[newest].result_digest
    published._before = snapshot
    published.publish(range(newest + 1, newest + 3))
    reader = published.reader(tmp_path / "cache")
    for version in (newest, newest + 2):
        content = (await reader.fetch(published.events[version])).path.read_bytes()
        assert content == published.writer.snapshot(version, weights(version)).content
    undisturbed = Published(tmp_path / "undisturbed")
    undisturbed.publish(range(newest + 3))
    assert undisturbed.events[newest + 2] == published.events[newest + 2]
