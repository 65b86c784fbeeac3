"""From what the user asked for to a fleet: list, measure, remember."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from geartrain.devices.adapter import Progress
from geartrain.devices.fingerprint import fingerprint
from geartrain.devices.fleet_spec import FleetSpec, check_cores, parse_fleet_spec
from geartrain.devices.host import cores_present, cpu_name, host_memory_bytes, node_id
from geartrain.devices.probe_cache import ProbeCache
from geartrain.devices.probe_client import probe_client, probe_emulated
from geartrain.devices.probe_process import ProbeRequest
from geartrain.devices.profile import DeviceProfile, Fleet
from geartrain.devices.registry import adapter_kinds, load_adapter
from geartrain.errors import ConfigError
from geartrain.telemetry.documents import read_document


def resolve_fleet(  # noqa: PLR0913 - each is an option of the command line
    spec_text: str | None,
    *,
    oversubscribe: bool = False,
    probe: bool = False,
    on_progress: Progress | None = None,
    use_cache: bool = True,
    cache_dir: Path | None = None,
) -> Fleet:
    """Find the fleet that ``--fleet`` describes.

    Args:
        spec_text: The option's value; None stands for all local devices.
        oversubscribe: Allow emulated devices more cores than there are.
        probe: Measure rates. Without it the profiles tell what is there, which is
            all that a run needs: a session measures the user's own model.
        on_progress: Told what is being measured.
        use_cache: Take measurements of an earlier probe of the same thing.
        cache_dir: Where they are; None takes the user's cache directory.

    Returns:
        The fleet, in the order given; local devices with accelerators first.

    Raises:
        ConfigError: If the description is wrong or names an absent device.
        DeviceError: If a device can't be measured.
    """
    spec = parse_fleet_spec(spec_text, adapter_kinds())
    if spec.form == "emulated":
        fleet = _emulated_fleet(spec, oversubscribe=oversubscribe)
    elif spec.form == "file":
        fleet = _fleet_from_file(spec, oversubscribe=oversubscribe)
    else:
        fleet = _local_fleet(spec)
    if not probe:
        return fleet
    return probe_fleet(
        fleet, on_progress=on_progress, use_cache=use_cache, cache_dir=cache_dir
    )


def probe_fleet(
    fleet: Fleet,
    *,
    on_progress: Progress | None = None,
    use_cache: bool = True,
    cache_dir: Path | None = None,
) -> Fleet:
    """Measure a fleet's devices, or take what was measured before.

    Emulated devices are measured by processes throttled as they will be, together;
    real ones in turn, because they share the host.

    Raises:
        DeviceError: If a device can't be measured.
    """
    cache = ProbeCache(cache_dir)
    known: dict[str, DeviceProfile] = {}
    if use_cache:
        found = [cache.find(device) for device in fleet.devices]
        known = {device.device_id: device for device in found if device is not None}
    wanted = [device for device in fleet.devices if device.device_id not in known]
    emulated = [device for device in wanted if device.kind == "emulated"]
    if emulated:
        # All of them, known or not: alone they would be measured too fast.
        emulated = [device for device in fleet.devices if device.kind == "emulated"]
        _keep(probe_emulated(emulated, on_progress), known, cache)
    real = tuple(device.device_id for device in wanted if device.kind != "emulated")
    if real:
        with probe_client(on_progress) as client:
            answer = client.ask(ProbeRequest(action="probe", device_ids=real))
        _keep(answer, known, cache)
    devices = tuple(known[device.device_id] for device in fleet.devices)
    return dataclasses.replace(fleet, devices=devices)


def _keep(
    measured: Sequence[DeviceProfile], known: dict[str, DeviceProfile], cache: ProbeCache
) -> None:
    for device in measured:
        known[device.device_id] = device
        cache.keep(device)


def _emulated_fleet(spec: FleetSpec, *, oversubscribe: bool) -> Fleet:
    fractions = [device.core_fraction for device in spec.emulated]
    over = check_cores(fractions, cores_present(), oversubscribe=oversubscribe)
    vendor, cpu = cpu_name()
    host_bytes = host_memory_bytes()
    devices = []
    for index, device in enumerate(spec.emulated):
        limit_bytes = device.memory_limit_bytes
        if limit_bytes is not None and limit_bytes > host_bytes:
            msg = (
                f"emulated:{index}: memory limit of {limit_bytes} bytes is above the "
                f"{host_bytes} bytes of this host; lower it"
            )
            raise ConfigError(msg)
        devices.append(
            DeviceProfile(
                device_id=f"emulated:{index}",
                node_id=node_id(),
                vendor=vendor,
                kind="emulated",
                name=f"{device.core_fraction:g} core of {cpu}",
                # They share one host: together they must not plan for more than it has.
                memory_bytes=limit_bytes or host_bytes // len(spec.emulated),
                core_fraction=device.core_fraction,
                memory_limit_bytes=limit_bytes,
                source="emulated",
                # The whole fleet: the devices were measured side by side.
                fingerprint=fingerprint(cpu, spec.text, index),
            )
        )
    return Fleet(devices=tuple(devices), spec=spec.text, oversubscribed=over)


def _fleet_from_file(spec: FleetSpec, *, oversubscribe: bool) -> Fleet:
    assert spec.path is not None, "a spec of this form has a path"
    fleet = read_document(spec.path, Fleet)
    fractions = [d.core_fraction for d in fleet.devices if d.core_fraction is not None]
    over = check_cores(fractions, cores_present(), oversubscribe=oversubscribe)
    real = tuple(d.device_id for d in fleet.devices if d.kind != "emulated")
    _select(real, f"fleet file {spec.path}")
    return dataclasses.replace(fleet, oversubscribed=over)


def _local_fleet(spec: FleetSpec) -> Fleet:
    if spec.form == "local":
        return Fleet(devices=_list_local(None), spec="local")
    devices = _select(spec.device_ids, f"fleet {spec.text!r}")
    return Fleet(devices=devices, spec=spec.text)


def _select(device_ids: Sequence[str], source: str) -> tuple[DeviceProfile, ...]:
    if not device_ids:
        return ()
    present = {device.device_id: device for device in _list_local(device_ids)}
    absent = [device_id for device_id in device_ids if device_id not in present]
    if absent:
        listed = ", ".join(present)
        msg = f"{source}: {', '.join(absent)} is not here; present are {listed}"
        raise ConfigError(msg)
    return tuple(present[device_id] for device_id in device_ids)


def _list_local(device_ids: Sequence[str] | None) -> tuple[DeviceProfile, ...]:
    if device_ids is not None and set(device_ids) <= {"cpu"}:
        return load_adapter("cpu").list_devices()  # without the seconds torch takes
    with probe_client() as client:
        return client.ask(ProbeRequest(action="list"))
