import itertools
import math

import pytest
import torch

from geartrain.collectives.codecs.error_feedback import (
    ErrorFeedback,
    MomentumUndo,
    state_pieces,
)
from geartrain.collectives.codecs.protocol import Codec
from geartrain.collectives.codecs.registry import make_codec
from geartrain.collectives.codecs.residual_ranges import Piece, lay_out, plan_moves
from geartrain.errors import ConfigError


def gradient(step: int, num_elements: int = 600) -> torch.Tensor:
    return torch.randn(num_elements, generator=torch.Generator().manual_seed(step))


def send(
    feedback: ErrorFeedback, codec: Codec, values: torch.Tensor, cuts: tuple[int, ...] = ()
) -> torch.Tensor:
    """One step of one coder: what its codes stand for."""
    sent = torch.empty_like(values)
    ends = (0, *cuts, values.numel())
    for start, stop in itertools.pairwise(ends):
        piece = values[start:stop].clone()
        feedback.compensate("0", start, piece)
        code = torch.zeros(codec.encoded_bytes(stop - start), dtype=torch.uint8)
        codec.encode(piece, code)
        codec.decode(code, sent[start:stop])
        feedback.keep("0", start, piece, sent[start:stop])
    return sent


def owed(feedback: ErrorFeedback, num_elements: int = 600) -> torch.Tensor:
    layout = lay_out([num_elements], {"0": [0]})
    total = torch.zeros(num_elements)
    state = feedback.state("total", layout)
    for piece in state_pieces(state):
        total[piece.start : piece.stop] += state[piece.name][0]
    return total


@pytest.mark.parametrize("name", ["int8", "int4", "fp8", "topk"])
def test_what_was_sent_and_what_is_owed_add_up_to_the_gradients(name: str) -> None:
    feedback, codec = ErrorFeedback(), make_codec(name)
    total_sent, total = torch.zeros(600), torch.zeros(600)
    for step in range(30):
        total += gradient(step)
        total_sent += send(feedback, codec, gradient(step))
        feedback.end_step(applied=True)
    torch.testing.assert_close(total_sent + owed(feedback), total, rtol=1e-4, atol=1e-4)


def test_new_cuts_between_steps_lose_nothing() -> None:
    feedback, codec = ErrorFeedback(), make_codec("topk")
    total_sent, total = torch.zeros(600), torch.zeros(600)
    for step, cuts in enumerate([(), (100, 300), (100, 350, 351), (), (599,), (1, 2, 3)]):
        total += gradient(step)
        total_sent += send(feedback, codec, gradient(step), cuts)
    torch.testing.assert_close(total_sent + owed(feedback), total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_dropped_step_leaves_what_was_owed_before(momentum: float) -> None:
    dropped, clean = ErrorFeedback(momentum), ErrorFeedback(momentum)
    codec = make_codec("topk")
    for step in range(6):
        send(clean, codec, gradient(step), (200,))
        clean.end_step(applied=True)
        send(dropped, codec, gradient(step), (200,))
        dropped.end_step(applied=True)
        send(dropped, codec, gradient(100 + step) * 1e6, (200,))
        dropped.end_step(applied=False)
    sent = send(dropped, codec, gradient(50), (200,))
    assert torch.equal(sent, send(clean, codec, gradient(50), (200,)))


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_with_bad_numbers_does_not_poison_the_residual(
    momentum: float, bad: float
) -> None:
    poisoned, clean = ErrorFeedback(momentum), ErrorFeedback(momentum)
    codec = make_codec("int8")
    for step in range(3):
        send(poisoned, codec, gradient(step))
        send(clean, codec, gradient(step))
        broken = gradient(step)
        broken[step] = bad
        assert bool(torch.isnan(send(poisoned, codec, broken)).all())
    assert torch.equal(send(poisoned, codec, gradient(9)), send(clean, codec, gradient(9)))


def test_an_exchange_broken_off_before_the_end_changes_nothing() -> None:
    broken, clean = ErrorFeedback(0.9), ErrorFeedback(0.9)
    codec = make_codec("topk")
    for feedback in (broken, clean):
        send(feedback, codec, gradient(0))
        feedback.end_step(applied=True)
    broken.compensate("0", 0, gradient(1))  # and no code was ever made
    broken.end_step(applied=False)
    assert torch.equal(send(broken, codec, gradient(2)), send(clean, codec, gradient(2)))


def test_what_is_owed_follows_the_loss_scale() -> None:
    feedback, plain = ErrorFeedback(), ErrorFeedback()
    codec = make_codec("topk")
    send(feedback, codec, gradient(0) * 8)
    send(plain, codec, gradient(0))
    feedback.scale_(1 / 8)
    torch.testing.assert_close(owed(feedback), owed(plain), rtol=1e-5, atol=1e-7)


def test_velocity_becomes_the_gradient_that_leads_sgd_to_it() -> None:
    undo = MomentumUndo(0.5)
    weight = torch.zeros(3)
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.5)
    velocities = [torch.tensor([1.0, 0.0, 2.0]), torch.tensor([0.0, 3.0, 0.0])]
    for velocity in velocities:
        total = velocity.clone()
        undo.undo_("0", 0, total)
        weight.grad = total
        before = weight.clone()
        optimizer.step()
        torch.testing.assert_close(before - weight, velocity)


@pytest.mark.parametrize(("forget", "sent_now"), [(True, 1.0), (False, 3.0)])
def test_unsent_elements_gather_momentum_and_sent_ones_may_start_from_rest(
    forget: bool, sent_now: float
) -> None:
    feedback = ErrorFeedback(0.5, forget_sent_momentum=forget)
    values = torch.tensor([4.0, 1.0])
    feedback.compensate("0", 0, values)
    feedback.keep("0", 0, values, torch.tensor([4.0, 0.0]))
    values = torch.tensor([1.0, 1.0])
    feedback.compensate("0", 0, values)
    # unsent: owed 1, and velocity 0.5 * 1 + 1
    assert values.tolist() == [sent_now, 2.5]


def test_where_everything_is_sent_momentum_correction_changes_nothing() -> None:
    feedback, undo = ErrorFeedback(0.9), MomentumUndo(0.9)
    for step in range(10):
        total = send(feedback, make_codec("none"), gradient(step))
        undo.undo_("0", 0, total)
        torch.testing.assert_close(total, gradient(step), rtol=1e-4, atol=1e-5)


def test_a_dropped_step_leaves_the_momentum_of_the_step_before() -> None:
    undo, clean = MomentumUndo(0.9), MomentumUndo(0.9)
    for step in range(3):
        total, expected = gradient(step), gradient(step)
        undo.undo_("0", 0, total)
        clean.undo_("0", 0, expected)
        assert torch.equal(total, expected)
        undo.end_step(applied=True)
        undo.undo_("0", 0, torch.full((600,), math.nan))
        undo.end_step(applied=False)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_residuals_follow_their_ranges_to_new_owners_and_buckets(momentum: float) -> None:
    sizes = [100, 250, 250]
    old_layout = lay_out(sizes, {"0": [2, 1], "1": [0]})
    new_layout = lay_out(sizes, {"0": [2], "1": [1, 0]})
    old = [ErrorFeedback(momentum), ErrorFeedback(momentum)]
    codec = make_codec("topk")
    state: dict[str, torch.Tensor] = {}
    for owner, (key, start, stop) in enumerate([("0", 0, 300), ("0", 300, 500)]):
        values = gradient(owner, stop - start)
        old[owner].compensate(key, start, values)
        old[owner].keep(key, start, values, torch.zeros_like(values))
        state |= old[owner].state("total", old_layout)
    assert codec.name == "topk"
    before = torch.zeros(600)
    for piece in state_pieces(state):
        before[piece.start : piece.stop] = state[piece.name][0]

    new_pieces = [
        Piece(owner=5, side="total", start=0, stop=400),
        Piece(owner=6, side="total", start=400, stop=600),
    ]
    moves = plan_moves(state_pieces(state), new_pieces)
    after = torch.zeros(600)
    for owner in (5, 6):
        feedback = ErrorFeedback(momentum)
        mine = [move for move in moves if move.to_owner == owner]
        feedback.load("total", new_layout, state, mine)
        kept = feedback.state("total", new_layout)
        for piece in feedback.pieces("total", new_layout, owner):
            assert new_pieces[owner - 5].start <= piece.start
            assert piece.stop <= new_pieces[owner - 5].stop
            after[piece.start : piece.stop] += kept[piece.name][0]
    assert torch.equal(after, before)


def test_a_restored_run_sends_what_the_uninterrupted_one_sends() -> None:
    layout = lay_out([600], {"0": [0]})
    codec = make_codec("int4")
    run = ErrorFeedback()
    for step in range(4):
        send(run, codec, gradient(step), (256, 512))
    state = run.state("total", layout)
    pieces = state_pieces(state)
    restored = ErrorFeedback()
    restored.load("total", layout, state, plan_moves(pieces, pieces))
    assert torch.equal(
        send(run, codec, gradient(7), (256, 512)),
        send(restored, codec, gradient(7), (256, 512)),
    )


def test_losses_of_two_sides_that_become_one_add_up() -> None:
    layout = lay_out([10], {"0": [0]})
    state = {
        "partial-a:0": torch.full((1, 10), 2.0),
        "partial-b:0": torch.full((1, 10), 3.0),
    }
    new = [Piece(owner=0, side="total", start=0, stop=10)]
    feedback = ErrorFeedback()
    feedback.load("total", layout, state, plan_moves(state_pieces(state), new))
    assert owed(feedback, 10).tolist() == [5.0] * 10


def test_a_state_of_another_kind_is_refused() -> None:
    layout = lay_out([10], {"0": [0]})
    state = {"total:0": torch.zeros(2, 10)}
    pieces = state_pieces(state)
    with pytest.raises(ConfigError, match="momentum"):
        ErrorFeedback().load("total", layout, state, plan_moves(pieces, pieces))
    with pytest.raises(ConfigError, match="SIDE:START"):
        state_pieces({"total": torch.zeros(1, 10)})
    with pytest.raises(ConfigError, match="momentum"):
        ErrorFeedback(momentum=1.0)


def test_memory_is_two_floats_an_element_that_is_kept() -> None:
    feedback = ErrorFeedback()
    send(feedback, make_codec("int8"), gradient(0))
    assert feedback.num_bytes == 2 * 4 * 600
