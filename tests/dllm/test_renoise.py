"""The step from logits to the next canvas: noise, what is kept, when a canvas is done."""

import numpy as np
import pytest
import torch

from genserve.core.models.distribution import uniform, uniforms
from genserve.core.types import SamplingParams
from genserve.dllm.models.interface import CanvasDefaults
from genserve.dllm.renoise import Rules, advance, canvas_noise, start
from genserve.dllm.request import DiffusionParams, Unmasking

CPU = torch.device("cpu")
NUM_POSITIONS, VOCABULARY = 8, 40


def rules(temperature=1.0, seed=3, num_valid=VOCABULARY, defaults=CanvasDefaults(), **params):
    params.setdefault("unmasking", Unmasking("entropy_bound", threshold=0.005, entropy_bound=0.1))
    sampling = SamplingParams(temperature=temperature, seed=seed)
    return Rules.of(sampling, DiffusionParams("canvas", **params), defaults, num_valid)


def flat():
    return torch.zeros(NUM_POSITIONS, VOCABULARY)


def sure(tokens):
    return flat().scatter(1, torch.tensor(tokens)[:, None], 100.0)


def test_uniforms_are_those_of_single_draws():
    indices = np.array([0, 1, 77, 1 << 40, (1 << 62) + 5])
    for seed in (0, 12, -1, (1 << 64) + 3):
        assert uniforms(seed, indices).tolist() == [uniform(seed, int(index)) for index in indices]


def test_noise_is_of_seed_canvas_step_position_and_kind():
    drawn = [
        tuple(part.tolist())
        for seed in (0, 1)
        for canvas in (0, 1)
        for step in (0, 1)
        for part in canvas_noise(seed, canvas, step, NUM_POSITIONS)
    ]
    assert len({number for part in drawn for number in part}) == 16 * NUM_POSITIONS
    assert canvas_noise(0, 1, 1, 3)[0].tolist() == canvas_noise(0, 1, 1, NUM_POSITIONS)[0][:3].tolist()
    assert start(0, NUM_POSITIONS, rules(), canvas_noise, CPU).ids_C.max() < VOCABULARY


def test_sure_positions_keep_their_proposal_and_others_are_renoised():
    wanted = rules()
    before = start(0, NUM_POSITIONS, wanted, canvas_noise, CPU)
    logits = flat()
    logits[:3] = sure(range(10, 18))[:3]
    after = advance(before, logits, wanted, canvas_noise)
    assert after.state.ids_C[:3].tolist() == [10, 11, 12]
    _, random = canvas_noise(3, 0, 1, NUM_POSITIONS)
    # The first of the unsure ones is within any bound: its own entropy does not count.
    renoised = torch.from_numpy((random * VOCABULARY).astype(int))
    assert (after.state.ids_C[3:] == renoised[3:]).sum() >= 4
    assert not after.is_done and after.state.num_steps == 1


def test_a_canvas_is_done_when_it_is_stable_and_sure():
    wanted = rules()
    state = start(0, NUM_POSITIONS, wanted, canvas_noise, CPU)
    first = advance(state, sure(range(8)), wanted, canvas_noise)
    other = advance(first.state, sure(range(1, 9)), wanted, canvas_noise)
    same = advance(other.state, sure(range(1, 9)), wanted, canvas_noise)
    assert (first.is_done, other.is_done, same.is_done) == (False, False, True)
    assert same.tokens_C.tolist() == list(range(1, 9))
    torch.testing.assert_close(same.probs_C, torch.ones(NUM_POSITIONS))
    unsure = advance(other.state, sure(range(1, 9)) * 0.03, wanted, canvas_noise)
    assert not unsure.is_done, "stable, but with high entropy"


@pytest.mark.parametrize(("num_stable", "done_at"), [(0, 1), (1, 2), (3, 4)])
def test_how_long_a_canvas_must_be_stable(num_stable, done_at):
    wanted = rules(defaults=CanvasDefaults(num_stable=num_stable))
    after = advance(start(0, NUM_POSITIONS, wanted, canvas_noise, CPU), sure(range(8)), wanted, canvas_noise)
    while not after.is_done:
        after = advance(after.state, sure(range(8)), wanted, canvas_noise)
    assert after.state.num_steps == done_at


def test_passes_are_bounded_by_the_request_or_the_model():
    assert rules().num_steps == 48
    assert rules(max_block_steps=5).num_steps == 5
    assert rules(unmasking=Unmasking("entropy_bound", steps=4), max_block_steps=5).num_steps == 4
    wanted = rules(max_block_steps=2)
    after = advance(start(0, NUM_POSITIONS, wanted, canvas_noise, CPU), flat(), wanted, canvas_noise)
    assert not after.is_done
    assert advance(after.state, flat(), wanted, canvas_noise).is_done


def test_temperatures_fall_from_the_hottest_and_scale_with_the_request():
    def divisors(temperature):
        wanted = rules(temperature, max_block_steps=4)
        after = None
        state = start(0, NUM_POSITIONS, wanted, canvas_noise, CPU)
        for _ in range(4):
            after = advance(state, sure(range(8)) / 50, wanted, canvas_noise)
            state = after.state
            yield 2.0 / after.logits_CV.max().item()

    assert list(divisors(1.0)) == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert list(divisors(0.5)) == pytest.approx([0.4, 0.35, 0.3, 0.25])
    assert list(divisors(0.0)) == pytest.approx([0.8, 0.7, 0.6, 0.5])


def test_ids_beyond_the_tokenizer_are_never_proposed():
    wanted = rules(num_valid=20)
    logits = flat()
    logits[:, 20:] = 50.0
    state = start(0, NUM_POSITIONS, wanted, canvas_noise, CPU)
    for _ in range(5):
        after = advance(state, logits, wanted, canvas_noise)
        assert max(state.ids_C.max(), after.state.ids_C.max(), after.tokens_C.max()) < 20
        state = after.state


def test_a_temperature_needs_a_seed():
    with pytest.raises(ValueError, match="seed"):
        rules(1.0, None)
    assert rules(0.0, None) == rules(0.0, 7)
