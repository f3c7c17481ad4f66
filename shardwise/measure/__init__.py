"""What a real run does: operations, bytes and memory counted, this machine measured, and the plan held against both."""
