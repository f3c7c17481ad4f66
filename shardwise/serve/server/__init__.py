"""The HTTP server: OpenAI's API in front of a service.

`app.py` routes requests, `completions.py` and `chat.py` read them (`fields.py`, `ask.py`) and write answers (`answers.py`,
`stream.py`), `address.py` keeps connections within `limits.py`, and `listen.py` runs the server until it is told to end.
"""
