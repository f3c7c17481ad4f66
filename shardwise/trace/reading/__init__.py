"""From Kineto files to columns: gzipped or plain JSON, broken or whole, exact to the nanosecond, cached as Parquet."""
