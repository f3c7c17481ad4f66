"""Conversations: rows of messages, answers and preferences to tokens, with a mask of the tokens to learn. No torch."""
