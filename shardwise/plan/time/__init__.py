"""From the cost of operations to the time of a step, its timeline, and the time of a whole job."""
