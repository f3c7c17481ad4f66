"""The workbench: a local page where a run's keys are controls and the plan follows them, and one that follows runs as they
train."""
