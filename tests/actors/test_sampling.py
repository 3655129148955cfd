import math

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.rollout.engine import NonFiniteLogitsError
from actors.rollout.sampling import sample, stream_key, uniforms

ALMOST_ONE = 1.0 - 2.0**-53


def draw(logits: torch.Tensor, u: object, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0):
    rows = len(logits)
    return sample(
        logits,
        np.broadcast_to(np.array(u, dtype=np.float64), (rows,)).copy(),
        np.full(rows, temperature, dtype=np.float32),
        np.full(rows, top_k, dtype=np.int64),
        np.full(rows, top_p, dtype=np.float64),
    )


def plain_distribution(logits: list[float], temperature: float, top_k: int, top_p: float) -> list[float]:
    """The twin: one row, plain Python, by the definition. Probability per token id."""
    scaled = [float(np.float32(x) / np.float32(temperature)) for x in logits]
    order = sorted(range(len(scaled)), key=lambda i: (-scaled[i], i))
    kept = order[:top_k] if top_k else order
    weights = {i: math.exp(scaled[i] - scaled[order[0]]) for i in kept}
    total = sum(weights.values())
    if top_p < 1.0:
        mass, nucleus = 0.0, []
        for i in kept:
            assume(abs(mass - top_p) > 1e-9)  # a tie that rounding decides
            if mass >= top_p:
                break
            nucleus.append(i)
            mass += weights[i] / total
        kept = nucleus
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(scaled))]


rows = st.lists(
    st.tuples(
        st.lists(st.floats(-12, 12, width=32), min_size=7, max_size=7),
        st.floats(0, ALMOST_ONE),
        st.sampled_from([0.25, 0.7, 1.0, 1.7]),
        st.integers(0, 8),
        st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(rows)
def test_every_row_is_drawn_as_its_plain_twin_draws_it(batch):
    """Mixed temperatures and truncations share a batch: each row must follow its own, and report that distribution."""
    logits = torch.tensor([row[0] for row in batch], dtype=torch.float32)
    columns = list(zip(*batch, strict=True))
    tokens, logprobs = sample(
        logits,
        np.array(columns[1], dtype=np.float64),
        np.array(columns[2], dtype=np.float32),
        np.array(columns[3], dtype=np.int64),
        np.array(columns[4], dtype=np.float64),
    )
    for i, (row, u, temperature, top_k, top_p) in enumerate(batch):
        probabilities = plain_distribution(row, temperature, top_k, top_p)
        assert probabilities[tokens[i]] > 0.0
        assert logprobs[i] == pytest.approx(math.log(probabilities[tokens[i]]), abs=1e-4)
        below = sum(probabilities[: tokens[i]])
        assert below - 1e-5 <= u <= below + probabilities[tokens[i]] + 1e-5


def test_uniforms_are_the_published_splitmix64_sequence():
    """The stream is part of what makes a run replayable: it must not drift. Values: splitmix64 seeded with 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    u = uniforms(np.full(4, 1234567, dtype=np.uint64), np.arange(4))
    assert u.tolist() == [(x >> 11) * 2.0**-53 for x in published]


def test_seeds_of_any_size_and_sign_name_distinct_streams():
    """Neighbouring seeds are the usual case (sample index in a group) and must not share numbers at shifted places."""
    seeds = [*range(-50, 50), 2**63, 2**64 - 51, 10**30]
    keys = np.array([stream_key(seed) for seed in seeds], dtype=np.uint64)
    numbers = np.concatenate([uniforms(keys, np.full(len(keys), position)) for position in range(50)])
    assert len(set(numbers.tolist())) == len(numbers)
    assert abs(numbers.mean() - 0.5) < 0.02
    assert stream_key(2**64 + 5) == stream_key(5)


@pytest.mark.parametrize("u", [0.0, ALMOST_ONE])
def test_a_token_of_probability_zero_is_never_drawn(u):
    """The ends of the unit interval are where an inverse CDF slips onto a neighbour of no mass."""
    hole = -math.inf
    logits = torch.tensor([[hole, 0.3, -1.0, hole], [hole, hole, 5.0, -500.0], [1.0, hole, hole, hole]])
    tokens, logprobs = draw(logits, u)
    assert tokens.tolist() == ([1, 2, 0] if u == 0.0 else [2, 2, 0])
    assert np.isfinite(logprobs).all()


def test_small_masses_of_a_large_vocabulary_are_told_apart():
    """One token of mass 1 - 1e-4, then 150,000 that share the rest: in float32 the sum would not move from one to the
    next, and most of them could never be drawn, or the wrong one would be."""
    rest = 150_000
    logits = torch.full((1, rest + 1), math.log(1e-4 / rest))
    logits[0, 0] = math.log(1.0 - 1e-4)
    for share in (0.25, 0.25 + 3 / rest, 0.9):
        token = int(draw(logits, 1.0 - 1e-4 * (1.0 - share))[0][0])
        assert token == pytest.approx(1 + share * rest, abs=1.5)
    assert int(draw(logits, ALMOST_ONE)[0][0]) == rest


def test_top_k_breaks_ties_by_the_smaller_id():
    """Untrained and saturated heads tie; which token survives must not depend on the sorting routine."""
    tokens, logprobs = draw(torch.zeros(4, 5000), np.array([0.0, 0.4, 0.7, ALMOST_ONE]), top_k=3)
    assert tokens.tolist() == [0, 1, 2, 2]
    assert logprobs == pytest.approx([-math.log(3)] * 4)


def test_drawn_frequencies_match_the_probabilities():
    """The twin shares the definition of the inverse CDF; frequencies over a seed's own stream do not."""
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0]]).expand(20_000, -1)
    u = uniforms(np.full(20_000, stream_key(3), dtype=np.uint64), np.arange(20_000))
    tokens, _ = draw(logits, u, temperature=2.0)
    frequencies = np.bincount(tokens, minlength=4) / 20_000
    assert frequencies == pytest.approx(torch.softmax(logits[0] / 2.0, -1).numpy(), abs=0.012)


def test_temperature_zero_takes_the_likeliest_token_with_certainty():
    """Evaluation is greedy, beside training rows in the same batch; ties go to the smaller id."""
    logits = torch.tensor([[0.0, 3.0, 3.0], [0.0, 3.0, 3.0]])
    zero, off = np.array([0.0, 1.0], dtype=np.float32), np.zeros(2, dtype=np.int64)
    tokens, logprobs = sample(logits, np.array([0.99, 0.99]), zero, off, np.ones(2))
    assert tokens.tolist() == [1, 2]
    assert logprobs[0] == 0.0
    assert logprobs[1] == pytest.approx(math.log(0.4879), abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_diverged_model_is_an_error_not_a_token(bad):
    """NaN would otherwise become an out-of-range token, far away from its cause."""
    with pytest.raises(NonFiniteLogitsError, match="diverged"):
        draw(torch.tensor([[0.0, 1.0], [0.0, bad]]), 0.5)
