import numpy as np
import pytest
import torch

from actors.trainer.config import SftConfig
from actors.trainer.sft import train_sft
from tests.actors.tiny_models import qwen3


def counting(progress, random):
    """Prompt: a start; response: the next numbers, so that every response token is certain."""
    start = random.randint(2, 20)
    return [start], list(range(start + 1, start + 1 + random.randint(1, 8)))


def test_the_model_learns_what_it_is_shown():
    model = qwen3()
    losses = train_sft(model, counting, SftConfig(steps=150, batch_tokens=128, lr=1e-2, warmup_steps=10))
    assert len(losses) == 150
    assert losses[0] > 2
    assert np.mean(losses[-10:]) < 0.2
    with torch.no_grad():
        assert model(input_ids=torch.tensor([[5, 6, 7]])).logits[0].argmax(-1).tolist() == [6, 7, 8]


def test_the_loss_is_the_cross_entropy_of_response_tokens_only():
    """A prompt is given, not produced: learning to predict it would waste a small model."""
    model = qwen3()
    ids = torch.tensor([[3, 4, 5, 6, 7]])
    labels = torch.tensor([[-100, -100, -100, 6, 7]])
    expected = model(input_ids=ids, labels=labels).loss.item()
    losses = train_sft(model, lambda progress, random: ([3, 4, 5], [6, 7]), SftConfig(steps=1, batch_tokens=64))
    assert losses[0] == pytest.approx(expected, abs=1e-5)


def test_the_same_seed_gives_the_same_weights():
    runs = []
    for seed in (0, 0, 1):
        model = qwen3()
        train_sft(model, counting, SftConfig(steps=5, batch_tokens=64, seed=seed))
        runs.append(model.state_dict())
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not all(torch.equal(runs[0][name], runs[2][name]) for name in runs[0])


def test_the_data_hears_how_far_training_is():
    """Habits may change on the way, as in the default task's sloppy last fifth."""
    heard, steps = [], []

    def example(progress, random):
        heard.append(progress)
        return counting(progress, random)

    config = SftConfig(steps=40, batch_tokens=256)
    losses = train_sft(qwen3(), example, config, on_step=lambda step, loss: steps.append((step, loss)))
    assert steps == list(enumerate(losses))
    assert heard[0] == 0.0
    assert 0.3 < heard[-1] < 1.0
    assert heard == sorted(heard)


def test_batches_keep_to_their_tokens_and_waste_little():
    """Sorted pools: a long example does not pad thirty short ones."""
    model, shapes = qwen3(), []

    def long_tailed(progress, random):
        return [3] * random.randint(1, 4), [5] * min(60, int(random.expovariate(0.1)) + 1)

    original = model.base_model.forward

    def spy(input_ids, **rest):
        shapes.append((input_ids.shape, int((input_ids != 0).sum())))
        return original(input_ids, **rest)

    model.base_model.forward = spy
    train_sft(model, long_tailed, SftConfig(steps=40, batch_tokens=512))
    batches = [(shape, used) for shape, used in shapes if used > 100]  # not the trial of what the model allows
    assert len(batches) >= 38
    assert all(shape.numel() <= 512 for shape, _ in batches)
    assert sum(used for _, used in batches) > 0.85 * sum(shape.numel() for shape, _ in batches)
