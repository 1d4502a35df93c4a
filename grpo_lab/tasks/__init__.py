"""Where problems, their wording, their verifiers and the models that answer them come from."""
