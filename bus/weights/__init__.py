"""Weights by reference: an event announces a version, its bytes go by directory or bus, full or as deltas."""

from bus.weights.cache import HostCache
from bus.weights.directory import WeightStore
from bus.weights.files import WeightsCorrupt, WeightsError, WeightsMissing, sync_folder
from bus.weights.reader import Local, WeightReader
from bus.weights.writer import Snapshot, WeightWriter

__all__ = [
    "HostCache",
    "Local",
    "Snapshot",
    "WeightReader",
    "WeightStore",
    "WeightWriter",
    "WeightsCorrupt",
    "WeightsError",
    "WeightsMissing",
    "sync_folder",
]
