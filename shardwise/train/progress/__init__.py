"""What a run reports about itself: step results, metrics, speed, text samples, and the lines on a terminal."""
