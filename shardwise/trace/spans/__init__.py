"""What a rank did when: intervals and nesting, the activity of its device or threads, and the steps looked at."""
