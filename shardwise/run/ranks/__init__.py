"""Where a rank is in a layout, and which slice of each parameter it holds, in training and in serving. No torch."""
