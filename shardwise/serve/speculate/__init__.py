"""Speculative decoding (Leviathan et al. 2023, Chen et al. 2023): tokens are drafted cheaply, and one step of the model verifies
several of them, since a step of few tokens takes as long as reading the weights.

A draw depends on the sequence's seed, the position and the scores alone (`sampler.py`). So every draft position is sampled as it
would have been without drafts, and a draft is accepted as long as it equals the sampled tokens. Answers are therefore the very
same tokens with and without speculation, whatever the sampling parameters, and not only equally likely. An n-gram draft is then
accepted as often as with rejection sampling. A draft model draws with the same noise, so it agrees with probability sum over x of
1 / sum over y of max(p(y)/p(x), q(y)/q(x)), between (1 - d) / (1 + d) and 1 - d for a total variation d of the two (Daliri, Musco
and Suresh 2024); rejection sampling would accept 1 - d, and return other tokens for a seed.

`ngram.py` drafts the tokens that followed the same n-gram before, `draft.py` uses a draft model, and `drafter.py` says what the
engine asks of both and counts how many drafts were accepted.
"""
