"""The models beside the one that a run trains or serves: a draft that guesses tokens, a teacher to learn from."""
