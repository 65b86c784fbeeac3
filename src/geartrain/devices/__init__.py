"""What is there: device profiles, probes, and one adapter a vendor."""

from geartrain.devices.profile import DeviceProfile, Fleet, MeasuredRate

__all__ = ["DeviceProfile", "Fleet", "MeasuredRate"]
