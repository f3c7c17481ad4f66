"""A load generator for any server of OpenAI's API: `run.py` makes the requests over `client.py`, `summary.py` says how long they
took, `picture.py` draws it."""
