"""Counts what a rank computes, holds and sends, as it does so."""
