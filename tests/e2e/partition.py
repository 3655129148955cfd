"""The stage of `test_partition`: a program for namespaces of its own, where it lays networks, runs a run, and cuts.

    this namespace: bridge 10.99.0.254 with the run's processes
                      ├── v1 ── network n1: nats-server 10.99.0.1
                      ├── v2 ── network n2: nats-server 10.99.0.2
                      └── v3 ── network n3: nats-server 10.99.0.3

Its last line is JSON: how the run ended, and how many steps were done before, during and after the cut.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

from bus.jetstream import JetStreamBus
from bus.table import STEPS, stream_name
from ops.nats_server import find_binary
from tests.e2e.harness import Launched, audited

NODES = (1, 2, 3)
STEPS_WHILE_CUT = 2
READY_S = 20.0


def ip(arguments: str) -> None:
    """Run the `ip` program."""
    subprocess.run(["ip", *arguments.split()], check=True)


def lay_networks() -> None:
    """A bridge here, and three networks that hang on it by one cable each."""
    subprocess.run(["mount", "-t", "tmpfs", "none", "/run"], check=True)
    ip("link set lo up")
    ip("link add bridge0 type bridge")
    ip("addr add 10.99.0.254/24 dev bridge0")
    ip("link set bridge0 up")
    for i in NODES:
        ip(f"netns add n{i}")
        ip(f"link add v{i} type veth peer name eth0 netns n{i}")
        ip(f"link set v{i} master bridge0 up")
        ip(f"-n n{i} addr add 10.99.0.{i}/24 dev eth0")
        ip(f"-n n{i} link set eth0 up")
        ip(f"-n n{i} link set lo up")


def start_server(i: int, folder: Path) -> str:
    """A server of the cluster in its network; returns its URL."""
    home = folder / f"node-{i}"
    home.mkdir(parents=True)
    routes = ", ".join(f'"nats-route://10.99.0.{other}:6222"' for other in NODES)
    (home / "conf").write_text(
        f'server_name: "{i}"\nlisten: "10.99.0.{i}:4222"\nmax_payload: 8MB\nlog_file: "{home}/log"\n'
        f'jetstream {{ store_dir: "{home}", max_file_store: 1PB }}\n'
        f'cluster {{ name: "cut", listen: "10.99.0.{i}:6222", routes: [{routes}] }}\n'
    )
    subprocess.Popen(["ip", "netns", "exec", f"n{i}", str(find_binary()), "-c", str(home / "conf")])
    until_s = time.monotonic() + READY_S
    while not ((home / "log").exists() and "Server is ready" in (home / "log").read_text()):
        assert time.monotonic() < until_s, "a server did not come up"
        time.sleep(0.02)
    return f"nats://10.99.0.{i}:4222"


async def leader_of_steps(url: str, run: str) -> str:
    """The server that leads the stream of steps."""
    bus = JetStreamBus(run, url)
    await bus.connect()
    answer = await bus._api(f"STREAM.INFO.{stream_name(run, STEPS)}")
    await bus.close()
    return str(answer["cluster"]["leader"])


def main(folder: Path, recipe: Path, steps: int, cut_s: float) -> None:
    """Lay, run, cut, heal, and tell."""
    lay_networks()
    url = ",".join(start_server(i, folder / "cluster") for i in NODES)
    overrides = [f"steps={steps}", "bus.replicas=3", "reward.function=task.py:slow_reward"]
    command = ["run", str(recipe), *overrides, "--nats", url, "--dir", str(folder / "run"), "--plain"]
    run = Launched(command, folder / "run")
    try:
        run.until_step(3)
        leader = asyncio.run(leader_of_steps(url, "run"))
        began_s, before = time.monotonic(), run.steps_trained
        ip(f"link set v{leader} down")
        run.until_step(before + STEPS_WHILE_CUT)
        time.sleep(max(0.0, began_s + cut_s - time.monotonic()))
        at_return = run.steps_trained
        ip(f"link set v{leader} up")
        status = run.ends()
    finally:
        print(run.output)
        run.destroy()
    told = {
        "status": status,
        "audit_clean": audited(folder / "run").clean,
        "steps_before": before,
        "steps_while_cut": at_return - before,
        "steps_after": run.steps_trained - at_return,
        "longest_gap_s": round(longest_gap_s(run), 1),
    }
    print(json.dumps(told))


def longest_gap_s(run: Launched) -> float:
    """The longest time without a step."""
    times = [datetime.fromisoformat(line["timestamp"]).timestamp() for line in run.events("trainer", "step_trained")]
    return max(after - before for before, after in itertools.pairwise(times))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
