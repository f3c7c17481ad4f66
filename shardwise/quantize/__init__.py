"""Quantization with calibration data: GPTQ, AWQ and SmoothQuant, a layer at a time, with perplexities."""
