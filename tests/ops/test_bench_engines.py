"""A benchmark that counts padding, or lets one engine off its work, would praise the wrong one."""

from __future__ import annotations

from pathlib import Path

import pytest

from ops import bench_engines
from ops.bench_engines import BUILT_IN, PADDED, VLLM, Speed, fixed, long_tailed, report
from ops.bench_engines import bench_engines as bench
from schemas import UserError
from tests.actors.tiny_model import VOCAB, make_model


def test_lengths_are_long_tailed_and_the_same_each_time() -> None:
    workload = long_tailed(samples=400, slots=16, vocabulary=VOCAB)
    lengths = workload.lengths
    assert workload == long_tailed(samples=400, slots=16, vocabulary=VOCAB)
    assert lengths[-1] > 4 * sum(lengths) / len(lengths) > 4 * lengths[200]
    assert len({request.seed for request in workload.requests}) == 400


def test_ratios_are_of_tokens_per_cpu_second() -> None:
    workload = fixed(2, 10, VOCAB)
    speeds = {
        ("batch 2", PADDED): Speed(tokens=20, wall_s=1.0, cpu_s=4.0),
        ("batch 2", BUILT_IN): Speed(tokens=20, wall_s=2.0, cpu_s=1.6),
        ("batch 2", VLLM): Speed(tokens=20, wall_s=0.5, cpu_s=8.0),
    }
    lines = report([workload], speeds, "a machine", "float32").splitlines()
    assert "| batch 2 | generate, padded | 20 | 5 | 1.00 |" in lines
    assert "| batch 2 | built-in | 10 | 12 | 2.50 |" in lines
    assert "| batch 2 | vLLM | 40 | 2 | 0.50 |" in lines


async def test_all_engines_make_the_tokens_that_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """End to end over a tiny model, without vLLM: it is not here, or takes half a minute to start."""
    make_model("llama").save_pretrained(tmp_path / "model")
    monkeypatch.setattr(bench_engines, "PROMPT_TOKENS", (4, 8))
    monkeypatch.setattr(bench_engines, "LONGEST_TOKENS", 40)
    monkeypatch.setattr(bench_engines.importlib.util, "find_spec", lambda name: None)
    out = tmp_path / "report.md"
    assert await bench(tmp_path / "model", (1, 3), 5, samples=6, slots=2, rounds=1, dtype="float32", out=out) == 0
    rows = [line for line in out.read_text().splitlines() if line.startswith("| ")]
    assert len(rows) == 1 + 3 * 2
    assert "vLLM is not installed here" in out.read_text()


async def test_a_folder_without_a_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is no model folder"):
        await bench(tmp_path)
