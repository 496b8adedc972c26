"""Throughput and latency that one can quote: ``vllm bench serve`` behind guards, repeated, with what it is comparable to."""

from pipeline.bench.key import compare, comparability
from pipeline.bench.runner import bench
from pipeline.bench.settings import BenchSettings

__all__ = ["BenchSettings", "bench", "comparability", "compare"]
