"""The ledger's records for people: in the terminal, as one HTML file that works offline, and as a trace for Perfetto.

`terminal` and `html` have functions of the same names. What they share is in `words` (numbers with units), `colors` and `pick`
(what a chart shows of a record). `page.js` and `page.css` are put into every HTML file.
"""
