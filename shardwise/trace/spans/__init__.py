"""Arithmetic on intervals and nested spans, the activity of a rank's device or threads, and the selected steps."""
