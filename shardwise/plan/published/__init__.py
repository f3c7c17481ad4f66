"""Published measurements as rows, predicted by the same cost model, and how far the predictions were off."""
