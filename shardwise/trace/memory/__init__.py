"""Snapshots of PyTorch's CUDA allocator: `snapshot.py` reads them, `history.py` says who held what when, and what the peak is."""
