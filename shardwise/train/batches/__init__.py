"""The inputs of a step: batches from a source, their microbatches, and the log-probabilities of a reference or teacher."""
