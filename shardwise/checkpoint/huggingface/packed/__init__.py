"""Hugging Face folders whose weights have 8 or 4 bits: what their configs say, and their matrices as ours and back."""
