"""Snapshots of PyTorch's CUDA allocator: `snapshot.py` reads them, `story.py` says who held how much when, and what the peak is."""
