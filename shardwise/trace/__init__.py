"""Read profiles of PyTorch programs and say where the time went. No torch here."""
