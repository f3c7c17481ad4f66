"""From raw files to a corpus to train on: read, extracted, filtered, deduplicated, mixed; with the fate of every document.

A document has a name, its file and place there. Steps are functions of one document, or comparisons by keys. Tasks are pure
functions of files, so neither who does them nor how often changes a byte, and no task's memory grows with the corpus.
"""
