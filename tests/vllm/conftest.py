"""These tests need vLLM, which has an environment of its own: `make test-vllm`. Elsewhere they are not collected."""

import importlib.util

collect_ignore_glob: list[str] = []

found = importlib.util.find_spec("vllm")
if found and found.origin:  # this folder itself is found as a package without a file
    from tests.vllm.served import served  # noqa: F401  (a fixture)
else:
    collect_ignore_glob.append("test_*.py")
