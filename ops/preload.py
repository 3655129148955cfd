"""What the fork server imports once for all children: seconds of CPU and hundreds of megabytes, shared."""

import gc
import os
import signal

# Ctrl-C reaches the whole group and is the launcher's to heed; the fork server ignores it only once this is imported.
interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
# Before torch: busy-waiting threads of several processes on few cores stop each other dead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
gc.disable()  # imports leave no garbage: looking for it costs a fifth of their time

import torch  # noqa: E402, F401  (imported for its side effect on the children's start)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402, F401

import ops.evaluate  # noqa: E402
import ops.host  # noqa: E402
import ops.precheck  # noqa: E402
import ops.prepare  # noqa: E402, F401

gc.freeze()  # nor do the children look through it, which would copy the pages that they share
gc.enable()
signal.signal(signal.SIGINT, interrupt)  # as the children are to have it
