"""These tests need vLLM, which has an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

import importlib.util

collect_ignore_glob: list[str] = []

if importlib.util.find_spec("vllm"):
    from tests.vllm.served import served  # noqa: F401  (a fixture)
else:
    collect_ignore_glob.append("test_*.py")
