"""From problems to graded responses, under a schedule."""
