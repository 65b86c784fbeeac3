from __future__ import annotations

import logging
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import pytest

from geartrain.devices.registry import adapter_for, load_adapter, load_adapters
from geartrain.errors import ConfigError


def add_entry_points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    def with_more(*, group: str) -> list[Any]:
        more = [EntryPoint(name=n, value=v, group=group) for n, v in values.items()]
        return [*entry_points(group=group), *more]

    monkeypatch.setattr("geartrain.devices.registry.entry_points", with_more)


def test_adapter_is_found_by_the_kind_of_a_device_id() -> None:
    assert adapter_for("cuda:3").kind == "cuda"
    assert adapter_for("cpu").kind == "cpu"


def test_unknown_kind_lists_the_known() -> None:
    with pytest.raises(ConfigError, match=r"'tpu'; known are cpu, cuda, emulated"):
        load_adapter("tpu")


def test_broken_third_party_adapter_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add_entry_points(
        monkeypatch,
        absent="no_such_module:Adapter",
        failing="geartrain.units:parse_bytes",  # raises without its argument
        other="collections:OrderedDict",  # is no adapter
    )

    with caplog.at_level(logging.WARNING):
        loaded = load_adapters()

    assert "cpu" in loaded
    assert not {"absent", "failing", "other"} & set(loaded)
    for name in ("absent", "failing", "other"):
        assert f"device adapter {name} " in caplog.text


def test_broken_adapter_that_was_asked_for_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add_entry_points(monkeypatch, absent="no_such_module:Adapter")

    with pytest.raises(ConfigError, match="no_such_module:Adapter of 'absent' is broken"):
        load_adapter("absent")
