"""For all tests: what a busy machine makes slow is not wrong."""

from hypothesis import HealthCheck, settings

settings.register_profile("by result", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("by result")
