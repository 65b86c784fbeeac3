"""The gradient log and its replay: the same bits, in fewer bytes."""

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from geartrain.checkpoint.agent.messages import LogStep
from geartrain.checkpoint.agent.shard_layout import copy_gradients
from geartrain.checkpoint.gradient_log import LoggedStep, decode_step, encode_slot
from geartrain.checkpoint.ranges import StateRange
from geartrain.checkpoint.replay import (
    AppliedUpdate,
    ReplayTarget,
    read_hyperparameters,
    replay_steps,
)
from geartrain.collectives.codecs.rows import Int8Codec
from geartrain.errors import CheckpointError

_NUM_STEPS = 7

Part = tuple[StateRange, torch.Tensor]


def _encode(
    parts: Sequence[Part],
    update: dict[str, Any] | None = None,  # Any: JSON
    step: int = 1,
    lineages: tuple[str, str] = ("a", "b"),
    *,
    compress: bool = True,
) -> bytes:
    slot = memoryview(bytearray(sum(t.numel() * t.element_size() + 16 for _, t in parts)))
    placed = copy_gradients(parts, slot)
    record = LogStep(
        slot_index=0,
        step=step,
        previous_lineage=lineages[0],
        lineage=lineages[1],
        update=update or {},
        parts=placed,
    )
    return encode_slot(record, slot, compress=compress)


def _whole(name: str, tensor: torch.Tensor) -> Part:
    return StateRange(name=name, start=0, stop=tensor.numel()), tensor


@given(
    values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=64),
    repeats=st.integers(1, 60),
    compress=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_bits_come_back(values: list[int], repeats: int, compress: bool) -> None:
    words = torch.from_numpy(np.array(values * repeats, dtype=np.uint32).view(np.int32))
    for dtype in (torch.float32, torch.bfloat16, torch.float64, torch.uint8):
        count = words.numel() * 4 // dtype.itemsize
        tensor = words.view(torch.uint8)[: count * dtype.itemsize].view(dtype)

        decoded = decode_step(_encode([_whole("w", tensor)], compress=compress))

        assert decoded.parts[0].data == tensor.view(torch.uint8).numpy().tobytes()


def test_several_parts_keep_their_names_and_dtypes() -> None:
    parts = [
        _whole("w", torch.randn(3, 5)),
        (StateRange(name="v", start=2, stop=6), torch.randn(4)),
        _whole("h", torch.randn(7).bfloat16()),
        _whole("count", torch.tensor(3)),
        _whole("none", torch.empty(0)),
    ]

    decoded = decode_step(_encode(parts))

    assert [part.range for part in decoded.parts] == [named for named, _ in parts]
    for part, (_, tensor) in zip(decoded.parts, parts, strict=True):
        expected = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert (part.dtype, part.data) == (str(tensor.dtype)[6:], expected)


@pytest.mark.parametrize("num_elements", [1024, 5000, 1 << 16])
def test_what_an_8_bit_exchange_gave_takes_a_byte_a_value(num_elements: int) -> None:
    torch.manual_seed(num_elements)
    values, codec = torch.randn(num_elements) * 1e-3, Int8Codec()
    code = torch.empty(codec.encoded_bytes(num_elements), dtype=torch.uint8)
    codec.encode(values, code)
    message = torch.empty_like(values)
    codec.decode(code, message)

    data = _encode([_whole("w", message)])

    assert decode_step(data).parts[0].data == message.view(torch.uint8).numpy().tobytes()
    assert len(data) < 1.02 * num_elements + 400


def test_float32_takes_at_most_28_percent_of_an_adam_state() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(1 << 18) * torch.rand(1 << 18).exp2()

    share = len(_encode([_whole("w", gradient)])) / (12 * gradient.numel())

    assert share < 0.29  # 24 of 32 bits are random: nothing lossless gets below 0.25
    assert len(_encode([_whole("w", torch.zeros(1 << 18))])) < 1000


def test_a_step_that_is_cut_off_or_too_long_is_refused() -> None:
    data = _encode([_whole("w", torch.randn(50))])
    for cut in (0, 3, 10, len(data) - 1):
        with pytest.raises(CheckpointError, match="can't be read"):
            decode_step(data[:cut])
    with pytest.raises(CheckpointError, match="too many"):
        decode_step(data + b"x")


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


_OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=False),
    "adamw_fused": lambda p: torch.optim.AdamW(p, lr=3e-3, fused=True),
    "adam_amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, foreach=False),
    "sgd_momentum": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "two_groups": lambda p: torch.optim.AdamW(
        [{"params": p[:2], "weight_decay": 0.1}, {"params": p[2:], "lr": 1e-2}], lr=1e-3
    ),
}


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: torch.optim.lr_scheduler.LRScheduler,
    scaler: torch.amp.GradScaler | None,
    *,
    with_skip: bool,
) -> list[bytes]:
    """Train as the step engine does, and log each step."""
    generator = torch.Generator().manual_seed(5)
    names = dict(model.named_parameters())
    logged, lineage = [], "start"
    for step in range(1, _NUM_STEPS + 1):
        inputs = torch.randn(16, 6, generator=generator)
        optimizer.zero_grad()
        loss = model(inputs).square().mean()
        (scaler.scale(loss) if scaler else loss).backward()
        if step == 4:
            names["3.bias"].grad = None  # as where no rank touched it
        if with_skip and step == 3:
            grad = names["0.weight"].grad
            assert grad is not None
            grad[0, 0] = torch.inf
        parts = [
            *(_whole(n, p.grad) for n, p in names.items() if p.grad is not None),
            *(_whole(f"buffer/{n}", b) for n, b in model.named_buffers()),
        ]
        parts = [(named, values.detach().clone()) for named, values in parts]
        update = _apply(names, optimizer, scaler, factor=16 / (15 + step))
        untouched = tuple(n for n, p in names.items() if p.grad is None)
        scheduler.step()
        update = dataclasses.replace(
            update,
            untouched=untouched,
            extras={"scheduler": scheduler.state_dict()["last_epoch"], "step": step},
        )
        after = f"{step}"
        data = _encode(parts, update.to_json(), step, (lineage, after))
        logged.append(data)
        lineage = after
    return logged


def _apply(
    names: dict[str, nn.Parameter],
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    factor: float,
) -> AppliedUpdate:
    parameters = list(names.values())
    grads = [p.grad for p in parameters if p.grad is not None]
    torch._foreach_mul_(grads, factor)
    scale = scaler.get_scale() if scaler else None
    if scaler:
        scaler.unscale_(optimizer)
    norm = float(nn.utils.clip_grad_norm_(parameters, 0.05))
    groups = read_hyperparameters(optimizer)
    is_skipped = False
    if scaler:
        scaler.step(optimizer)
        scaler.update()
        is_skipped = scale is not None and scaler.get_scale() < scale
    else:
        optimizer.step()
    return AppliedUpdate(
        groups=groups,
        factor=factor,
        loss_scale=scale,
        max_grad_norm=0.05,
        grad_norm=norm if np.isfinite(norm) else None,
        is_skipped=is_skipped,
    )


def _bits(tree: Any) -> Any:  # Any: state dicts
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return {key: _bits(value) for key, value in tree.items()}
    return [_bits(v) for v in tree] if isinstance(tree, list | tuple) else tree


@pytest.mark.parametrize("kind", _OPTIMIZERS)
@pytest.mark.parametrize("scaling", [False, True])
def test_replay_gives_the_bits_that_were_applied(kind: str, scaling: bool) -> None:
    model, twin = _model(), _model()
    optimizer = _OPTIMIZERS[kind](list(model.parameters()))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if scaling else None
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=5)
    logged = _train(model, optimizer, scheduler, scaler, with_skip=scaling)
    replayed = _OPTIMIZERS[kind](list(twin.parameters()))
    averages: list[int] = []
    target = ReplayTarget(
        parameters=dict(twin.named_parameters()),
        optimizer=replayed,
        buffers={f"buffer/{n}": b for n, b in twin.named_buffers()},
        after_step=lambda step: averages.append(step.step),
    )

    extras = replay_steps(target, [[decode_step(data)] for data in logged], "start")

    assert _bits(twin.state_dict()) == _bits(model.state_dict())
    assert _bits(replayed.state_dict()["state"]) == _bits(optimizer.state_dict()["state"])
    assert extras == {"scheduler": _NUM_STEPS, "step": _NUM_STEPS}
    assert averages == list(range(1, _NUM_STEPS + 1))
    if scaling:
        states = [decode_step(data).update["is_skipped"] for data in logged]
        assert states == [step == 3 for step in range(1, _NUM_STEPS + 1)]


def test_replay_joins_what_unequal_members_logged() -> None:
    model, twin = nn.Linear(5, 4), nn.Linear(5, 4)
    twin.load_state_dict(copy.deepcopy(model.state_dict()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(3, 5)).sum().backward()
    update = AppliedUpdate(groups=read_hyperparameters(optimizer)).to_json()
    assert model.weight.grad is not None
    assert model.bias.grad is not None
    weight, bias = model.weight.grad.reshape(-1), model.bias.grad
    shards: list[list[Part]] = [
        [(StateRange(name="weight", start=0, stop=3), weight[:3].clone())],
        [
            (StateRange(name="weight", start=3, stop=20), weight[3:].clone()),
            _whole("bias", bias.clone()),
        ],
    ]
    optimizer.step()
    logged = [decode_step(_encode(shard, update)) for shard in shards]
    target = ReplayTarget(
        parameters=dict(twin.named_parameters()),
        optimizer=torch.optim.AdamW(twin.parameters(), lr=0.1),
    )

    with pytest.raises(CheckpointError, match=r"nobody holds bias\[0:4\], weight\[3:20\]"):
        replay_steps(target, [logged[:1]], "a")
    replay_steps(target, [logged], "a")

    assert _bits(twin.state_dict()) == _bits(model.state_dict())


def test_a_gap_or_another_history_is_refused() -> None:
    step = LoggedStep(step=5, previous_lineage="x", lineage="y", update={}, parts=())
    model = nn.Linear(2, 2)
    target = ReplayTarget(
        parameters=dict(model.named_parameters()),
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
    )

    with pytest.raises(CheckpointError, match="step 5 of the log does not follow"):
        replay_steps(target, [[step]], "z")
    with pytest.raises(CheckpointError, match="does not say how"):
        replay_steps(target, [[step]], "x")
