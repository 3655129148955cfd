"""What the fork server imports once for all children: seconds of CPU and hundreds of megabytes, shared."""

import os

# Before torch: busy-waiting threads of several processes on few cores stop each other dead.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: F401  (imported for its side effect on the children's start)
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: F401

import ops.evaluate
import ops.host
import ops.precheck
import ops.prepare  # noqa: F401
