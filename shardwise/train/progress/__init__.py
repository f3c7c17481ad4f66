"""What a run says of itself: results of steps, metrics, speed, samples of text, the lines on a terminal."""
