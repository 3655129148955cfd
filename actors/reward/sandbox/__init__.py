"""The sandbox for model-written Python: no network, no files, no way to stay. See docs/sandbox.md.

with Sandbox(Limits(time_s=2)) as sandbox:      # UserError where this machine cannot isolate
    sandbox.run_blocking("print(int(input()) + 1)", "41").stdout
await sandbox.run("print(1)")                   # the same from a coroutine; cancelled, it kills
"""

from actors.reward.sandbox.limits import Call, Limits, Result, SandboxLost, Status
from actors.reward.sandbox.pool import Box, Sandbox

__all__ = ["Box", "Call", "Limits", "Result", "Sandbox", "SandboxLost", "Status"]
