"""Metrics that every callback logs."""

from lightning_normtheory.record.metric_info import MetricInfo

METRICS = (
    MetricInfo("seconds", "all", "seconds of the whole measurement", "cost", kind="seconds", extreme="max"),
    MetricInfo(
        "skipped", "skipped", "1 if max_overhead skipped the measurement", "skipped", kind="flag", extreme="max"
    ),
)
