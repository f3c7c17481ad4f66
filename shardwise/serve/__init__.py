"""Serving: an engine that continues many token sequences at once, and an HTTP server in front of it.

`request.py` defines requests and outputs. `engine.py` runs them step by step: the scheduler (`schedules/serving`) chooses what a
step computes, `runner.py` computes it with the model of `shardwise/model` over a paged KV cache, `sampler.py` samples tokens.
`server/` speaks OpenAI's HTTP API, `load/` measures any server of that API.
"""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
