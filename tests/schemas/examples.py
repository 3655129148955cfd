"""One full example of each message, for round trips and for the golden files.

`python -m tests.schemas.examples` writes the golden file of a type that has none yet. A golden file is never changed:
it stands for bytes in somebody's recorded run.
"""

from pathlib import Path

import numpy as np

from schemas import (
    Answer,
    Batch,
    Control,
    Dropped,
    Evaluation,
    Message,
    Note,
    Partial,
    Prompt,
    Rollout,
    Scored,
    StepDone,
    Turn,
    WeightVersion,
    encode,
)

GOLDEN = Path(__file__).parent / "golden"

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+3=? Größe: 5 µm"}]

EXAMPLES: tuple[Message, ...] = (
    Prompt(
        group_id=12, index=3, group_size=8, prompt=CHAT, task={"answer": "5", "tests": [1, 2.5, None, True]}, seed=7,
        min_version=4,
    ),
    Partial(
        group_id=12, index=3, tokens=[5, 6, 7], logprobs=[-0.5, -1.25, 0.0], segments=[(4, 2), (5, 1)],
        worker="rollout-1",
    ),
    Turn(
        group_id=12, index=3, attempt=1, number=2, choice=0, prompt_tokens=[1, 2, 3, 5], max_new_tokens=32,
        stop=["</answer>"], seed=7, min_version=4, listener="episode-0",
    ),
    Answer(
        group_id=12, index=3, turn="12-3/1-2-0/0123456789abcdef", tokens=[5, 6, 2], logprobs=[-0.5, -1.25, 0.0],
        segments=[(4, 2), (5, 1)], finish="stop", text="5 ✓", worker="rollout-1", seconds=1.5, resumed=1, stopped="",
        saved=0, error="",
    ),
    Note(group_id=12, index=3, number=1, kind="reward", value=0.5, turn=2, choice=1, detail=""),
    Rollout(
        group_id=12, index=3, group_size=8, prompt="2+3=", task={"answer": "5"}, prompt_tokens=[1, 2, 3],
        tokens=[5, 6, 7, 2], logprobs=[-0.5, -1.25, 0.0, -3.0], segments=[(4, 3), (6, 1)], finish="stop", text="5 ✓",
        worker="rollout-1", seconds=1.5, resumed=1,
    ),
    Scored(
        group_id=12, index=3, group_size=8, rollout_seq=99, prompt_length=3, segments=[(4, 3), (6, 1)], finish="stop",
        verdict="scored", reward=0.75, parts={"exact": 1.0, "length": -0.25}, detail="", seconds=0.01,
        worker="reward-1",
    ),
    Dropped(group_id=12, index=3, reason="zero_variance", tokens=4, detail="all 8 rewards are 1.0"),
    Batch(
        step=6, max_staleness=2, group_ids=[12, 12, 14], indices=[0, 3, 1], rollout_seqs=[90, 99, 101],
        rewards=[0.0, 0.75, 1.0], next_group=17, live_groups=[15, 16], marks={"scored": 120.0},
        dropped=[["13-0", "stale", "40"]], seen={"reward": 0.6},
    ),
    WeightVersion(version=7, kind="delta", base=6, path="v7.safetensors", digest="ab" * 32, nbytes=1234),
    StepDone(step=6, version=7, metrics={"loss": -0.01, "step_s": 1.5}, staleness=[10, 5, 1]),
    Evaluation(
        version=40, data="task.py:draw", reward=0.75, parts={"exact": 0.5}, count=4,
        verdicts={"scored": 3, "timeout": 1}, finished=0.5,
        response_length=21.25, greedy=False, seconds=2.5, worker="evaluator-0", skipped=[20, 30],
    ),
    Control(action="start", nonce="n1", recipe="algorithm: grpo\n", detail="by hand"),
)  # fmt: skip


def golden_path(message: Message) -> Path:
    return GOLDEN / f"{message.TYPE}.v{message.TYPE_VERSION}.msgpack"


def arrays_of(message: Message) -> dict[str, np.ndarray]:
    return {name: value for name, value in vars(message).items() if isinstance(value, np.ndarray)}


if __name__ == "__main__":
    for example in EXAMPLES:
        if not golden_path(example).exists():
            golden_path(example).write_bytes(encode(example))
