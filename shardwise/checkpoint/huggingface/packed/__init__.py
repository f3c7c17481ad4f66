"""Hugging Face folders with 8-bit or 4-bit weights: reads their configs, and converts their matrices to ours and back."""
