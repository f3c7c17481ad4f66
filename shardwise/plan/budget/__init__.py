"""From a budget to a model: laws of the loss, the planner's speed and the price list, together."""
