"""The learner's side of a model: weights, log-probs, microbatches, optimiser."""
