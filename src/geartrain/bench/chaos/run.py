"""One chaos run, from the options to what came of it."""

from __future__ import annotations

import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from geartrain.bench.chaos.capabilities import (
    Asked,
    can_lose_first_rank,
    can_rejoin,
    find_missing,
)
from geartrain.bench.chaos.deeds import Scene
from geartrain.bench.chaos.driver import Driver, DriverSettings
from geartrain.bench.chaos.evidence import Deed, Ending, Evidence, FlippedBit, Reference
from geartrain.bench.chaos.flipped_bits import judge_flips
from geartrain.bench.chaos.kinds import FaultKind, choose_kinds
from geartrain.bench.chaos.leftovers import end_marked, find_leftovers
from geartrain.bench.chaos.reference import (
    RUNNER,
    ReferenceSettings,
    final_weights,
    train_reference,
)
from geartrain.bench.chaos.result import ChaosResult
from geartrain.bench.chaos.run_process import RunProcess, RunSettings
from geartrain.bench.chaos.schedule import (
    Fault,
    ScheduleSettings,
    count_by_kind,
    make_schedule,
)
from geartrain.bench.chaos.settings import ChaosOptions
from geartrain.bench.chaos.sum_up import sum_up
from geartrain.bench.chaos.trace import ReplaySettings, parse_trace, replay
from geartrain.bench.chaos.witness_log import WitnessFolder, read_statements
from geartrain.devices.emulation.network import NetworkSpec, parse_links
from geartrain.devices.profile import Fleet
from geartrain.launch.run_directory import order_fleet
from geartrain.telemetry import RunEvent, RunLogReader, StepRecord
from geartrain.units import format_seconds

Say = Callable[[str], None]

_STOP_TIMEOUT_S = 90.0
_REFERENCE_START_S = 120.0
_COMEBACKS = ("--max-respawn-wait=1", "--max-device-failures=1000000")
"""Devices are hit again and again on purpose: none is given up for that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Plan:
    """What will be done, decided before anything is started."""

    options: ChaosOptions
    fleet: Fleet
    links: NetworkSpec | None
    kinds: tuple[FaultKind, ...]
    faults: tuple[Fault, ...]
    protected: tuple[str, ...]
    folder: Path
    mark: str

    @property
    def device_ids(self) -> tuple[str, ...]:
        return tuple(device.device_id for device in self.fleet.devices)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def witness_dir(self) -> Path:
        return self.folder / "witness"

    @property
    def disk_bytes(self) -> int | None:
        fills = any(fault.kind == "disk_full" for fault in self.faults)
        return self.options.disk_bytes if fills else None


def run_chaos(options: ChaosOptions, fleet: Fleet, say: Say) -> ChaosResult:
    """Train under faults and check what must hold.

    Args:
        options: What is asked.
        fleet: The devices of ``options.devices``, resolved.
        say: Told what goes on.

    Raises:
        ConfigError: If an option is wrong or a kind of fault is not possible.
        DeviceError: If the training does not begin.
    """
    plan = _plan(options, order_fleet(fleet))
    counts = ", ".join(f"{n} {kind}" for kind, n in count_by_kind(plan.faults).items())
    say(
        f"seed {options.seed}: {len(plan.faults)} faults in {options.duration_s:g} s "
        f"({counts or 'none'}); all that is written goes to {plan.folder}"
    )
    try:
        driver, ending = _drive(plan, say)
        evidence = _gather(plan, driver, ending, say)
    finally:
        end_marked(plan.mark)  # whatever an error or Ctrl-C left running
    return sum_up(evidence, options, os.getloadavg()[0])


def _plan(options: ChaosOptions, fleet: Fleet) -> _Plan:
    links = None
    if options.links is not None:
        links = parse_links(options.links, len(fleet.devices))
    asked = Asked(
        fleet=fleet, has_links=links is not None, saves=options.saved_place is not None
    )
    kinds = choose_kinds(options.kinds, find_missing(asked))
    device_ids = tuple(device.device_id for device in fleet.devices)
    protected = () if can_lose_first_rank() else device_ids[:1]
    schedule = ScheduleSettings(
        seed=options.seed,
        duration_s=options.duration_s,
        faults_per_s=options.faults_per_s,
        device_ids=device_ids,
        kinds=kinds,
        min_left=min(options.min_left, len(device_ids)),
        can_rejoin=can_rejoin(),
        protected=protected,
    )
    return _Plan(
        options=options,
        fleet=fleet,
        links=links,
        kinds=kinds,
        faults=_choose_faults(options, schedule),
        protected=protected,
        folder=_make_folder(options),
        mark=secrets.token_hex(8),
    )


def _choose_faults(options: ChaosOptions, schedule: ScheduleSettings) -> tuple[Fault, ...]:
    if options.trace is None:
        return make_schedule(schedule)
    settings = ReplaySettings(
        device_ids=schedule.device_ids,
        kinds=schedule.kinds,
        speed=options.speed,
        duration_s=options.duration_s,
        seed=options.seed,
    )
    return replay(parse_trace(options.trace), settings).faults


def _make_folder(options: ChaosOptions) -> Path:
    if options.output is not None:
        options.output.mkdir(parents=True, exist_ok=True)
        return options.output.resolve()
    runs = Path("runs")
    runs.mkdir(exist_ok=True)
    name = time.strftime("%Y%m%d-%H%M%S") + f"-chaos-{options.seed}-"
    folder = Path(tempfile.mkdtemp(prefix=name, dir=runs)).resolve()
    folder.chmod(0o755)
    return folder


def _drive(plan: _Plan, say: Say) -> tuple[Driver, Ending]:
    run = RunProcess(
        RunSettings(
            mark=plan.mark,
            arguments=_run_arguments(plan),
            run_dir=plan.run_dir,
            log_path=plan.folder / "launcher.log",
            disk_bytes=plan.disk_bytes,
        )
    )
    try:
        driver = _make_driver(plan, run, say)
        driver.drive()
        say("no more faults; the run is asked to stop")
        ending = run.stop(_STOP_TIMEOUT_S)
    finally:
        run.close()
    return driver, ending


def _run_arguments(plan: _Plan) -> tuple[str, ...]:
    options = plan.options
    flags = ["--deterministic"] if options.deterministic else []
    flags += ["--oversubscribe"] if options.oversubscribe else []
    flags += [] if options.links is None else ["--links", options.links]
    script = str(options.script_path.resolve())
    return (
        "run",
        f"--fleet={options.devices}",
        f"--run-dir={plan.run_dir}",
        *_COMEBACKS,
        *flags,
        "--json",
        str(RUNNER),
        str(plan.witness_dir),
        "0",
        script,
        *options.arguments_for(plan.run_dir),
    )


def _make_driver(plan: _Plan, run: RunProcess, say: Say) -> Driver:
    options = plan.options
    place = options.saved_place
    scene = Scene(
        launcher_id=run.process_id,
        mark=plan.mark,
        run_dir=run.run_dir,
        folder=plan.folder,
        core_fractions={
            device.device_id: device.core_fraction
            for device in plan.fleet.devices
            if device.core_fraction is not None
        },
        links=plan.links,
        saved=None if place is None else Path(place),
        seed=options.seed,
    )
    settings = DriverSettings(
        faults=plan.faults,
        duration_s=options.duration_s,
        device_ids=plan.device_ids,
        min_left=min(options.min_left, len(plan.device_ids)),
        protected=plan.protected,
    )
    return Driver(settings, scene, run, WitnessFolder(plan.witness_dir), say)


def _gather(plan: _Plan, driver: Driver, ending: Ending, say: Say) -> Evidence:
    statements = read_statements(plan.witness_dir)
    ids = [statement.hello.pid for statement in statements]
    leftovers = find_leftovers(plan.mark, driver.scene.launcher_id, ids)
    records, events = _read_log(plan.run_dir)
    num_steps = max((c.step for t in statements for c in t.commits), default=0)
    deeds = tuple(driver.deeds)
    reference = Reference(statement=None, why_not="no reference was wanted")
    if plan.options.with_reference and num_steps:
        say(f"training {num_steps} steps without faults")
        settings = _reference_settings(plan, deeds)
        weights = final_weights(plan.witness_dir, statements)
        started_at_s = time.monotonic()
        reference = train_reference(settings, num_steps, weights)
        say(f"that took {format_seconds(time.monotonic() - started_at_s)}")
    flips: tuple[FlippedBit, ...] = judge_flips(plan.folder / "flips", plan.mark)
    return Evidence(
        folder=plan.folder,
        device_ids=plan.device_ids,
        began_at_s=driver.began_at_s,
        ended_at_s=driver.ended_at_s,
        calm_step_s=driver.calm_step_s,
        deeds=deeds,
        statements=statements,
        records=records,
        events=events,
        ending=ending,
        reference=reference,
        flips=flips,
        leftovers=tuple(leftovers),
        max_pause_s=plan.options.max_pause_s,
    )


def _reference_settings(plan: _Plan, deeds: Sequence[Deed]) -> ReferenceSettings:
    options = plan.options
    # The same shares sum in the same order, as long as nobody is lost.
    same_shares = options.deterministic and not any(d.loses_device for d in deeds)
    launcher: tuple[str, ...] = ()
    if same_shares:
        where = f"--run-dir={plan.folder / 'reference-run'}"
        launcher = ("run", f"--fleet={options.devices}", where, "--deterministic")
        launcher += ("--oversubscribe",) if options.oversubscribe else ()
    return ReferenceSettings(
        script=options.script_path,
        arguments=options.reference_arguments,
        folder=plan.folder / "reference",
        mark=plan.mark,
        # One device makes alone what the fleet made together.
        timeout_s=_REFERENCE_START_S + len(plan.device_ids) * 4 * options.duration_s,
        needs_same_bits=options.is_built_in or same_shares,
        tolerance=options.tolerance,
        launcher_arguments=launcher,
    )


def _read_log(run_dir: Path) -> tuple[tuple[StepRecord, ...], tuple[RunEvent, ...]]:
    reader = RunLogReader(run_dir)
    try:
        return tuple(reader.new_steps()), tuple(reader.new_events())
    finally:
        reader.close()
