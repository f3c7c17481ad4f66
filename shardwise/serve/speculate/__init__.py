"""Speculative decoding (Leviathan et al. 2023, Chen et al. 2023): tokens are guessed cheaply, and one step of the model verifies
several of them, since a step of few tokens takes as long as reading the weights.

A draw depends on the sequence's seed, the position and the scores alone (`sampler.py`), so every position of a guess is drawn as it
would have been without it, and the guess is right as far as it is what was drawn. Answers are therefore the same tokens with and
without speculation, whatever is asked of sampling, and not just as likely. A guess by the sequence's own tokens is then right as
often as rejection sampling would accept it. A draft model draws with the same noise, which makes it agree with probability
sum over x of 1 / sum over y of max(p(y)/p(x), q(y)/q(x)), between (1 - d) / (1 + d) and 1 - d for a total variation d of the two
(Daliri, Musco and Suresh 2024); rejection sampling would accept 1 - d, and give other tokens for a seed.

`ngram.py` guesses by what followed the same tokens before, `draft.py` by a small model, `masks.py` follows grammars along guesses,
and `counts.py` says how many were right.
"""
