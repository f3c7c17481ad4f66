"""Published rules for what a document must be, each a function of one document with its source beside it.

A rule answers with the reason why a document goes, or "" when it stays. Thresholds are arguments, which a recipe may set; their
defaults are those of the publication.
"""
