"""A single process. The device is a stand-in whose copies arrive only when waited for."""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from geartrain.collectives.host_groups.host_buffers import HostBuffers
from geartrain.collectives.host_groups.lone import LoneGroup, StagedExchange
from geartrain.collectives.host_groups.staging import SideStreams
from geartrain.errors import CommunicationError, ConfigError

CHUNKS = [(0, 40), (40, 80), (80, 100)]


class LazyStream:
    """Keeps its work until somebody waits for it, as a busy device would."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.work: deque[Callable[[], object]] = deque()

    def wait_stream(self, other: "LazyStream") -> None:
        self.work.append(other.run)

    def synchronize(self) -> None:
        self.run()

    def run(self) -> None:
        while self.work:
            self.work.popleft()()


class LazyEvent:
    def record(self, stream: LazyStream) -> None:
        self._stream = stream
        self._is_done = False
        stream.work.append(self._finish)

    def _finish(self) -> None:
        self._is_done = True

    def synchronize(self) -> None:
        while not self._is_done:
            self._stream.work.popleft()()


class LazySpace:
    """What ``torch.cuda`` offers, for tensors that are host memory in truth."""

    Stream = LazyStream
    Event = LazyEvent

    def __init__(self) -> None:
        self.compute = LazyStream()
        self.entered: list[LazyStream] = []
        self.made: list[LazyStream] = []

    def current_stream(self, device: torch.device) -> LazyStream:
        return self.compute

    @contextlib.contextmanager
    def stream(self, stream: LazyStream) -> Iterator[None]:
        self.entered.append(stream)
        try:
            with _Deferred(self):
                yield
        finally:
            self.entered.pop()


class _Deferred(torch.overrides.TorchFunctionMode):
    """In-place operations inside a stream are put into its queue."""

    def __init__(self, space: LazySpace) -> None:
        super().__init__()
        self._space = space

    def __torch_function__(
        self,
        func: Any,  # Any: as torch declares it
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func.__name__ in {"copy_", "mul_", "zero_"} and self._space.entered:
            self._space.entered[-1].work.append(lambda: func(*args, **kwargs))
            return args[0]
        return func(*args, **kwargs)


def staged(
    tensor: torch.Tensor, weight: float = 1.0, chunks: list[tuple[int, int]] | None = None
) -> tuple[SideStreams, HostBuffers, StagedExchange]:
    space = LazySpace()
    streams = SideStreams(space, torch.device("cpu"))
    buffers = HostBuffers(lambda num, dtype: torch.full((num,), -1, dtype=dtype))
    exchange = StagedExchange(tensor, chunks or CHUNKS, weight, streams, buffers)
    return streams, buffers, exchange


def test_host_tensor_is_exchanged_where_it_is() -> None:
    tensor = torch.arange(100.0)

    exchange = LoneGroup().open(tensor, CHUNKS, 0.5)
    exchange.reduce(1)

    assert exchange.host_tensor is not None
    assert exchange.host_tensor.data_ptr() == tensor.data_ptr()
    assert tensor[39] == 39
    assert tensor[40] == 20


def test_weight_of_0_does_not_read_the_tensor() -> None:
    tensor = torch.full((100,), torch.nan)
    exchange = LoneGroup().open(tensor, CHUNKS, 0.0)

    for index in range(3):
        exchange.reduce(index)

    assert torch.equal(tensor, torch.zeros(100))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_tensor_is_exchanged_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    tensor = torch.randn(100).to(dtype)
    expected = (tensor.float() * 0.3 + 1e-3).to(dtype)
    exchange = LoneGroup().open(tensor, CHUNKS, 0.3)
    host = exchange.host_tensor
    assert host is not None
    assert host.dtype == torch.float32

    for index, (start, stop) in enumerate(CHUNKS):
        exchange.reduce(index)
        host[start:stop] += 1e-3
        exchange.publish(index)
    exchange.finish()

    assert torch.equal(tensor, expected)


def test_chunk_has_arrived_from_the_device_when_reduce_returns() -> None:
    tensor = torch.arange(100.0)
    _, _, exchange = staged(tensor, weight=2.0)
    host = exchange.host_tensor
    assert host is not None
    assert host[0] == -1, "the stand-in copied before anybody waited"

    exchange.reduce(0)

    assert torch.equal(host[:40], 2 * torch.arange(40.0))
    assert host[80] == -1, "a later chunk was waited for as well"


def test_copies_follow_what_the_producer_has_queued() -> None:
    tensor = torch.zeros(100)
    space = LazySpace()
    space.compute.work.append(lambda: tensor.fill_(7.0))
    streams = SideStreams(space, torch.device("cpu"))
    buffers = HostBuffers(lambda num, dtype: torch.zeros(num, dtype=dtype))
    exchange = StagedExchange(tensor, CHUNKS, 1.0, streams, buffers)

    exchange.reduce(0)

    assert exchange.host_tensor is not None
    assert torch.equal(exchange.host_tensor[:40], torch.full((40,), 7.0))


def test_chunk_is_back_on_the_device_when_publish_returns() -> None:
    tensor = torch.zeros(100)
    _, _, exchange = staged(tensor)
    host = exchange.host_tensor
    assert host is not None
    exchange.reduce(0)
    host[:40] = 5.0

    exchange.publish(0)

    assert torch.equal(tensor[:40], torch.full((40,), 5.0))
    assert torch.equal(tensor[40:], torch.zeros(60))


def test_next_chunk_is_on_its_way_while_one_is_exchanged() -> None:
    tensor = torch.arange(100.0)
    streams, _, exchange = staged(tensor)
    exchange.reduce(0)

    streams._out.synchronize()  # the device goes on by itself

    host = exchange.host_tensor
    assert host is not None
    assert torch.equal(host, torch.arange(100.0))


def test_staged_16_bit_chunks_use_few_buffers_in_turn() -> None:
    tensor = torch.randn(1000).bfloat16()
    expected = tensor.float() * 0.7
    chunks = [(i * 100, i * 100 + 100) for i in range(10)]
    _, buffers, exchange = staged(tensor, 0.7, chunks)
    host = exchange.host_tensor
    assert host is not None

    for index in range(10):
        exchange.reduce(index)
        exchange.publish(index)
    exchange.finish()

    assert torch.equal(host, expected)
    assert torch.equal(tensor, expected.bfloat16())
    narrow = [b for (_, dtype), b in buffers._free.items() if dtype == torch.bfloat16]
    assert [len(b) for b in narrow] == [3]


def test_host_memory_is_used_again() -> None:
    group = LoneGroup()
    addresses = set()
    for _ in range(5):
        exchange = group.open(torch.ones(100).bfloat16(), CHUNKS)
        assert exchange.host_tensor is not None
        addresses.add(exchange.host_tensor.data_ptr())
        for index in range(3):
            exchange.reduce(index)
            exchange.publish(index)
        exchange.finish()

    assert len(addresses) == 1


def test_empty_tensor_passes() -> None:
    exchange = LoneGroup().open(torch.empty(0).half(), [(0, 0)])

    exchange.reduce(0)
    exchange.publish(0)
    exchange.finish()


def test_integers_are_refused() -> None:
    with pytest.raises(ConfigError, match="int64"):
        LoneGroup().open(torch.zeros(4, dtype=torch.int64), [(0, 4)])


def test_aborted_group_opens_nothing() -> None:
    group = LoneGroup()
    group.abort()

    with pytest.raises(CommunicationError, match="rebuild"):
        group.open(torch.zeros(4), [(0, 4)])
