"""What a newcomer does wrong: the error says what was seen, expected, and to be done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import geartrain as gt
from geartrain.errors import ConfigError
from local_ranks import run_ranks
from small_models import Mlp, mean_cross_entropy, plan_of, vectors
from training_jobs import BATCH, Job, make_sgd, run_steps, train_on_ranks

DATA = vectors(24, torch.float32)


def ready(**options: Any) -> tuple[gt.Session, nn.Module]:
    session, model = gt.Session(), Mlp()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy, **options)
    return session, model


def test_a_step_before_setup() -> None:
    with pytest.raises(ConfigError, match=r"call session\.setup\(model, optimizer"):
        gt.Session().step((torch.zeros(2, 6), torch.zeros(2)))


def test_a_batch_before_setup() -> None:
    loader = gt.Session().setup_dataloader(DATA, global_batch_size=BATCH)

    with pytest.raises(ConfigError, match=r"call session\.setup\(model, optimizer"):
        next(iter(loader))


def test_setup_twice() -> None:
    session, model = ready()

    with pytest.raises(ConfigError, match=r"setup\(\) was called twice; make a new"):
        session.setup(model, make_sgd(model))


class Stream(torch.utils.data.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_dataset_without_random_access() -> None:
    with pytest.raises(ConfigError, match=r"Stream.*map-style"):
        gt.Session().setup_dataloader(
            Stream(),  # type: ignore[arg-type]  # what is tested
            global_batch_size=2,
        )


def test_a_dataset_smaller_than_the_batch() -> None:
    with pytest.raises(
        ConfigError, match=r"24 samples, fewer than global_batch_size=32; lower"
    ):
        gt.Session().setup_dataloader(DATA, global_batch_size=32)


def batch_of_one(rank: int, world_size: int) -> None:
    gt.Session().setup_dataloader(DATA, global_batch_size=1)


def test_a_global_batch_smaller_than_the_devices() -> None:
    with pytest.raises(
        ConfigError, match="global_batch_size=1 is smaller than the number of devices, 2;"
    ):
        run_ranks(batch_of_one, 2)


def test_a_batch_of_another_form() -> None:
    session, _ = ready()
    loader = session.setup_dataloader(DATA, global_batch_size=BATCH)

    for batch in loader:
        with pytest.raises(ConfigError, match=r"neither a pair.*setup\(forward_fn"):
            session.step(batch[0])


def test_a_part_of_the_batch() -> None:
    session, _ = ready()
    loader = session.setup_dataloader(DATA, global_batch_size=BATCH)
    inputs, targets = next(iter(loader))

    with pytest.raises(ConfigError, match="got 5 samples but this device's share is 12"):
        session.step((inputs[:5], targets[:5]))


def test_columns_of_different_lengths() -> None:
    session, _ = ready()
    inputs, targets = next(iter(session.setup_dataloader(DATA, global_batch_size=BATCH)))

    with pytest.raises(ConfigError, match=r"leading sizes of a batch differ.*12.*5"):
        session.step((inputs, targets[:5]))


def step_on_own_batch(rank: int, world_size: int) -> None:
    session, _ = ready()
    session.step((DATA.inputs, DATA.targets))


def test_a_batch_from_elsewhere_on_several_devices() -> None:
    with pytest.raises(ConfigError, match=r"take batches from session\.setup_dataloader"):
        run_ranks(step_on_own_batch, 2)


def test_a_batch_from_elsewhere_on_one_device_trains() -> None:
    session, _ = ready()

    losses = [session.step((DATA.inputs, DATA.targets)) for _ in range(5)]

    assert losses[-1] < losses[0]


def test_an_unknown_precision() -> None:
    with pytest.raises(ConfigError, match="precision='int8' must be one of fp32, bf16"):
        ready(precision="int8")


def test_a_model_without_parameters_to_train() -> None:
    model = Mlp().requires_grad_(False)
    session = gt.Session()
    session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
    loader = session.setup_dataloader(DATA, global_batch_size=BATCH)

    with pytest.raises(ConfigError, match="does not depend on any trainable parameter"):
        run_steps(session, loader, 1)


def frozen_on_ranks(rank: int, world_size: int) -> None:
    model = Mlp().requires_grad_(False)
    gt.Session().setup(model, make_sgd(model), loss_fn=mean_cross_entropy)


def test_a_model_without_parameters_to_train_on_several_devices() -> None:
    with pytest.raises(ConfigError, match="no parameter that takes a gradient"):
        run_ranks(frozen_on_ranks, 2)


def other_model_on_rank_1(rank: int, world_size: int) -> None:
    model = nn.Linear(6, 3 + rank)
    gt.Session().setup(model, make_sgd(model), loss_fn=mean_cross_entropy)


def test_another_model_on_one_rank() -> None:
    with pytest.raises(ConfigError, match="cpu#1 built another model than cpu#0"):
        run_ranks(other_model_on_rank_1, 2)


def test_a_plan_for_another_batch() -> None:
    job = Job(batch_size=10)

    with pytest.raises(ConfigError, match="global batch of 12 but the script asks for 10"):
        run_ranks(train_on_ranks, 2, job, {0: plan_of([6, 6])})


def test_a_plan_for_a_batch_that_no_loader_has() -> None:
    session, _ = ready()

    with pytest.raises(ConfigError, match=r"no loader has global_batch_size=12.*none yet"):
        session.apply_plan(plan_of([12]))


def different_seeds(rank: int, world_size: int) -> list[list[float]]:
    """One session after the other, in one process: the second gets no old answers."""
    curves = []
    for width in (4, 8):
        torch.manual_seed(rank)  # setup gives all ranks rank 0's weights
        model = nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3)).double()
        session = gt.Session(plan=plan_of([8, 4], [4, 4]))
        session.setup(model, make_sgd(model), loss_fn=mean_cross_entropy)
        loader = session.setup_dataloader(
            vectors(36, torch.float64), global_batch_size=BATCH
        )
        curves.append(run_steps(session, loader, 3))
        session.close()
    return curves


def test_two_sessions_in_one_process_train_two_models() -> None:
    first, second = run_ranks(different_seeds, 2)

    assert first == second
    assert first[0] != first[1]


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), F.cross_entropy])
def test_a_loss_of_torch_as_it_stands(criterion: Any) -> None:
    model = Mlp()

    with pytest.raises(
        ConfigError, match=r"takes \(output, target\).*lambda output, batch"
    ):
        gt.Session().setup(model, make_sgd(model), loss_fn=criterion)


def test_model_and_optimizer_in_the_wrong_order() -> None:
    model: Any = Mlp()

    with pytest.raises(ConfigError, match=r"got model=SGD, expected.*Module"):
        gt.Session().setup(make_sgd(model), model)  # type: ignore[arg-type]  # what is tested


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_grad_norm": -1.0}, r"max_grad_norm=-1\.0 must be > 0"),
        ({"micro_batch_size": 0}, "micro_batch_size=0 must be >= 1"),
        ({"count_fn": 3}, "count_fn=3 must be a function"),
    ],
)
def test_an_option_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ready(**options)


def test_a_global_batch_that_is_no_whole_number() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=12\.0 must be a whole"):
        gt.Session().setup_dataloader(
            DATA,
            global_batch_size=12.0,  # type: ignore[arg-type]  # what is tested
        )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (torch.zeros(()), r"backward\(\) got a scalar.*count=n"),
        (0.5, r"backward\(\) got float"),
    ],
)
def test_backward_of_what_is_no_unreduced_loss(loss: Any, message: str) -> None:
    session, _ = ready()
    batch = next(iter(session.setup_dataloader(DATA, global_batch_size=BATCH)))

    for _ in session.micro_batches(batch):
        with pytest.raises(ConfigError, match=message):
            session.backward(loss)
        break


def test_evaluation_with_a_loader_of_torch() -> None:
    session, _ = ready()
    loader: Any = torch.utils.data.DataLoader(DATA, batch_size=2)

    with pytest.raises(ConfigError, match=r"evaluate\(\) got a DataLoader"):
        session.evaluate(loader, lambda output, batch: {})


def test_a_metric_that_is_a_mean() -> None:
    session, _ = ready()
    loader = session.setup_dataloader(DATA, global_batch_size=BATCH)

    with pytest.raises(ConfigError, match=r"metric_fn returned 'loss' as Tensor"):
        session.evaluate(loader, lambda output, batch: {"loss": output.mean()})
