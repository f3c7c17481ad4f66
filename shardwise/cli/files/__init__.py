"""Verbs that make files of other files: token shards of text, weights of other formats and in fewer bits."""
