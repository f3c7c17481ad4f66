"""From raw files to a training corpus: read, extract, filter, deduplicate and mix, with a record of every document's fate.

A document is named by its file and its position there. A step is a function of one document, or a comparison of documents by keys.
Tasks are pure functions of files, so the output is the same bytes whichever worker runs a task and however often, and no task's
memory grows with the corpus.
"""
