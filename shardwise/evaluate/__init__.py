"""What a model is worth: the loss of any data set, tasks with answers, and the models that other harnesses ask."""
