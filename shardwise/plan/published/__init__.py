"""Published measurements: rows as jobs (`rows.py`) and as servings (`serving_rows.py`), and how far the predictions are off
(`validate.py`). The rows are the JSON files beside these."""
