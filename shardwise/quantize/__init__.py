"""Weights in fewer bits with the help of data: GPTQ, AWQ and SmoothQuant, a layer at a time, with perplexities."""
