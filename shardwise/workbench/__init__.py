"""The workbench: a page on this machine where a run's keys are controls, and the plan follows; and runs watched as they train."""
