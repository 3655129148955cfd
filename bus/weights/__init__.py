"""Weights by reference: an event announces a version, its bytes go by directory or bus, full or as deltas."""

from bus.weights.directory import WeightStore
from bus.weights.files import WeightsCorrupt, WeightsError, WeightsMissing, sync_folder
from schemas import WeightVersion

WeightFile = WeightVersion

__all__ = ["WeightFile", "WeightStore", "WeightsCorrupt", "WeightsError", "WeightsMissing", "sync_folder"]
