"""Metrics: values that know their reduction, and sinks that receive them."""

from pellucid.metrics.sinks import (
    Guarded,
    JsonlSink,
    Sink,
    Tee,
    drop_metrics,
    open_sinks,
    parse_metrics,
    read_metrics,
)
from pellucid.metrics.values import Max, Mean, MeanZeroTest, MetricSet, Moments, NamedMoments, Stopwatch, Sum

__all__ = [
    "Guarded",
    "JsonlSink",
    "Max",
    "Mean",
    "MeanZeroTest",
    "MetricSet",
    "Moments",
    "NamedMoments",
    "Sink",
    "Stopwatch",
    "Sum",
    "Tee",
    "drop_metrics",
    "open_sinks",
    "parse_metrics",
    "read_metrics",
]
