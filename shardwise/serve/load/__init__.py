"""A load generator for any server of OpenAI's API: `run.py` makes the requests over `client.py` and computes their
latencies, `report/load_view.py` draws them."""
