"""The HTTP server: OpenAI's API before a service.

`app.py` finds who answers, `completions.py` and `chat.py` read requests (`fields.py`, `ask.py`) and write answers (`answers.py`,
`stream.py`), `guard.py` keeps connections within `limits.py`, and `listen.py` runs it all until it is told to end.
"""
