"""From a rollout batch to an optimiser step, and the numbers of both."""
