"""What joins training and serving: answers made by the engine with the weights that are being trained, judged, and learned from."""
