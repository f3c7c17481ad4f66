"""Serving: an engine that continues many token sequences at once, and an HTTP server in front of it.

`request.py` says what is asked and answered, `engine.py` does it step by step: the scheduler (`schedules/serving`) chooses what a
step computes, `runner.py` computes it with the model of `shardwise/model` over a cache of pages, `sampler.py` picks tokens.
`server/` speaks OpenAI's HTTP API, `load/` measures any server that does.
"""

import sys

from shardwise import VerbFolder

sys.modules[__name__] = VerbFolder(globals())
