"""Published measurements: rows as training jobs (`rows.py`) and as serving setups (`serving_rows.py`), and the errors of the
predictions (`validate.py`). The rows are the JSON files in this folder."""
