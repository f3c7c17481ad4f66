"""Renders the ledger's records: in the terminal, as one HTML file that works offline, and as a Chrome trace for Perfetto.

`terminal` and `html` have functions of the same names. They share `words` (numbers with units), `colors` and `pick` (which parts of
a record a chart shows). `page.js` and `page.css` are inlined into every HTML file.
"""
