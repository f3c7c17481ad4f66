"""The ledger's records for people: in the terminal, as one HTML file that works offline, and as a trace for Perfetto.

`terminal` and `html` have functions of the same names; what they share (numbers in words, colours, what is picked out of
a record) is in `words`, `colors` and `pick`.
"""
