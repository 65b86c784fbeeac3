"""Local SGD and DiLoCo: what they do is stated, weighted by samples, and saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import geartrain as gt
from geartrain.data.order import GlobalOrder
from geartrain.errors import CheckpointError, CommunicationError, ConfigError
from geartrain.parallel.low_communication import DiLoCo, LocalSGD, ModelAverager
from geartrain.telemetry import RunLogReader
from local_ranks import run_ranks
from small_models import CASES, build, plan_of
from worker_sessions import worker_session

BATCH = 24
NUM_SAMPLES = 4 * BATCH
UNEVEN = [5, 19]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(
    rank: int,
    world_size: int,
    algorithm: Any,
    plans: dict[int, gt.planner.Plan],
    num_steps: int,
    *,
    name: str = "mlp",
    momentum: float = 0.0,
    save_at: tuple[int, str] | None = None,
    load_from: str | None = None,
    deterministic: bool = False,
) -> tuple[list[float], torch.Tensor]:
    """Losses, and the parameters after the last step, not averaged."""
    case = CASES[name]
    session = gt.Session(seed=0, plan=plans[0], deterministic=deterministic)
    model = build(case, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=momentum)
    session.setup(model, optimizer, loss_fn=case.loss_fn, algorithm=algorithm)
    loader = session.setup_dataloader(
        case.make_data(NUM_SAMPLES, torch.float32), global_batch_size=BATCH
    )
    if load_from is not None:
        session.load(load_from)
    losses: list[float] = []
    while session.step_index < num_steps:
        for batch in loader:
            losses.append(session.step(batch))
            if session.step_index in plans:
                session.apply_plan(plans[session.step_index])
            if save_at is not None and session.step_index == save_at[0]:
                session.save(save_at[1])
            if session.step_index == num_steps:
                break
    session.close()
    return losses, flat(model)


# -- against the exact step, and against what the papers say ----------------------------


def train_both_ways(rank: int, world_size: int) -> list[tuple[list[float], torch.Tensor]]:
    plans = {0: plan_of(UNEVEN), 3: plan_of([14, 10], [4, 3])}
    return [
        train(rank, world_size, algorithm, plans, 6)
        for algorithm in (
            "exact",
            LocalSGD(sync_every=1),
            LocalSGD(sync_every=3),
            DiLoCo(sync_every=3, outer_lr=1.0, outer_momentum=0.0),
        )
    ]


def test_averaging_every_step_of_sgd_is_the_exact_step() -> None:
    for exact, every_step, every_third, outer in run_ranks(train_both_ways, 2):
        assert every_step[0] == pytest.approx(exact[0], abs=1e-5)
        torch.testing.assert_close(every_step[1], exact[1], rtol=0, atol=1e-6)
        # A plain outer step is the average, bit for bit.
        assert torch.equal(outer[1], every_third[1])
        assert not torch.allclose(every_third[1], exact[1], rtol=0, atol=1e-5)


def train_uneven(
    rank: int, world_size: int, algorithm: LocalSGD | DiLoCo
) -> tuple[list[float], torch.Tensor]:
    return train(rank, world_size, algorithm, {0: plan_of(UNEVEN)}, 4, momentum=0.9)


def follow_by_hand(sync_every: int, lr: float, momentum: float) -> torch.Tensor:
    """Two models in one process, averaged by 5 and 19 samples a step, as in the papers."""
    case = CASES["mlp"]
    models = [build(case, torch.float32) for _ in UNEVEN]
    inner = [torch.optim.SGD(m.parameters(), lr=0.2, momentum=0.9) for m in models]
    outer_parameter = torch.nn.Parameter(flat(models[0]))
    outer = torch.optim.SGD(
        [outer_parameter], lr=lr, momentum=momentum, nesterov=momentum > 0
    )
    data = case.make_data(NUM_SAMPLES, torch.float32)
    order = GlobalOrder(
        num_samples=NUM_SAMPLES,
        global_batch_size=BATCH,
        seed=0,
        shuffle=True,
        drop_last=False,
    )
    permutation = order.permutation(0).tolist()
    for step in range(4):
        start, _ = order.batch_bounds(step)
        for model, optimizer, share in zip(models, inner, UNEVEN, strict=True):
            rows = [data[i] for i in permutation[start : start + share]]
            start += share
            batch = torch.utils.data.default_collate(rows)
            optimizer.zero_grad()
            torch.autograd.backward(case.loss_fn(model(batch[0]), batch).mean())
            optimizer.step()
        if (step + 1) % sync_every == 0:
            moved = [
                share / BATCH * flat(m) for m, share in zip(models, UNEVEN, strict=True)
            ]
            outer_parameter.grad = outer_parameter.detach() - sum(moved)
            outer.step()
            for model in models:
                torch.nn.utils.vector_to_parameters(
                    outer_parameter.detach().clone(), model.parameters()
                )
    return flat(models[0])


@pytest.mark.parametrize(
    ("algorithm", "lr", "momentum"),
    [
        (LocalSGD(sync_every=2), 1.0, 0.0),
        (DiLoCo(sync_every=2, outer_lr=0.7, outer_momentum=0.9), 0.7, 0.9),
    ],
)
def test_models_are_averaged_by_the_samples_they_have_seen(
    algorithm: LocalSGD | DiLoCo, lr: float, momentum: float
) -> None:
    expected = follow_by_hand(2, lr, momentum)

    results = run_ranks(train_uneven, 2, algorithm)

    for _, parameters in results:
        torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-5)
        assert torch.equal(parameters, results[0][1])


def train_two_terms(rank: int, world_size: int) -> list[torch.Tensor]:
    plans = {0: plan_of([BATCH], [7])}
    return [
        train(rank, world_size, algorithm, plans, 3, name="gpt_two_terms")[1]
        for algorithm in ("exact", LocalSGD(sync_every=2))
    ]


def test_a_single_device_makes_its_own_steps_with_several_loss_terms() -> None:
    ((exact, local),) = run_ranks(train_two_terms, 1)

    torch.testing.assert_close(local, exact, rtol=0, atol=1e-6)


def compare_quality(rank: int, world_size: int) -> list[float]:
    plans = {0: plan_of(UNEVEN)}
    algorithms: list[Any] = ["exact", LocalSGD(sync_every=5), DiLoCo(sync_every=5)]
    finals = []
    for algorithm in algorithms:
        losses, _ = train(rank, world_size, algorithm, plans, 100)
        finals.append(sum(losses[-4:]) / 4)  # the last epoch
    return finals


def test_quality_stays_near_that_of_exact_steps() -> None:
    exact, local, outer = run_ranks(compare_quality, 2)[0]

    assert local <= 1.02 * exact
    assert outer <= 1.05 * exact


# -- members, saving, telling -------------------------------------------------------------


def change_members(rank: int, world_size: int) -> torch.Tensor:
    """The third rank comes in the middle of a round, and goes in that of another."""
    plans = {0: plan_of([10, 14, 0]), 3: plan_of([8, 8, 8]), 7: plan_of([24, 0, 0])}
    case = CASES["mlp"]
    session = gt.Session(seed=0, plan=plans[0])
    model = build(case, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    session.setup(model, optimizer, loss_fn=case.loss_fn, algorithm=DiLoCo(sync_every=5))
    loader = session.setup_dataloader(
        case.make_data(NUM_SAMPLES, torch.float32), global_batch_size=BATCH
    )
    for _ in range(2):
        for batch in loader:
            session.step(batch)
            if session.step_index in plans and session.step_index < 7:
                session.apply_plan(plans[session.step_index])
    session.average_models()
    parameters = flat(model)
    session.close()
    return parameters


def test_a_device_that_comes_takes_on_the_model_of_all() -> None:
    first, second, third = run_ranks(change_members, 3)

    assert torch.equal(first, second)
    assert torch.equal(first, third)


def interrupt(rank: int, world_size: int, folder: str) -> list[torch.Tensor]:
    plans = {0: plan_of(UNEVEN)}
    results = []
    # At step 4 the first is averaged, and half of the second in the middle of its round.
    algorithms = (DiLoCo(sync_every=2), DiLoCo(sync_every=4, fragments=2))
    for index, chosen in enumerate(algorithms):
        path = f"{folder}/{index}"
        whole = train(rank, world_size, chosen, plans, 8, save_at=(4, path))[1]
        resumed = train(rank, world_size, chosen, plans, 8, load_from=path)[1]
        results += [whole, resumed]
    return results


def test_a_saved_run_goes_on_with_its_outer_momentum(tmp_path: Path) -> None:
    first, second = run_ranks(interrupt, 2, str(tmp_path))

    assert torch.equal(first[0], first[1])
    # Saved in the middle of a round all go on from rank 0's model: near, and all alike.
    assert torch.isfinite(first[3]).all()
    assert (first[3] - first[2]).norm() < 0.1 * first[2].norm()
    assert torch.equal(first[1], second[1])


def run_recorded(rank: int, world_size: int, folder: Path) -> None:
    session = worker_session(rank, world_size, folder, deterministic=True)
    case = CASES["mlp"]
    model = build(case, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session.setup(model, optimizer, loss_fn=case.loss_fn, algorithm=LocalSGD(sync_every=2))
    loader = session.setup_dataloader(
        case.make_data(BATCH * 2, torch.float32), global_batch_size=BATCH
    )
    for batch in loader:
        session.step(batch)
    session.close()


def test_the_run_log_says_that_the_step_is_another(tmp_path: Path) -> None:
    run_ranks(run_recorded, 2, tmp_path)

    notes = [event.message for event in RunLogReader(tmp_path).new_events()]
    assert any("local_sgd: not the single-device step" in note for note in notes)


def test_an_algorithm_that_does_not_exist_is_refused() -> None:
    session = gt.Session()
    model = build(CASES["cnn_batchnorm"], torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrong: Any = "diloco"
    with pytest.raises(ConfigError, match="DiLoCo"):
        session.setup(model, optimizer, algorithm=wrong)
    with pytest.raises(ConfigError, match="sync_batchnorm"):
        session.setup(model, optimizer, algorithm=LocalSGD(), sync_batchnorm=True)


# -- the averager alone -------------------------------------------------------------------


class Recorder:
    """One other member, whose model does not move; remembers what was sent."""

    num_members = 2

    def __init__(self) -> None:
        self.sent: list[tuple[str | None, int, float]] = []
        self.fails = False

    def all_reduce(
        self, tensor: torch.Tensor, weight: float = 1.0, *, key: str | None = None
    ) -> Recorder:
        self.sent.append((key, tensor.numel(), weight))
        tensor.mul_(weight)
        return self

    def wait(self) -> None:
        if self.fails:
            msg = "a peer is gone"
            raise CommunicationError(msg)

    def predict_s(self, num_bytes: int) -> float:
        return 0.0


def make_averager(
    algorithm: LocalSGD | DiLoCo, dtype: torch.dtype = torch.float32
) -> tuple[ModelAverager, list[torch.nn.Parameter], Recorder]:
    parameters = [torch.nn.Parameter(torch.zeros(size, dtype=dtype)) for size in (6, 4, 2)]
    averager = ModelAverager(parameters, algorithm, rank=0)
    averager.collective = recorder = Recorder()
    return averager, parameters, recorder


def move(parameters: list[torch.nn.Parameter], by: float) -> None:
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(by)


def test_fragments_take_turns() -> None:
    averager, _, recorder = make_averager(DiLoCo(sync_every=4, fragments=2))

    sizes = []
    for _ in range(8):
        recorder.sent.clear()
        averager.after_step([1.0, 1.0])
        sizes.append([size for _, size, _ in recorder.sent])

    assert sizes == [[], [6], [], [6], [], [6], [], [6]]


def test_fragments_of_as_many_parameters_are_told_apart() -> None:
    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(4)]
    averager = ModelAverager(parameters, DiLoCo(sync_every=4, fragments=2), rank=0)
    averager.collective = recorder = Recorder()

    for _ in range(4):
        averager.after_step([1.0, 1.0])

    assert [key for key, _, _ in recorder.sent] == ["movement1/0", "movement0/0"]


def test_a_lost_peer_leaves_the_models_and_the_average_due() -> None:
    averager, parameters, recorder = make_averager(LocalSGD(sync_every=2))
    recorder.fails = True
    for _ in range(2):
        move(parameters, 1.0)
        averager.after_step([1.0, 3.0])
    assert parameters[0].tolist() == [2.0] * 6

    recorder.fails = False
    move(parameters, 1.0)
    averager.after_step([2.0, 0.0])

    # 4 of 10 samples moved by 3; the other model did not.
    assert parameters[0].tolist() == pytest.approx([1.2] * 6)


def test_small_movements_of_16_bit_parameters_are_not_lost() -> None:
    averager, parameters, _ = make_averager(
        DiLoCo(sync_every=1, outer_lr=1e-3, outer_momentum=0.0), torch.bfloat16
    )
    move(parameters, 1.0)
    averager.after_step([1.0, 0.0])
    for _ in range(1000):
        move(parameters, 1.0)
        averager.after_step([1.0, 0.0])

    assert float(parameters[0][0].detach()) == pytest.approx(1.0, rel=0.05)


def test_settling_between_averages_moves_nothing() -> None:
    averager, parameters, recorder = make_averager(DiLoCo(sync_every=2))
    for _ in range(2):
        move(parameters, 1.0)
        averager.after_step([1.0, 1.0])
    before = [p.detach().clone() for p in parameters]
    recorder.sent.clear()

    averager.settle()

    assert not recorder.sent
    assert all(torch.equal(a, b) for a, b in zip(before, parameters, strict=True))


def test_the_state_of_other_fragments_is_refused() -> None:
    averager, _, _ = make_averager(DiLoCo(fragments=2))
    other, _, _ = make_averager(DiLoCo(fragments=1))

    with pytest.raises(CheckpointError, match="2 fragments"):
        other.load_state_dict(averager.state_dict())


@pytest.mark.parametrize(
    ("settings", "values"),
    [
        (LocalSGD, {"sync_every": 0}),
        (DiLoCo, {"sync_every": 2, "fragments": 3}),
        (DiLoCo, {"outer_lr": 0.0}),
        (DiLoCo, {"outer_momentum": 1.0}),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, values: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="must be"):
        settings(**values)
