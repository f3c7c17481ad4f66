"""Reinforcement learning, which joins training and serving: the engine generates answers with the weights being trained, reward
functions judge them, and training learns from them."""
