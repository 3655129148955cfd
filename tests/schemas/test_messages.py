"""Messages keep their bounds and their bytes: what one program stored, every later one must read."""

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import (
    Batch,
    Evaluation,
    MalformedMessage,
    Message,
    Partial,
    Prompt,
    Rollout,
    Scored,
    decode,
    encode,
    oldest_and_newest,
    parse_sample_id,
    sample_id,
)
from schemas.messages import TYPES
from tests.schemas.examples import EXAMPLES, GOLDEN, arrays_of, golden_path

BY_TYPE = pytest.mark.parametrize("example", EXAMPLES, ids=lambda message: message.TYPE)


def test_every_type_has_an_example() -> None:
    """Or the tests below would quietly skip a new one."""
    assert {message.TYPE for message in EXAMPLES} == set(TYPES)


@BY_TYPE
def test_a_message_survives_the_wire(example: Message) -> None:
    back = decode(encode(example))
    assert back == example
    assert (back.id, back.versions) == (example.id, example.versions)
    for name, array in arrays_of(example).items():
        assert getattr(back, name).dtype == array.dtype


@BY_TYPE
def test_old_bytes_stay_readable(example: Message) -> None:
    """Recorded runs are replayed by later programs. Never change these files."""
    assert decode(golden_path(example).read_bytes()) == example


def test_every_golden_file_is_read() -> None:
    """The file of an old type version needs an upcaster, not deletion."""
    for path in GOLDEN.glob("*.msgpack"):
        kind, _, _ = path.name.partition(".")
        assert kind == decode(path.read_bytes()).TYPE


@BY_TYPE
def test_fields_with_defaults_may_be_missing(example: Message) -> None:
    """Bytes of a program that did not know them yet."""
    fields = dataclasses.fields(example)  # type: ignore[arg-type]
    optional = {field.name for field in fields if field.default is not dataclasses.MISSING}
    packed = {name: value for name, value in example.packed().items() if name not in optional}
    decode(msgpack.packb([example.TYPE, example.TYPE_VERSION, packed]))
    for name in packed:
        less = {other: value for other, value in packed.items() if other != name}
        with pytest.raises(MalformedMessage, match=name):
            decode(msgpack.packb([example.TYPE, example.TYPE_VERSION, less]))


@BY_TYPE
def test_unknown_fields_are_ignored(example: Message) -> None:
    """Bytes of a later program that added one."""
    packed = {**example.packed(), "from_the_future": [1, {"a": None}]}
    assert decode(msgpack.packb([example.TYPE, example.TYPE_VERSION, packed])) == example


@BY_TYPE
def test_another_version_of_a_type_is_refused(example: Message) -> None:
    """A changed meaning must not be read with the old one."""
    with pytest.raises(MalformedMessage, match="version 2"):
        decode(msgpack.packb([example.TYPE, 2, example.packed()]))


JUNK: list[Any] = [
    None, True, -1, 1 << 63, 0.5, float("nan"), float("inf"), "x", b"", b"xyz", b"\0" * 7, [], [1], [[1, 2]], {},
    {"a": "b"}, {"a": float("nan")}, [None], b"\xff" * 8, msgpack.ExtType(5, b"x"), msgpack.Timestamp(0),
]  # fmt: skip


@BY_TYPE
def test_a_wrong_value_in_any_field_is_malformed_or_valid_but_never_a_crash(example: Message) -> None:
    """A worker that crashed on it would crash again at the next delivery."""
    refused = 0
    for name in example.packed():
        for junk in JUNK:
            payload = msgpack.packb([example.TYPE, example.TYPE_VERSION, {**example.packed(), name: junk}])
            try:
                assert encode(decode(payload))
            except MalformedMessage:
                refused += 1
    assert refused > len(example.packed()) * len(JUNK) // 2


def replaced(message: Message, **changes: Any) -> Message:
    return dataclasses.replace(message, **changes)  # type: ignore[type-var]


def example_of(kind: type[Message]) -> Message:
    return next(example for example in EXAMPLES if type(example) is kind)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (Prompt, {"group_id": -1}),
        (Prompt, {"group_id": True}),
        (Prompt, {"group_size": 0}),
        (Prompt, {"prompt": 5}),
        (Prompt, {"prompt": None}),
        (Prompt, {"prompt": []}),
        (Prompt, {"prompt": ["hello"]}),
        (Prompt, {"prompt": [{"content": "no role"}]}),
        (Prompt, {"prompt": "half a pair \ud800"}),
        (Prompt, {"task": [1]}),
        (Prompt, {"task": {"answer": float("nan")}}),
        (Prompt, {"task": {1: 2}}),
        (Prompt, {"task": {"\udfff": 2}}),
        (Prompt, {"task": {"deep": [[[[[[[[1]]]]]]]]}}),
        (Prompt, {"task": {"object": object()}}),
        (Prompt, {"task": {"big": 1 << 64}}),
        (Rollout, {"prompt": {"role": "user"}}),
        (Rollout, {"task": "5"}),
        (Rollout, {"tokens": [1.5, 2.0, 3.0, 4.0]}),
        (Rollout, {"tokens": [1 << 31, 0, 0, 0]}),
        (Rollout, {"tokens": [[1, 2], [3, 4]]}),
        (Rollout, {"logprobs": [0.0, 0.0, float("nan"), 0.0]}),
        (Rollout, {"logprobs": [0.0, 0.0, float("-inf"), 0.0]}),
        (Rollout, {"logprobs": [0.0]}),
        (Rollout, {"segments": [(4, 3)]}),
        (Rollout, {"segments": [(4, 5), (6, -1)]}),
        (Rollout, {"segments": [(-1, 4)]}),
        (Rollout, {"segments": 7}),
        (Rollout, {"logprobs": [-1e300] * 4}),
        (Rollout, {"tokens": np.array([0, 0, 0, 1 << 40])}),
        (Rollout, {"tokens": ["1", "2", "3", "4"]}),
        (Rollout, {"finish": "abort"}),
        (Rollout, {"text": "\ud800"}),
        (Rollout, {"worker": "w" * 201}),
        (Scored, {"reward": None}),
        (Scored, {"verdict": "timeout"}),
        (Scored, {"reward": float("nan")}),
        (Scored, {"rollout_seq": 0}),
        (Scored, {"parts": {"exact": float("inf")}}),
        (Scored, {"parts": {"exact": "1"}}),
        (Scored, {"parts": 5}),
        (Partial, {"segments": []}),
        (Batch, {"rewards": [0.0]}),
        (Batch, {"dropped": [["13-0"]]}),
        (Batch, {"dropped": [["13-0", "no such reason"]]}),
        (Batch, {"dropped": "13-0"}),
        (Evaluation, {"verdicts": {"scored": 3}}),
        (Evaluation, {"verdicts": {"scored": 3, "lost": 1}}),
        (Evaluation, {"verdicts": {"timeout": 4}}),
        (Evaluation, {"reward": None}),
        (Evaluation, {"greedy": 1}),
    ],
    ids=lambda value: value.TYPE if isinstance(value, type) else str(value)[:40].encode("ascii", "replace").decode(),
)
def test_a_message_out_of_bounds_cannot_be_built(kind: type[Message], changes: dict[str, Any]) -> None:
    """The sender learns of it, and not a reader three steps later."""
    with pytest.raises(MalformedMessage, match=kind.TYPE):
        replaced(example_of(kind), **changes)


def test_a_message_above_the_limit_is_not_encoded() -> None:
    """The server would cut the connection."""
    big = replaced(example_of(Prompt), task={str(n): "x" * 1_000_000 for n in range(9)})
    with pytest.raises(MalformedMessage, match=r"prompt 12-3 has 9\d* bytes"):
        encode(big)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip
VERSIONS = st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(1, 5)), max_size=5)


@given(VERSIONS, st.dictionaries(TEXT, PLAIN, max_size=3), TEXT, st.randoms(use_true_random=False))
def test_any_rollout_survives_the_wire(segments: Any, task: dict[str, Any], text: str, random: Any) -> None:
    count = sum(tokens for _, tokens in segments)
    rollout = replaced(
        example_of(Rollout),
        segments=segments,
        tokens=[random.randrange(1 << 31) for _ in range(count)],
        logprobs=[-random.randrange(1 << 20) / 1024 for _ in range(count)],
        task=task,
        text=text,
    )
    back = decode(encode(rollout))
    assert back == rollout
    assert back.versions == oldest_and_newest(tuple(segments))


def test_decoded_arrays_cannot_be_written() -> None:
    """They are views of the message's bytes, which others may read too."""
    rollout = decode(encode(example_of(Rollout)))
    assert isinstance(rollout, Rollout)
    with pytest.raises(ValueError, match="read-only"):
        rollout.tokens[0] = 1


def test_messages_compare_by_value() -> None:
    one = example_of(Rollout)
    assert one == replaced(one)
    assert one != replaced(one, tokens=np.array([5, 6, 7, 3]))
    assert len({one, replaced(one)}) == 1
    assert one != example_of(Scored)


def test_sample_ids_go_both_ways() -> None:
    assert parse_sample_id(sample_id(12, 3)) == (12, 3)
    for text in (
        "",
        "12",
        "12-",
        "-3",
        "a-b",
        "12-3-4",
        "١٢-٣x",
        "12- 3",
        "9" * 5000 + "-1",
        f"{1 << 63}-1",
        "1-9999999",
    ):
        assert parse_sample_id(text) is None
