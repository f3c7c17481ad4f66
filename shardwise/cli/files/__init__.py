"""Verbs that turn files into other files: text into token shards, weights into other formats and fewer bits."""
