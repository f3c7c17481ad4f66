"""From a budget to a model: combines scaling laws, the planner's throughput and the price list."""
