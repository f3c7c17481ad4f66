"""What to change first: rules that each look at one thing in the answers and say nothing where the evidence is thin."""
