"""Parses Kineto traces into columns: plain or gzipped JSON, complete or damaged, exact to the nanosecond, cached as Parquet."""
