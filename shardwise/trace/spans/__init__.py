"""What a rank did when: sets of intervals, steps, classes of work, which span lies in which, and the first breakdown."""
