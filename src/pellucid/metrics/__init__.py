"""Metrics: values that know their reduction, and sinks that receive them."""

from pellucid.metrics.open import open_sinks
from pellucid.metrics.sinks import Guarded, JsonlSink, Sink, Tee, drop_metrics, parse_metrics, read_metrics
from pellucid.metrics.timing import Stopwatch
from pellucid.metrics.values import Max, Mean, Metric, MetricSet, Moments, NamedMoments, Sum

__all__ = [
    "Guarded",
    "JsonlSink",
    "Max",
    "Mean",
    "Metric",
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
