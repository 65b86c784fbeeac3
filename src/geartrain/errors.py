"""The error tree: the class says what the caller can do about it."""


class GeartrainError(Exception):
    """Any deliberate error of geartrain."""


class ConfigError(GeartrainError):
    """The input is wrong: fix the value that the message names."""


class InfeasiblePlanError(GeartrainError):
    """No plan exists for this fleet and workload: change one of them."""


class DeviceError(GeartrainError):
    """A device is absent, refuses what was asked, or ran out of memory."""


class CommunicationError(GeartrainError):
    """Peers could not be reached in time; the step was not applied anywhere."""


class CheckpointError(GeartrainError):
    """A snapshot could not be written, or what was read is not what was saved."""


class TrainingStopped(GeartrainError):  # noqa: N818 - a request, not a fault
    """All ranks agreed to stop at a step boundary; the state has been saved."""


class LeftTraining(TrainingStopped):
    """This process has left in order, as it was asked to; the others go on without it."""
