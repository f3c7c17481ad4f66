"""From Kineto files to columns: gzip or plain JSON, broken or whole, exact to the nanosecond, remembered in Parquet."""
