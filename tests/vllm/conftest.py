"""These tests need vLLM, which has an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

if importlib.util.find_spec("vllm"):
    pytest_plugins = ["tests.vllm.served"]
