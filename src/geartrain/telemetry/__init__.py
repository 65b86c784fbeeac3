"""What is written down about a run: one StepRecord per device per step."""

from geartrain.telemetry.documents import (
    decode_document,
    encode_document,
    read_document,
    write_document,
)
from geartrain.telemetry.records import (
    EventKind,
    RecoveryReport,
    RunEvent,
    RunManifest,
    StepRecord,
)
from geartrain.telemetry.run_log import LogEnd, RunLogReader, RunLogWriter

__all__ = [
    "EventKind",
    "LogEnd",
    "RecoveryReport",
    "RunEvent",
    "RunLogReader",
    "RunLogWriter",
    "RunManifest",
    "StepRecord",
    "decode_document",
    "encode_document",
    "read_document",
    "write_document",
]
