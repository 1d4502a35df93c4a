"""Stages 1 to 6: from problems to graded rollout batches, under a schedule; and pass rates measured before."""
