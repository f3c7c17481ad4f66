"""What a step gets: batches of a source, their microbatches, what a reference or teacher says of them."""
