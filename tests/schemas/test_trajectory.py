"""Whoever reads a rollout tells the model's tokens from what it was told by these functions; a slip would train
a tool's words."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import MalformedMessage, Rollout
from schemas.trajectory import cuts, last_turn, model_segments, model_tokens, turn_ends


def ints(*values: int) -> np.ndarray:
    return np.array(values, "<i4")


@st.composite
def trajectories(draw):
    """Who made each token, in the flat form and one by one: versions, made or not, and the sequence of each."""
    made = draw(st.lists(st.booleans(), min_size=1, max_size=30).filter(any))
    versions = [draw(st.integers(0, 2)) for _ in made]
    sequences, of_sequence = [], []
    while sum(tokens for _, tokens in sequences) < len(made):
        left = len(made) - len(of_sequence)
        tokens = draw(st.integers(1, left))
        of_sequence += [len(sequences)] * tokens
        sequences.append((draw(st.integers(1, 4)), tokens))
    spans = []
    for t, own in enumerate(made):
        if own:
            continue
        if spans and sum(spans[-1]) == t and draw(st.booleans()):  # neighbours may be one span or two
            spans[-1] = spans[-1][0], spans[-1][1] + 1
        else:
            spans.append((t, 1))
    segments = tuple((version, 1) for version in versions)
    return made, versions, of_sequence, segments, ints(*sum(spans, ())), ints(*sum(sequences, ()))


@given(trajectories())
def test_every_token_is_the_models_or_was_told_to_it_as_the_spans_say(trajectory):
    made, versions, _, segments, spans, _ = trajectory
    assert model_tokens(spans, len(made)).tolist() == made
    runs = [(version, 1) for version, own in zip(versions, made, strict=True) if own]
    assert list(model_segments(segments, spans)) == (runs if len(spans) else list(segments))


@given(trajectories())
def test_a_turn_ends_where_the_model_stops_or_another_sequence_begins(trajectory):
    made, _, of_sequence, _, spans, sequences = trajectory
    T = len(made)
    expected = [
        t for t in range(T) if made[t] and (t + 1 == T or not made[t + 1] or of_sequence[t + 1] != of_sequence[t])
    ]
    assert turn_ends(np.array(made), sequences).tolist() == expected
    first, end = last_turn(spans, sequences, T)
    assert end == expected[-1] + 1
    assert all(made[t] and of_sequence[t] == of_sequence[end - 1] for t in range(first, end))
    assert first == 0 or not made[first - 1] or of_sequence[first - 1] != of_sequence[first]


@given(trajectories())
def test_sequences_cut_prompts_and_tokens_up_in_order(trajectory):
    made, _, of_sequence, _, _, sequences = trajectory
    P = int(sequences[::2].sum())
    found = cuts(sequences, P, len(made))
    assert [i for p, _ in found for i in range(p.start, p.stop)] == list(range(P))
    assert [k for k, (_, t) in enumerate(found) for _ in range(t.stop - t.start)] == of_sequence
    assert cuts(ints(), 3, 7) == [(slice(0, 3), slice(0, 7))]


def rollout(**fields) -> Rollout:
    common = {"group_id": 0, "index": 0, "group_size": 1, "prompt": "?", "task": {}, "finish": "stop", "text": ""}
    arrays = {"prompt_tokens": [1, 2], "tokens": [3, 4, 5, 6], "logprobs": [-1, 0, 0, -1], "segments": [(0, 4)]}
    return Rollout(**common | arrays | fields)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"observations": [0, 4], "logprobs": [0, 0, 0, 0]}, "the model made none"),
        ({"observations": [0, 2]}, "logprobs must be 0 at observations"),
        ({"observations": [1, 1, 1, 1]}, "ascend, apart from each other"),
        ({"observations": [3, 2]}, "within 4 tokens"),
        ({"observations": [1]}, "pairs"),
        ({"sequences": [1, 2, 2, 2]}, "must cut up 2 prompt tokens and 4 tokens"),
        ({"sequences": [2, 4, 0, 0]}, "of at least 1 each"),
    ],
)
def test_a_trajectory_that_cannot_be_is_refused(fields, complaint):
    with pytest.raises(MalformedMessage, match=complaint):
        rollout(**fields)


def test_a_trajectory_that_can_be_is_taken():
    made = rollout(observations=[1, 1, 2, 1], sequences=[1, 2, 1, 2])
    assert model_tokens(made.observations, 4).tolist() == [True, False, False, True]
