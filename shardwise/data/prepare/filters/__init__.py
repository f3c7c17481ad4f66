"""Published filter rules, each a function of one document that cites its source.

A rule returns the reason for removing a document, or "" to keep it. Thresholds are arguments, which a recipe may set; their
defaults are those of the publication.
"""
