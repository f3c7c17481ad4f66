"""Results that do not depend on what else is in the batch."""
