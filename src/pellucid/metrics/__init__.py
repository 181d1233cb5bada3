"""Metrics: values that know their reduction, and sinks that receive them."""

from pellucid.metrics.sinks import JsonlSink, Sink, read_metrics
from pellucid.metrics.timing import Stopwatch
from pellucid.metrics.values import Max, Mean, Metric, MetricSet, Moments, Sum

__all__ = [
    "JsonlSink",
    "Max",
    "Mean",
    "Metric",
    "MetricSet",
    "Moments",
    "Sink",
    "Stopwatch",
    "Sum",
    "read_metrics",
]
