"""Conversations: rows of messages, answers and preferences to tokens, with a mark on those that a model learns. No torch."""
