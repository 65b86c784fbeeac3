"""Who sends which part of a gradient to whom: pure choices from a measured topology."""

from geartrain.planner.exchange.schedule import (
    CodecProfile,
    CommSchedule,
    RackPart,
    ScheduleBook,
)

__all__ = ["CodecProfile", "CommSchedule", "RackPart", "ScheduleBook"]
