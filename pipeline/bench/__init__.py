"""Throughput and latency that one can quote: ``vllm bench serve`` behind guards, repeated, and comparable or not."""

from pipeline.bench.key import comparability, compare
from pipeline.bench.runner import bench
from pipeline.bench.settings import BenchSettings

__all__ = ["BenchSettings", "bench", "comparability", "compare"]
